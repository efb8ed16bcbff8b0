"""What a patcher carries beside weights: cloned in no time, in effect during runs only, undone whatever happens.

Proves also that a patch, an upload or an injection that fails at any point leaves a patcher that tells the truth and
can go on.
"""

from __future__ import annotations

import pkgutil
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.errors import PatchFailed, UnknownName, UnusableField
from modelpool.pool.values.specs.spec import UNPATCHED, ComponentKey, Role
from modelpool.pool.weights.options.callbacks import CallbackPoint
from modelpool.pool.weights.options.injections import Injection
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher.comfy_patches import patches_from, weight_wrapper
from modelpool.pool.weights.patcher.hooked_run import hooked_run
from modelpool.pool.weights.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.weights.patcher.model_patcher import (
    ModelPatcher,
    PatcherState,
    WeightsTarget,
    get_model_object,
    models_to_load,
)
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.full_weights import Difference
from modelpool.pool.weights.patches.patch_set import Offset, PatchSet, WeightPatch
from modelpool.pool.weights.vram.vram_manager import VramManager
from tests.pool.toy import Toy, make_patch, make_toy, patches_for, reference

DEVICE = "sim:0"  # a name until `sim.install` has run
PLENTY_BYTES = 1 << 30
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight", "table.weight")
MODULES = ("table", "wide", "narrow", "norm", "gain", "conv")
EVERYTHING = frozenset(MODULES)


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, PLENTY_BYTES)


def patcher_of(toy: Toy | None = None, name: str = "toy") -> ModelPatcher:
    form = WeightForm(torch.float32)
    return ModelPatcher.of(ComponentKey(name), Role.DIFFUSION_MODEL, toy or make_toy(), torch.device(DEVICE), form)


def output(patcher: ModelPatcher, options: ModelOptions | None = None) -> Tensor:
    with patcher.running(options=options) as module:
        return module(IDS_BL.to(patcher.device)).to("cpu")


def weights_of(patcher: ModelPatcher) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu").clone() for name, value in patcher.module.state_dict().items()}


class Broken(Exception):
    """What a test makes fail."""


# --- clones ---


def test_cloning_does_not_depend_on_how_much_is_patched() -> None:
    """1,000 patched keys cost what none cost. A ratio, for the machine may be busy; and a bound far above both."""
    many, none = patcher_of(), patcher_of()
    patch = make_patch("wide.weight", (64, 16), "x")
    many.patches = PatchSet(tuple(WeightPatch(f"layer{n}.weight", f"p{n}", patch.value) for n in range(1000)))

    def seconds(patcher: ModelPatcher) -> float:
        best = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                patcher.clone()
            best.append((time.perf_counter() - start) / 100)
        return min(best)

    assert seconds(many) < 3 * seconds(none)
    clone = many.clone()
    assert clone.patches is many.patches
    assert clone.state is many.state


def test_clones_share_extras_until_one_changes_them() -> None:
    base = patcher_of()
    clone = base.clone()
    clone.state = clone.state.with_options(lambda o: o.with_disable_cfg1_optimization())
    assert clone.model_options.disable_cfg1_optimization
    assert not base.model_options.disable_cfg1_optimization
    assert base.clone_has_same_weights(clone)


class Attachment:
    def __init__(self, generation: int) -> None:
        self.generation = generation

    def on_model_patcher_clone(self) -> Attachment:
        return Attachment(self.generation + 1)


def test_attachments_and_additional_models_follow_their_clone() -> None:
    base, control = patcher_of(), patcher_of(name="control")
    base.state = base.state.with_attachment("mine", Attachment(0)).with_attachment("plain", "text")
    base.state = base.state.with_additional_models("controlnet", control)
    clone = base.clone()
    assert clone.state.attachments["mine"].generation == 1
    assert clone.state.attachments["plain"] == "text"
    (cloned,) = clone.state.additional_models["controlnet"]
    assert cloned is not control
    assert cloned.is_clone(control)
    assert base.state.attachments["mine"].generation == 0


