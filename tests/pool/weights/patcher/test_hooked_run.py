"""Weights that follow hooks: exact at every step, restored whatever happens, within the shelf's bytes.

Proves: a constant hook is the LoRA; two conditions with different hooks are what each is alone; a schedule is what
stepping by hand gives; with and without a shelf the same bits; nothing is uploaded that need not be.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.options.callbacks import CallbackPoint
from modelpool.pool.weights.patcher.comfy_patches import weight_wrapper
from modelpool.pool.weights.patcher.hooked_run import hooked_run
from modelpool.pool.weights.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.weights.patcher.keyframes import HookKeyframe, HookKeyframes, interpolated
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.patched_weight_cache import CachedWeights, PatchedWeightCache
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.inference.sampling.one_image import guided
from tests.pool.toy import Toy, make_toy, patches_for

DEVICE = "sim:0"  # a name until `sim.install` has run
PLENTY_BYTES = 1 << 30
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
MODULES = ("table", "wide", "narrow", "norm", "gain", "conv")
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight")
TABLE = sd1_sigma_table()
SIGMAS = make_sigmas("normal", 6, TABLE).tolist()[:-1]
FADING = HookKeyframes((HookKeyframe(1.0), HookKeyframe(0.5, 0.6, 0), HookKeyframe(0.0, 0.9, 0)))
SHELVES = pytest.mark.parametrize("cache_bytes", [0, 6000, PLENTY_BYTES])
RESIDENT = pytest.mark.parametrize("resident", [MODULES, ("wide", "table"), ()], ids=["all", "some", "none"])


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, PLENTY_BYTES)
    sim.reset_counters(0)


def patcher_of(toy: Toy, resident: tuple[str, ...] = MODULES, base: PatchSet | None = None) -> ModelPatcher:
    form = WeightForm(torch.float32)
    patcher = ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, torch.device(DEVICE), form)
    patcher.add_patches((base or PatchSet()).patches)
    patcher.realize(WeightsTarget(frozenset(resident), patcher.patches))
    return patcher


def output(patcher: ModelPatcher) -> Tensor:
    with patcher.running() as module:
        return module(IDS_BL.to(patcher.device)).to("cpu")


def with_patches(patches: PatchSet) -> Tensor:
    return output(patcher_of(make_toy(), base=patches))


def hook(identity: str, *names: str, strength: float = 1.0, keyframes: HookKeyframes | None = None) -> WeightHook:
    patches = patches_for(make_toy(), identity, names or WEIGHTS, 0.7)
    return WeightHook(patches.patches, strength, keyframes or HookKeyframes())


def group(*hooks: WeightHook) -> HookGroup:
    return HookGroup().with_hooks(hooks)


@RESIDENT
@SHELVES
def test_a_constant_hook_is_the_plain_lora(resident: tuple[str, ...], cache_bytes: int) -> None:
    lora = hook("a")
    patcher = patcher_of(make_toy(), resident)
    plain = output(patcher)
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks:
        for sigma in SIGMAS:
            apply_hooks(group(lora), sigma)
            assert torch.equal(output(patcher), with_patches(PatchSet(lora.patches)))
    assert torch.equal(output(patcher), plain)
    assert patcher.resident_modules() == frozenset(resident)


@RESIDENT
@SHELVES
def test_a_schedule_is_what_stepping_by_hand_gives(resident: tuple[str, ...], cache_bytes: int) -> None:
    base = patches_for(make_toy(), "base", ("narrow.weight", "table.weight"))
    fading = hook("a", keyframes=FADING, strength=0.5)
    patcher = patcher_of(make_toy(), resident, base)
    expected = [base.with_patches(fading.patches_at(s)) for s in (1.0, 1.0, 1.0, 0.5, 0.5, 0.0)]
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks:
        for sigma, patches in zip(SIGMAS, expected, strict=True):
            apply_hooks(group(fading), sigma)
            assert torch.equal(output(patcher), with_patches(patches))
    assert torch.equal(output(patcher), with_patches(base))


@SHELVES
def test_two_conditions_with_different_hooks_are_what_each_is_alone(cache_bytes: int) -> None:
    groups = (group(hook("a", keyframes=FADING)), group(hook("b", "wide.weight")), None)

    def alone(one: HookGroup | None) -> list[Tensor]:
        patcher = patcher_of(make_toy())
        with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
            return [(apply_hooks(one, sigma), output(patcher))[1] for sigma in SIGMAS]

    patcher = patcher_of(make_toy())
    together: list[list[Tensor]] = [[], [], []]
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks:
        for sigma in SIGMAS:
            for number, one in enumerate(groups):
                apply_hooks(one, sigma)
                together[number].append(output(patcher))
    for outputs, one in zip(together, groups, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(outputs, alone(one), strict=True))


def test_conditions_of_a_guided_run_get_their_own_weights() -> None:
    """Through the denoiser: as if each text had a model of its own."""
    groups = group(hook("a", keyframes=FADING)), group(hook("b", "wide.weight"))
    texts = torch.full((1, 3, 2), 1.0), torch.full((1, 3, 2), -1.0)
    x = torch.randn(1, 16, 5, 1, generator=torch.Generator().manual_seed(1))

    def model_of(patcher: ModelPatcher):
        def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
            with patcher.running() as module:
                seen = module(IDS_BL[:1].to(patcher.device)).to("cpu")
            return x_BCHW * 0.5 + seen * context_BLD.mean()

        return predict

    patcher = patcher_of(make_toy())
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
        cond, uncond = (Condition(text, one) for text, one in zip(texts, groups, strict=True))
        denoise = guided(model_of(patcher), TABLE, cond, uncond, 4.0, None, apply_hooks)
        found = denoise(x, SIGMAS[0])
    guesses = []
    for text, one in zip(texts, groups, strict=True):
        single = model_of(patcher_of(make_toy(), base=one.on(PatchSet(), [1.0])))
        guesses.append(guided(single, TABLE, text, None, 1.0)(x, SIGMAS[0]))
    torch.testing.assert_close(found, guesses[1] + (guesses[0] - guesses[1]) * 4.0, rtol=1e-4, atol=1e-4)


def test_nothing_moves_while_strengths_stay() -> None:
    patcher = patcher_of(make_toy())
    told: list[str] = []
    callback = lambda patcher, patches: told.append(patches.digest)  # noqa: E731
    patcher.state = patcher.state.with_callback(CallbackPoint.ON_APPLY_HOOKS, callback)
    fading = group(hook("a", keyframes=FADING))
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
        uploads = []
        for sigma in SIGMAS:
            before = sim.memory_stats(0).h2d_bytes
            apply_hooks(fading, sigma)
            uploads.append(sim.memory_stats(0).h2d_bytes - before > 0)
    assert uploads == [True, False, False, True, False, True]
    assert len(told) == 3


def test_a_shelf_makes_switching_back_free() -> None:
    """Two conditions in turn: after the first step, neither weights nor factors cross the bus."""
    a, b = group(hook("a")), group(hook("b"))
    patcher = patcher_of(make_toy())
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, PLENTY_BYTES) as apply_hooks:
        for one in (a, b, a):
            apply_hooks(one, SIGMAS[0])
        before = sim.memory_stats(0).h2d_bytes
        for sigma in SIGMAS:
            for one in (b, None, a):
                apply_hooks(one, sigma)
        assert sim.memory_stats(0).h2d_bytes == before
    assert sim.memory_stats(0).h2d_bytes == before
    assert sim.memory_stats(0).used_bytes == patcher.resident().resident_bytes


@pytest.mark.parametrize("cache_bytes", [0, 3000, 6000, 12000])
def test_the_device_never_holds_more_than_the_shelf_beside_the_weights(cache_bytes: int) -> None:
    patcher = patcher_of(make_toy())
    groups = [group(hook(name)) for name in "abc"]
    held_bytes = patcher.resident().resident_bytes
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks:
        for sigma in SIGMAS:
            for one in (*groups, None):
                apply_hooks(one, sigma)
                assert sim.memory_stats(0).used_bytes <= held_bytes + cache_bytes
    assert sim.memory_stats(0).used_bytes == held_bytes


def test_a_shelf_is_given_up_when_the_device_is_full() -> None:
    patcher = patcher_of(make_toy())
    groups = [group(hook(name)) for name in "abcd"]
    expected = [with_patches(PatchSet(hook(name).patches)) for name in "abcd"]
    largest_clone = patcher.clone()
    largest_clone.patches = groups[0].at_most(patcher.patches)
    activation_bytes = 6 * 4 * IDS_BL.numel() * 64 + IDS_BL.nbytes
    sim.configure(0, patcher.resident().resident_bytes + largest_clone.use().scratch_bytes + activation_bytes)
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, PLENTY_BYTES) as apply_hooks:
        for _ in range(4):
            for one, wanted in zip(groups, expected, strict=True):
                apply_hooks(one, SIGMAS[0])
                assert torch.equal(output(patcher), wanted)


class Ended(Exception):
    """The run was ended from outside."""


@pytest.mark.parametrize("cache_bytes", [0, PLENTY_BYTES])
@pytest.mark.parametrize("last", range(len(SIGMAS)))
def test_an_end_at_any_step_restores_the_weights(last: int, cache_bytes: int) -> None:
    base = patches_for(make_toy(), "base", ("wide.weight",))
    patcher = patcher_of(make_toy(), ("wide", "conv"), base)
    plain, held = output(patcher), patcher.resident()
    groups = group(hook("a", keyframes=FADING)), group(hook("b"))

    def run() -> None:
        with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks:
            for step, sigma in enumerate(SIGMAS):
                for one in groups:
                    apply_hooks(one, sigma)
                if step == last:
                    raise Ended

    with pytest.raises(Ended):
        run()
    assert patcher.resident() == held
    assert torch.equal(output(patcher), plain)
    assert sim.memory_stats(0).used_bytes == held.resident_bytes


@pytest.mark.parametrize("failing", range(8))
def test_a_patch_that_fails_at_any_call_leaves_the_run_restorable(failing: int, monkeypatch) -> None:
    """The failing-th application of any patch raises: inside the run, or (late) not at all."""
    patcher = patcher_of(make_toy())
    plain, held = output(patcher), patcher.resident()
    one = group(hook("a", keyframes=FADING))
    patch_class = type(one.hooks[0].patches[0])
    original, calls = patch_class.__call__, [0]

    def failing_call(self, weight: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == failing + 1:
            raise Ended
        return original(self, weight)

    def run() -> None:
        with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
            for sigma in SIGMAS:
                apply_hooks(one, sigma)

    monkeypatch.setattr(patch_class, "__call__", failing_call)
    if failing < 6:
        with pytest.raises(Ended):
            run()
    else:
        run()
    assert patcher.resident() == held
    assert torch.equal(output(patcher), plain)


def test_hooks_inside_a_run_of_the_patcher_change_its_module() -> None:
    patcher = patcher_of(make_toy())
    one = group(hook("a"))
    with patcher.running() as module, hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
        apply_hooks(one, SIGMAS[0])
        found = module(IDS_BL.to(patcher.device)).to("cpu")
    assert torch.equal(found, with_patches(PatchSet(one.hooks[0].patches)))


def test_weight_wrappers_stay_behind_the_patches_of_hooks() -> None:
    patcher = patcher_of(make_toy())
    patcher.add_patches([weight_wrapper("wide.weight", torch.zeros_like)])
    patcher.realize(WeightsTarget(frozenset(MODULES), patcher.patches))
    wrapped = output(patcher)
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
        apply_hooks(group(hook("a", "wide.weight")), SIGMAS[0])
        assert torch.equal(output(patcher), wrapped)


def test_equal_groups_are_one_and_hooks_are_not_added_twice() -> None:
    a, b = hook("a"), hook("b")
    assert group(a, b) == group(hook("a"), hook("b"))
    assert group(a).with_hooks([hook("a"), b]) == group(a, b)
    assert group(a) != group(hook("a", strength=0.5))
    assert group(a, b).at_most(PatchSet()).patches == (*a.patches, *b.patches)


def test_interpolated_strengths_change_the_weights_at_each_keyframe() -> None:
    rising = hook("a", keyframes=interpolated(0.0, 1.0, 0.0, 0.9, 6))
    patcher = patcher_of(make_toy())
    outputs = []
    with hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent) as apply_hooks:
        for sigma in SIGMAS:
            apply_hooks(group(rising), sigma)
            outputs.append(output(patcher))
    assert all(not torch.equal(x, y) for x, y in pairwise(outputs))


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=30), budget=st.integers(0, 100))
def test_a_shelf_never_holds_more_than_its_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    cache, truth = PatchedWeightCache(budget), {}
    for name, size in sizes:
        key = (str(name), "digest")
        taken = cache.take(key)
        assert taken is None or taken.held_bytes == truth[key]
        cache.put(key, CachedWeights({}, {}, size))
        truth[key] = size
        assert cache.held_bytes <= budget
    held = sum(s.held_bytes for s in (cache.take((str(n), "digest")) for n in range(6)) if s is not None)
    assert held <= budget
    assert cache.held_bytes == 0
