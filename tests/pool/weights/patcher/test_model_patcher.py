"""The patcher's promise: device weights are a function of (host weights, patch set), wherever the bytes are.

Proves: resident, streamed and half-resident runs are equal bit for bit, patched or not; only the difference moves; host
weights are never written; clones share and do not disturb each other; a failed load leaves an exact account.
"""

from __future__ import annotations

import hashlib

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.values.specs.spec import UNPATCHED, ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import LowRank, PatchSet
from tests.pool.toy import Toy, make_patch, make_toy, patches_for, reference

DEVICE = "sim:0"  # a name until `sim.install` has run
PLENTY_BYTES = 1 << 30
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight", "table.weight")
MODULES = ("table", "wide", "narrow", "norm", "gain", "conv")


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, PLENTY_BYTES)
    sim.reset_counters(0)
    sim.reset_peak(0)


def patcher_of(toy: Toy, device: str = DEVICE) -> ModelPatcher:
    return ModelPatcher.of(
        ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, torch.device(device), WeightForm(torch.float32)
    )


def output(patcher: ModelPatcher) -> torch.Tensor:
    with patcher.running() as module:
        return module(IDS_BL.to(patcher.device)).to("cpu")


def digest_of(toy: Toy) -> str:
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in toy.state_dict().values())).hexdigest()


@given(
    resident=st.sets(st.sampled_from(MODULES)),
    patched=st.sets(st.sampled_from(WEIGHTS)),
    storage=st.sampled_from([torch.float16, torch.float32]),
)
def test_output_does_not_depend_on_what_is_resident(
    resident: set[str], patched: set[str], storage: torch.dtype
) -> None:
    toy = make_toy(3, storage)
    patches = patches_for(toy, "a", tuple(sorted(patched)), 0.7)
    expected = reference(toy, patches, IDS_BL)
    patcher = patcher_of(toy)
    patcher.patches = patches
    patcher.realize(WeightsTarget(frozenset(resident), patches))
    assert torch.equal(output(patcher), expected)
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


def test_moving_to_the_same_target_again_moves_nothing() -> None:
    patcher = patcher_of(make_toy())
    target = WeightsTarget(frozenset(MODULES), PatchSet())
    first = patcher.realize(target)
    assert first.uploaded_bytes == sim.memory_stats(0).h2d_bytes == patcher.spec().upload_bytes
    assert patcher.realize(target).uploaded_bytes == 0
    assert patcher.resident().resident_bytes == patcher.spec().weight_bytes == sim.memory_stats(0).used_bytes


def test_switching_patches_touches_only_what_differs() -> None:
    """A+B to A+C moves the weights of B and C, not of A; going back to none restores the exact bytes."""
    toy = make_toy()
    kept, left, came = (patches_for(toy, n, (w,)) for n, w in zip("abc", WEIGHTS[:3], strict=True))
    patcher = patcher_of(toy)
    everything = frozenset(MODULES)
    plain = output(patcher)
    patcher.realize(WeightsTarget(everything, kept.with_patches(left.patches)))
    report = patcher.realize(WeightsTarget(everything, kept.with_patches(came.patches)))
    assert report.switched
    assert report.uploaded_bytes == sum(toy.get_parameter(w).numel() * 2 for w in WEIGHTS[1:3])
    patcher.realize(WeightsTarget(everything, PatchSet()))
    assert torch.equal(output(patcher), plain)


def test_host_weights_are_never_written() -> None:
    toy = make_toy()
    before = digest_of(toy)
    patcher = patcher_of(toy)
    patches = patches_for(toy, "a", WEIGHTS)
    for resident in (frozenset(MODULES), frozenset[str](), frozenset({"wide"})):
        patcher.realize(WeightsTarget(resident, patches))
        output(patcher)
    patcher.unload()
    assert digest_of(toy) == before


def test_storage_in_compute_dtype_on_the_cpu_is_not_written_either() -> None:
    """On a CPU device a float32 weight needs no copy to be resident; patches must still not reach the host weight."""
    toy = make_toy(storage=torch.float32)
    before = digest_of(toy)
    patcher = patcher_of(toy, "cpu")
    patches = patches_for(toy, "a", WEIGHTS)
    patcher.realize(WeightsTarget(frozenset(MODULES), patches))
    assert torch.equal(output(patcher), reference(make_toy(storage=torch.float32), patches, IDS_BL))
    patcher.unload()
    assert digest_of(toy) == before