def test_additional_models_may_name_each_other_in_a_circle() -> None:
    a, b, c = patcher_of(name="a"), patcher_of(name="b"), patcher_of(name="c")
    a.state = a.state.with_additional_models("x", b, c)
    b.state = b.state.with_additional_models("x", a, c)
    assert models_to_load(a) == (b, c)
    twin = a.clone()
    (b2, c2), (a2, _) = twin.state.additional_models["x"], b.clone().state.additional_models["x"]
    assert b2.state.additional_models["x"][0] is twin
    assert b2.state.additional_models["x"][1] is c2
    assert a2.is_clone(a)


def test_models_that_patches_name_are_loaded_too() -> None:
    base, helper = patcher_of(), patcher_of(name="helper")

    class Patch:
        def __call__(self, h: Tensor, extra: dict[str, Any]) -> Tensor:
            return h

        def models(self) -> list[ModelPatcher]:
            return [helper]

    base.state = base.state.with_options(lambda o: o.with_transformer(lambda t: t.with_middle_block_patch(Patch())))
    assert models_to_load(base) == (helper,)


def test_additional_models_are_leased_together() -> None:
    base, control = patcher_of(), patcher_of(name="control")
    base.state = base.state.with_additional_models("controlnet", control)
    manager = VramManager(PLENTY_BYTES)
    manager.components.add(base)
    manager.components.add(control)
    job = base.clone()
    with manager.lease([(p, p.use()) for p in (job, *models_to_load(job))], 0) as lease:
        assert lease.plan.streamed_bytes == 0
        assert control.resident_modules() == base.resident_modules() == EVERYTHING


# --- callbacks ---


def test_callbacks_are_called_when_it_happens() -> None:
    told: list[str] = []
    patcher = patcher_of()
    for point in CallbackPoint:
        name = point.name
        patcher.state = patcher.state.with_callback(point, lambda *_, name=name: told.append(name))
    patcher.state = patcher.state.with_injections("i", Injection(lambda p: None, lambda p: None))
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    assert told == ["ON_LOAD"]
    patcher.evict_except(frozenset({"wide"}))
    assert told == ["ON_LOAD"]
    patcher.unload()
    assert told == ["ON_LOAD", "ON_DETACH"]
    told.clear()
    output(patcher)
    assert told == ["ON_PRE_RUN", "ON_INJECT_MODEL", "ON_EJECT_MODEL", "ON_CLEANUP"]
    told.clear()
    patcher.clone()
    assert told == ["ON_CLONE"]


def test_cleanup_is_told_of_runs_that_fail() -> None:
    told: list[str] = []
    patcher = patcher_of()
    patcher.state = patcher.state.with_callback(CallbackPoint.ON_CLEANUP, lambda p: told.append("cleanup"))
    with pytest.raises(Broken), patcher.running():
        raise Broken
    assert told == ["cleanup"]


# --- injections ---


class Bias:
    """Adds to the output of a module, as an injection."""

    def __init__(self, amount: float, log: list[str] | None = None) -> None:
        self.amount, self.log = amount, log if log is not None else []
        self.handle: Any = None

    def pair(self) -> Injection:
        return Injection(self.inject, self.eject)

    def inject(self, patcher: ModelPatcher) -> None:
        self.log.append("in")
        self.handle = patcher.module.wide.register_forward_hook(lambda m, a, out: out + self.amount)

    def eject(self, patcher: ModelPatcher) -> None:
        self.log.append("out")
        self.handle.remove()


def test_injections_are_in_during_runs_only_and_of_their_own_clone_only() -> None:
    base = patcher_of()
    plain = output(base)
    clone = base.clone()
    clone.state = clone.state.with_injections("bias", Bias(1.0).pair())
    assert not torch.equal(output(clone), plain)
    assert torch.equal(output(base), plain)
    with pytest.raises(Broken), clone.running():
        raise Broken
    assert torch.equal(output(base), plain)


def test_injections_are_out_while_weights_change() -> None:
    log: list[str] = []
    patcher = patcher_of()
    patcher.state = patcher.state.with_injections("bias", Bias(1.0, log).pair())
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    assert log == []
    group = HookGroup((WeightHook(patches_for(make_toy(), "a", WEIGHTS).patches),))
    expected = patcher_of()
    expected.state = expected.state.with_injections("bias", Bias(1.0).pair())
    expected.realize(WeightsTarget(EVERYTHING, PatchSet(group.hooks[0].patches)))
    with patcher.running() as module, hooked_run(patcher, 14.0, lambda percent: 0.0) as apply_hooks:
        apply_hooks(group, 14.0)
        assert log == ["in", "out", "in"]
        found = module(IDS_BL.to(DEVICE)).to("cpu")
    assert torch.equal(found, output(expected))
    assert log == ["in", "out", "in", "out", "in", "out"]
    assert not patcher.module.wide._forward_hooks


@pytest.mark.parametrize("failing", range(3))
def test_a_failing_injection_leaves_nothing_and_no_run(failing: int) -> None:
    patcher = patcher_of()
    plain = output(patcher)

    def broken(patcher: ModelPatcher) -> None:
        raise Broken

    biases = [Bias(float(n + 1)) for n in range(3)]
    pairs = [b.pair() for b in biases]
    pairs[failing] = Injection(broken, lambda patcher: None)
    base_extras = patcher.state
    patcher.state = base_extras.with_injections("bias", *pairs)
    with pytest.raises(Broken):
        output(patcher)
    assert not patcher.module.wide._forward_hooks
    patcher.state = base_extras
    assert torch.equal(output(patcher), plain)


def hooked(patcher: ModelPatcher) -> None:
    """A run with weights that change once."""
    group = HookGroup((WeightHook(patches_for(make_toy(), "a", WEIGHTS).patches),))
    with patcher.running(), hooked_run(patcher, 14.0, lambda percent: 0.0) as apply_hooks:
        apply_hooks(group, 14.0)


def test_an_injection_that_cannot_be_put_in_again_is_taken_out_once() -> None:
    """It takes itself out when it fails; neither the next change of weights nor the end of the run asks again."""
    log: list[str] = []

    def inject(patcher: ModelPatcher) -> None:
        log.append("in")
        if log.count("in") == 2:
            raise Broken

    patcher = patcher_of()
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    plain = output(patcher)
    base_extras = patcher.state
    patcher.state = base_extras.with_injections("x", Injection(inject, lambda patcher: log.append("out")))
    with pytest.raises(Broken):
        hooked(patcher)
    assert log == ["in", "out", "in", "out"]
    patcher.state = base_extras
    assert torch.equal(output(patcher), plain)


def test_injections_are_out_while_another_thread_changes_weights() -> None:
    log: list[str] = []
    patcher = patcher_of()
    pair = Injection(lambda p: log.append("in"), lambda p: log.append("out"))
    patcher.state = patcher.state.with_injections("x", pair)
    with patcher.running():
        other = threading.Thread(target=patcher.realize, args=(WeightsTarget(EVERYTHING, PatchSet()),))
        other.start()
        other.join()
        assert log == ["in", "out", "in"]
    assert log == ["in", "out", "in", "out"]


def test_an_injection_is_out_after_a_run_that_its_callback_stopped() -> None:
    def stop(patcher: ModelPatcher) -> None:
        raise Broken

    patcher = patcher_of()
    patcher.state = patcher.state.with_injections("bias", Bias(1.0).pair())
    patcher.state = patcher.state.with_callback(CallbackPoint.ON_INJECT_MODEL, stop)
    with pytest.raises(Broken):
        output(patcher)
    assert not patcher.module.wide._forward_hooks


def test_each_of_two_nested_runs_puts_its_injections_in_again() -> None:
    log: list[str] = []
    patcher = patcher_of()
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    pair = Injection(lambda p: log.append("in"), lambda p: log.append("out"))
    patcher.state = patcher.state.with_injections("x", pair)
    with patcher.running():
        hooked(patcher)
        assert log == ["in", "in", "out", "out", "in", "in", "out", "out", "in", "in", "out"]
    assert log.count("in") == log.count("out") == 6