def test_clones_share_weights_and_own_their_patches() -> None:
    toy = make_toy()
    base = patcher_of(toy)
    clone = base.clone()
    assert base.clone_has_same_weights(clone)
    clone.add_patches([make_patch("wide.weight", (64, 16), "x")])
    assert base.is_clone(clone)
    assert not base.clone_has_same_weights(clone)
    assert base.patches.digest == UNPATCHED
    other = base.clone()
    other.add_patches([make_patch("wide.weight", (64, 16), "x")])
    assert clone.clone_has_same_weights(other)
    base.realize(WeightsTarget(frozenset(MODULES), base.patches))
    assert clone.resident_modules() == frozenset(MODULES)


@given(budget_share=st.floats(0.0, 0.99))
def test_running_out_of_memory_on_the_way_leaves_an_exact_account(budget_share: float) -> None:
    toy = make_toy()
    patcher = patcher_of(toy)
    expected = output(patcher)
    sim.configure(0, int(patcher.spec().weight_bytes * budget_share))
    with pytest.raises(torch.OutOfMemoryError):
        patcher.realize(WeightsTarget(frozenset(MODULES), PatchSet()))
    assert patcher.resident().resident_bytes == 0 == sim.memory_stats(0).used_bytes, "what arrived has left again"
    sim.configure(0, PLENTY_BYTES)
    assert torch.equal(output(patcher), expected)
    patcher.realize(WeightsTarget(frozenset(MODULES), PatchSet()))
    assert torch.equal(output(patcher), expected)
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


@given(patched=st.sets(st.sampled_from(WEIGHTS)), resident=st.sets(st.sampled_from(MODULES)))
def test_scratch_is_enough_to_load_and_stream(patched: set[str], resident: set[str]) -> None:
    """With room for the resident weights, the scratch and the activations, nothing runs out of memory."""
    toy = make_toy()
    patches = patches_for(toy, "a", tuple(sorted(patched)))
    expected = reference(toy, patches, IDS_BL)
    patcher = patcher_of(toy)
    patcher.patches = patches
    held_bytes = sum(m.resident_bytes for m in patcher.modules() if m.name in resident)
    activation_bytes = 6 * 4 * IDS_BL.numel() * 64 + IDS_BL.nbytes
    sim.configure(0, held_bytes + patcher.use().scratch_bytes + activation_bytes)
    patcher.realize(WeightsTarget(frozenset(resident), patches))
    assert torch.equal(output(patcher), expected)
    patcher.unload()


def test_a_clone_runs_with_its_own_patches_whichever_was_realized_last() -> None:
    """Without being realized, streamed and resident; and the other one is not disturbed."""
    base = patcher_of(make_toy())
    plain = output(base)
    clone = base.clone()
    clone.add_patches(patches_for(make_toy(), "a", WEIGHTS).patches)
    patched = reference(make_toy(), clone.patches, IDS_BL)
    for resident in (frozenset[str](), frozenset(MODULES)):
        base.realize(WeightsTarget(resident, base.patches))
        assert torch.equal(output(clone), patched)
        assert torch.equal(output(base), plain)
        assert base.resident_modules() == resident


def test_a_run_inside_a_run_gives_back_what_the_outer_one_had() -> None:
    base = patcher_of(make_toy())
    plain = output(base)
    clone = base.clone()
    clone.add_patches(patches_for(make_toy(), "a", WEIGHTS).patches)
    with base.running() as module:
        assert not torch.equal(output(clone), plain)
        assert torch.equal(module(IDS_BL.to(base.device)).to("cpu"), plain)


def test_after_a_realize_that_failed_a_run_still_has_the_clones_own_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    base = patcher_of(make_toy())
    plain = output(base)
    everything = frozenset(MODULES)
    base.realize(WeightsTarget(everything, PatchSet()))

    def fail(self: LowRank, weight: torch.Tensor, *_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(LowRank, "apply", fail)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            base.realize(WeightsTarget(everything, patches_for(make_toy(), "a", WEIGHTS)))
    assert torch.equal(output(base), plain)


@pytest.mark.parametrize(
    ("parameter", "shape"), [("nope.weight", (16, 16)), ("wide.weight", (7, 3))], ids=["unknown", "other shape"]
)
def test_a_patch_that_fits_nothing_is_refused_and_leaves_no_trace(parameter: str, shape: tuple[int, ...]) -> None:
    patcher = patcher_of(make_toy())
    before = patcher.patches
    lost = make_patch(parameter, shape, "lost")
    with pytest.raises(PatchFailed, match=parameter):
        patcher.add_patches([lost])
    assert patcher.patches is before
    with pytest.raises(PatchFailed, match=parameter):
        patcher.realize(WeightsTarget(frozenset(MODULES), PatchSet((lost,))))
    assert patcher.resident_modules() == frozenset()
    assert patcher.patches is before


def test_strengths_that_are_equal_numbers_have_one_digest() -> None:
    digests = {PatchSet((make_patch("a", (4, 4), "x", strength),)).digest for strength in (8, 8.0, numpy.float64(8))}
    assert len(digests) == 1