# --- options and object patches ---


def test_options_act_on_runs_of_their_patcher() -> None:
    patcher = patcher_of()
    plain = output(patcher)
    doubled = ModelOptions().with_wrapper(WrapperPoint.DIFFUSION_MODEL, lambda executor, ids: executor(ids) * 2.0)
    clone = patcher.clone()
    clone.state = clone.state.with_options(lambda _: doubled)
    assert torch.equal(output(clone), plain * 2.0)
    assert torch.equal(output(clone, ModelOptions()), plain)
    assert torch.equal(output(patcher, doubled), plain * 2.0)
    assert torch.equal(output(patcher), plain)
    assert "forward" not in patcher.module.__dict__


def test_options_without_a_place_in_the_module_are_refused() -> None:
    options = ModelOptions().with_transformer(lambda t: t.with_attn1_patch(lambda *a: a))
    with pytest.raises(UnusableField, match="attn1_patch"):
        output(patcher_of(), options)


def test_functions_that_can_be_moved_are_on_the_runs_device() -> None:
    places: list[torch.device] = []

    class Patch:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def to(self, device: torch.device) -> Patch:
            return Patch(self.tensor.to(device))

        def __call__(self, args: dict[str, Any]) -> dict[str, Any]:
            places.append(self.tensor.device)
            return args

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = nn.ModuleList([Block()])

        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.transformer_blocks[0](hidden_states)

    class Block(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    form = WeightForm(torch.float32)
    patcher = ModelPatcher.of(ComponentKey("l"), Role.DIFFUSION_MODEL, Listed(), torch.device(DEVICE), form)
    patch = Patch(torch.ones(1))
    options = ModelOptions().with_transformer(lambda t: t.with_double_block_patch(patch))
    with patcher.running(options=options) as module:
        module(torch.ones(1, device=DEVICE))
    assert places == [torch.device(DEVICE)]
    assert patch.tensor.device == torch.device("cpu")


def test_objects_are_replaced_for_runs_only() -> None:
    patcher = patcher_of()
    plain = output(patcher)
    norm = patcher.module.norm
    clone = patcher.clone()
    clone.state = clone.state.with_object_patch("norm", nn.Identity())
    changed = output(clone)
    assert not torch.equal(changed, plain)
    assert torch.equal(output(patcher), plain)
    assert patcher.module.norm is norm
    assert isinstance(get_model_object(clone, "norm"), nn.Identity)
    assert get_model_object(patcher, "norm") is norm
    with pytest.raises(UnknownName, match="nowhere"):
        get_model_object(patcher, "nowhere.at.all")
    with pytest.raises(Broken), clone.running():
        raise Broken
    assert [n for n, _ in patcher.module.named_children()] == list(MODULES)


def test_a_model_object_is_what_a_run_finds() -> None:
    patcher = patcher_of()
    wide, norm = nn.Linear(4, 4), nn.LayerNorm(16).to(DEVICE)
    patcher.state = patcher.state.with_object_patch("norm.eps", 0.5).with_object_patch("norm", norm)
    patcher.state = patcher.state.with_object_patch("wide", wide)
    paths = ("norm", "norm.eps", "norm.normalized_shape", "wide.in_features", "narrow.in_features")
    asked = [get_model_object(patcher, path) for path in paths]
    with patcher.running() as module:
        assert asked == [module.norm, module.norm.eps, module.norm.normalized_shape, 4, module.narrow.in_features]
        assert module.norm is norm
        assert module.norm.eps == 0.5
    assert norm.eps == 1e-5
    with pytest.raises(UnknownName, match=r"wide\.nothing"):
        get_model_object(patcher, "wide.nothing")


# --- patches in ComfyUI's form, wrappers, merging ---


def test_patches_by_key_are_taken_where_there_is_a_parameter() -> None:
    toy = make_toy()
    patcher = patcher_of(toy)
    delta = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    accepted = patcher.add_patches({"wide.weight": (delta,), "unknown.weight": (delta,)}, 0.5, 0.25)
    assert accepted == ("wide.weight",)
    weight = toy.wide.weight.float() * 0.25 + delta * 0.5
    torch.testing.assert_close(patcher.patches.functions("wide.weight")[0](toy.wide.weight.float()), weight)
    patcher.realize(WeightsTarget(EVERYTHING, patcher.patches))
    assert torch.equal(output(patcher), reference(make_toy(), patcher.patches, IDS_BL))


@pytest.mark.parametrize("key", [("wide.weight", (0, 8, 4)), ("wide.weight", Offset(0, 8, 4), lambda d: d * 2.0)])
def test_offsets_and_functions_come_with_the_key(key: tuple[Any, ...]) -> None:
    (patch,) = patches_from({key: (torch.ones(4, 16),)}, {"wide.weight": torch.zeros(64, 16)})
    weight = patch(torch.zeros(64, 16))
    assert weight.sum() == (128.0 if len(key) == 3 else 64.0)
    assert weight[8:12].ne(0).all()


def test_values_in_comfyuis_spelling() -> None:
    original, ones = torch.full((64, 16), 3.0), torch.ones(64, 16)
    known = {"w": original}

    def result(value: Any, strength: float = 1.0) -> Tensor:
        (patch,) = patches_from({"w": value}, known, strength)
        return patch(original.clone())

    assert torch.equal(result(("diff", (ones,)), 0.5), original + 0.5)
    assert torch.equal(result(("set", (ones,)), 0.5), ones)
    assert torch.equal(result(("model_as_lora", (ones,)), 0.5), original + 0.5 * (ones - original))
    padded = result(("diff", (torch.ones(65, 16), {"pad_weight": True})))
    assert padded.shape == (65, 16)
    nested = [(ones, None), (2.0, (ones,), 1.0, None, None)]
    assert torch.equal(result(nested, 0.5), original + 0.5 * (ones + 2.0 * ones))
    assert torch.equal(result(Difference(ones)), original + 1.0)


@pytest.mark.parametrize("value", ["text", ("unknown kind", (torch.ones(1),)), {}, 7])
def test_a_value_of_no_known_kind_is_refused_by_its_key(value: Any) -> None:
    patcher = patcher_of()
    with pytest.raises(PatchFailed, match=r"wide\.weight"):
        patcher.add_patches({"wide.weight": value})
    assert patcher.patches.digest == UNPATCHED


def test_equal_identities_are_equal_patches_and_no_identity_is_equal_to_none() -> None:
    base, delta = patcher_of(), torch.ones(64, 16)
    clones = [base.clone() for _ in range(4)]
    for clone, identity in zip(clones, ("x", "x", None, None), strict=True):
        clone.add_patches({"wide.weight": (delta,)}, identity=identity)
    assert clones[0].clone_has_same_weights(clones[1])
    assert not clones[2].clone_has_same_weights(clones[3])
    assert not clones[0].clone_has_same_weights(clones[2])


@pytest.mark.parametrize("resident", [EVERYTHING, frozenset[str]()])
def test_a_weight_wrapper_has_the_last_word_also_on_later_patches(resident: frozenset[str]) -> None:
    toy = make_toy()
    patcher = patcher_of(toy)
    plain = output(patcher)
    first, second = (make_patch("wide.weight", (64, 16), n) for n in ("a", "b"))
    patcher.add_patches([first])
    patcher.add_patches([weight_wrapper("wide.weight", torch.zeros_like)])
    patcher.add_patches([second])
    zeroed = make_toy()
    zeroed.wide._parameters["weight"] = nn.Parameter(torch.zeros(64, 16), requires_grad=False)
    patcher.realize(WeightsTarget(resident, patcher.patches))
    assert torch.equal(output(patcher), reference(zeroed, PatchSet(), IDS_BL))
    patcher.realize(WeightsTarget(resident, PatchSet()))
    assert torch.equal(output(patcher), plain)


def test_key_patches_are_what_merging_models_is_made_of() -> None:
    """A + (B - A) * s through patches, as ComfyUI's merge nodes do it: 1 - s of A and s of B."""
    a, b = patcher_of(make_toy(1)), patcher_of(make_toy(2))
    b.add_patches(patches_for(make_toy(2), "lora", ("wide.weight",)).patches)
    merged = a.clone()
    taken = merged.add_patches(b.get_key_patches("wide"), 0.3, 0.7)
    assert taken == ("wide.weight", "wide.bias")
    expected = a.module.wide.weight.float() * 0.7
    patched = b.patches.functions("wide.weight")[0](b.module.wide.weight.float().clone())
    found = merged.patches.functions("wide.weight")[0](a.module.wide.weight.float().clone())
    torch.testing.assert_close(found, expected + patched * 0.3)


# --- failures at every step ---


def fail_nth(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: int) -> None:
    """Let the failing-th call of `owner.name` raise, counted from 0."""
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == failing + 1:
            raise Broken(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


STEPS = [
    ("modelpool.pool.weights.patches.lora.LowRank", "apply"),
    ("modelpool.pool.weights.patcher.shared_weights", "apply_weight_functions"),
    ("modelpool.pool.weights.patcher.shared_weights", "set_weight_functions"),
    ("modelpool.pool.weights.patcher.shared_weights.SharedWeights", "_evict"),
    ("modelpool.pool.weights.patcher.shared_weights.SharedWeights", "_set_lazy"),
    ("modelpool.pool.weights.patcher.shared_weights.SharedWeights", "_upload"),
    ("modelpool.pool.weights.patcher.shared_weights.SharedWeights", "_rewrite"),
    ("modelpool.pool.weights.patcher.shared_weights", "write_into"),
]
#: steps that only a change which grows takes, or only one that does not
ONLY = {"_upload": True, "_evict": False}


@pytest.mark.parametrize(("place", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("grows", [False, True], ids=["shrinking", "growing"])
def test_a_failure_at_any_step_of_a_change_leaves_the_truth_and_a_way_on(
    place: str, name: str, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change from A+B to A+C: each call of one of its steps fails once; then the account is exact, another try ends
    exact, and going back to none restores the bytes of the file."""
    kept, left, came = (patches_for(make_toy(), n, (w,)) for n, w in zip("abc", WEIGHTS[:3], strict=True))
    before, after = kept.with_patches(left.patches), kept.with_patches(came.patches)
    expected = reference(make_toy(), after, IDS_BL)
    owner: Any = pkgutil.resolve_name(place)
    part = frozenset({"narrow", "conv"})
    first, then = (part, EVERYTHING) if grows else (EVERYTHING, part)
    failures = 0
    while True:
        patcher = patcher_of()
        host = weights_of(patcher)
        patcher.realize(WeightsTarget(first, before))
        with monkeypatch.context() as patching:
            fail_nth(patching, owner, name, failures)
            try:
                patcher.realize(WeightsTarget(then, after))
                failed = False
            except Broken:
                failed = True
        on_device = {m for m in MODULES for p in getattr(patcher.module, m).parameters() if p.device.type == "sim"}
        held_bytes = sum(m.resident_bytes for m in patcher.modules() if m.name in on_device)
        assert patcher.resident_modules() == on_device
        assert patcher.resident().resident_bytes == held_bytes
        patcher.realize(WeightsTarget(then, after))
        assert torch.equal(output(patcher), expected), f"failure {failures} of {name}"
        patcher.unload()
        assert all(torch.equal(host[n], w) for n, w in weights_of(patcher).items())
        if not failed:
            break
        failures += 1
    assert (failures > 0) == (ONLY.get(name, grows) == grows), f"{name} failed {failures} times"


def test_adding_patches_that_cannot_be_read_leaves_the_patcher_as_it_was() -> None:
    patcher = patcher_of()
    patcher.add_patches([make_patch("wide.weight", (64, 16), "a")])
    digest = patcher.patches.digest
    with pytest.raises(PatchFailed):
        patcher.add_patches({"wide.weight": (torch.ones(64, 16),), "narrow.weight": "nonsense"})
    assert patcher.patches.digest == digest


def test_empty_extras_are_equal() -> None:
    assert PatcherState() == PatcherState()
