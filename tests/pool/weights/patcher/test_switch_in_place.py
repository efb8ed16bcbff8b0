"""A switch of patches writes into the tensors that are on the device: the same addresses, no more memory, exact bytes.

Whatever the weights are stored in, wherever it stops, and in whatever order streams get there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.devices.copy_streams import CopyStreams
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.packed import PackedWeight, packed_weight
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget, realize_in_steps
from modelpool.pool.weights.patcher.patched_weight_cache import PatchedWeightCache
from modelpool.pool.weights.patcher.weight_form import ResidentForm, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.formats import INPUT_SCALE
from modelpool.pool.weights.quant.quantize import quantize
from tests.pool.devices.fake_streams import Trace
from tests.pool.toy import Toy, make_toy, patches_for, reference

PLENTY_BYTES = 1 << 30
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight", "table.weight")
EVERYTHING = frozenset({"table", "wide", "narrow", "norm", "gain", "conv"})


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    sim.install()
    sim.configure(0, PLENTY_BYTES)
    yield
    sim.recover(0)


def patcher_of(
    toy: Toy, device: str = "sim:0", form: ResidentForm = ResidentForm.COMPUTE, tools: RunTools | None = None
) -> ModelPatcher:
    weight_form = WeightForm(torch.float32, form)
    return ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, torch.device(device), weight_form, tools)


def output(patcher: ModelPatcher) -> torch.Tensor:
    with patcher.running() as module:
        return module(IDS_BL.to(patcher.device)).to("cpu")


def switch(patcher: ModelPatcher, patches: PatchSet) -> None:
    patcher.realize(WeightsTarget(patcher.resident_modules(), patches))


def addresses(patcher: ModelPatcher) -> dict[str, int]:
    """The address of each tensor of the module; of packed weights, of each part."""
    found: dict[str, int] = {}
    for name, parameter in patcher.module.named_parameters():
        parts = parameter.parts if isinstance(parameter, PackedWeight) else {"": parameter}
        found |= {f"{name}{key}": part.data_ptr() for key, part in parts.items()}
    return found


def stored(storage: str) -> Toy:
    if not storage.startswith("packed"):
        return make_toy(3, getattr(torch, storage))
    toy = make_toy(3, torch.float32)
    for layer in (toy.wide, toy.narrow):
        packed = quantize(layer.weight.detach(), "float8_e4m3fn")
        if storage == "packed with input scale":
            parts = {**packed.parts, INPUT_SCALE: torch.tensor(0.5)}
            packed = packed_weight(packed.codec, parts, packed.shape, packed.dtype)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    return toy


@pytest.mark.parametrize(
    ("storage", "form"),
    [
        ("float16", ResidentForm.COMPUTE),
        ("float32", ResidentForm.COMPUTE),
        ("float8_e4m3fn", ResidentForm.STORED),
        ("float8_e4m3fn", ResidentForm.STORED_MERGED),
        ("packed", ResidentForm.STORED_MERGED),
        ("packed with input scale", ResidentForm.STORED_MERGED),
    ],
)
def test_tensors_keep_their_addresses_and_get_the_values_of_a_load(storage: str, form: ResidentForm) -> None:
    """Found in a review: a switch evicted and uploaded, so that every patched weight got another address."""
    patcher = patcher_of(stored(storage), form=form)
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    before, held_bytes = addresses(patcher), sim.memory_stats(0).used_bytes
    some, all_of_them = patches_for(make_toy(), "a", WEIGHTS[:2]), patches_for(make_toy(), "b", WEIGHTS, 0.5)
    for patches in (some, all_of_them, some, PatchSet()):
        patcher.patches = patches
        sim.reset_peak(0)
        switch(patcher, patches)
        assert addresses(patcher) == before
        stats = sim.memory_stats(0)
        assert stats.used_bytes == held_bytes == patcher.resident().resident_bytes
        assert stats.peak_bytes <= held_bytes + patcher.use().scratch_bytes
        fresh = patcher_of(stored(storage), form=form)
        fresh.patches = patches
        fresh.realize(WeightsTarget(EVERYTHING, patches))
        assert torch.equal(output(patcher), output(fresh))
        fresh.unload()


def test_factors_of_patches_come_as_weights_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in an audit: each factor was a copy from pageable memory, which waits for all work of the device. A switch
    of a LoRA on Flux made a thousand of them."""
    brought: list[int] = []
    bring = RunTools.bring

    def noted(tools: RunTools, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        brought.append(host.data_ptr())
        return bring(tools, host, device)

    monkeypatch.setattr(RunTools, "bring", noted)
    patches = patches_for(make_toy(), "a", WEIGHTS)
    factors = {factor.data_ptr() for patch in patches.patches for factor in (patch.value.up_OR, patch.value.down_RI)}
    for form in (ResidentForm.COMPUTE, ResidentForm.STORED_MERGED):
        patcher = patcher_of(stored("float16"), form=form)
        patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
        brought.clear()
        patcher.realize(WeightsTarget(EVERYTHING, patches))
        assert factors <= set(brought)
        patcher.unload()


@given(
    first=st.sets(st.sampled_from(WEIGHTS)),
    then=st.sets(st.sampled_from(WEIGHTS)),
    resident=st.sets(st.sampled_from(sorted(EVERYTHING))),
)
def test_only_weights_whose_patches_differ_cross_the_bus(first: set[str], then: set[str], resident: set[str]) -> None:
    toy = make_toy()
    before, after = (patches_for(toy, "a", tuple(sorted(names))) for names in (first, then - first))
    both = PatchSet((*patches_for(toy, "a", tuple(sorted(first & then))).patches, *after.patches))
    patcher = patcher_of(toy)
    patcher.realize(WeightsTarget(frozenset(resident), before))
    sizes = {name: p.numel() * 2 for name, p in make_toy().named_parameters()}
    report = patcher.realize(WeightsTarget(frozenset(resident), both))
    moved = {name for name in first ^ then if name.removesuffix(".weight") in resident}
    assert report.uploaded_bytes == sum(sizes[name] for name in moved)
    patcher.patches = both
    assert torch.equal(output(patcher), reference(make_toy(), both, IDS_BL))
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_on_the_host_the_file_is_never_written_and_its_pages_come_back(storage: str) -> None:
    toy = stored(storage)
    files = {name: (p.data_ptr(), p.clone()) for name, p in toy.named_parameters()}
    patcher = patcher_of(toy, "cpu")
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    for patches in (patches_for(toy, "a", WEIGHTS), patches_for(toy, "b", WEIGHTS), PatchSet()):
        switch(patcher, patches)
        patcher.patches = patches
        assert torch.equal(output(patcher), reference(stored(storage), patches, IDS_BL))
    if storage == "float32":
        now = {name: p.data_ptr() for name, p in patcher.module.named_parameters()}
        assert now == {name: address for name, (address, _) in files.items()}
    patcher.unload()
    assert all(torch.equal(patcher.module.get_parameter(name), values) for name, (_, values) in files.items())


@pytest.mark.parametrize("after", range(8))
def test_a_switch_that_fails_leaves_an_exact_account(after: int) -> None:
    """Wherever it fails, what has other values than the account says is not on the device."""
    toy = make_toy()
    patcher, patches = patcher_of(toy), patches_for(toy, "b", WEIGHTS)
    patcher.realize(WeightsTarget(EVERYTHING, patches_for(toy, "a", WEIGHTS)))
    sim.fail_transfer(0, after)
    try:
        switch(patcher, patches)
    except torch.OutOfMemoryError:
        assert patcher.resident_modules() < EVERYTHING
    sim.recover(0)
    assert patcher.resident().resident_bytes == sim.memory_stats(0).used_bytes
    patcher.patches = patches
    assert torch.equal(output(patcher), reference(make_toy(), patches, IDS_BL))
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.parametrize("then", ["close", "switch", "evict", "run"])
def test_a_switch_that_stops_between_steps_leaves_an_exact_account(then: str) -> None:
    toy = make_toy()
    old, new = (patches_for(toy, name, WEIGHTS) for name in "ab")
    for steps in range(6):
        patcher = patcher_of(toy)
        patcher.realize(WeightsTarget(EVERYTHING, old))
        going = realize_in_steps(patcher, WeightsTarget(EVERYTHING, new))
        for _ in range(steps):
            next(going, None)
        patcher.patches = old if then == "switch" else new
        if then == "switch":
            switch(patcher, old)
        elif then == "evict":
            patcher.evict_except(frozenset({"wide", "norm"}))
        elif then == "run":
            assert torch.equal(output(patcher), reference(make_toy(), new, IDS_BL))
        going.close()
        assert patcher.resident().resident_bytes == sim.memory_stats(0).used_bytes
        assert torch.equal(output(patcher), reference(make_toy(), patcher.patches, IDS_BL))
        patcher.unload()
        assert sim.memory_stats(0).used_bytes == 0


def test_making_room_during_a_switch_in_steps_uploads_nothing() -> None:
    """Found in a review: evicting some modules wrote the new patches into all others, which crossed the bus and
    allocated where memory was to be freed."""
    toy = make_toy()
    old, new = (patches_for(toy, name, WEIGHTS) for name in "ab")
    for steps in range(7):
        patcher = patcher_of(toy)
        patcher.realize(WeightsTarget(EVERYTHING, old))
        going = realize_in_steps(patcher, WeightsTarget(EVERYTHING, new))
        for _ in range(steps):
            next(going, None)
        before, kept = sim.memory_stats(0), patcher.resident_modules() - {"narrow"}
        report = patcher.evict_except(kept)
        after = sim.memory_stats(0)
        assert (report.uploaded_bytes, after.h2d_bytes, after.allocation_count) == (
            0,
            before.h2d_bytes,
            before.allocation_count,
        )
        assert patcher.resident_modules() <= kept
        assert after.used_bytes == patcher.resident().resident_bytes < before.used_bytes
        going.close()
        patcher.patches = new
        assert torch.equal(output(patcher), reference(make_toy(), new, IDS_BL))
        patcher.unload()


def test_weights_that_a_cache_takes_are_not_written() -> None:
    toy = make_toy()
    one, other = (patches_for(toy, name, WEIGHTS) for name in "ab")
    patcher, cache = patcher_of(toy), PatchedWeightCache(PLENTY_BYTES)
    patcher.realize(WeightsTarget(EVERYTHING, one))
    for patches in (other, one, other):
        patcher.realize(WeightsTarget(EVERYTHING, patches), cache)
        patcher.patches = patches
        assert torch.equal(output(patcher), reference(make_toy(), patches, IDS_BL))
    cache.clear()
    patcher.unload()


def test_a_switch_beside_a_run_waits_for_the_last_run_of_its_weights() -> None:
    """Otherwise kernels of that run, which are still queued, would read weights of the next one."""
    trace = Trace()
    pipeline = TransferPipeline(torch.device("sim", 0), CopyStreams(trace.maker))
    patcher = patcher_of(make_toy(), tools=RunTools(pipeline=pipeline))
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    trace.compute.steps += 3
    output(patcher)
    last = trace.compute.steps
    trace.compute.steps += 4  # another component runs
    trace.lending.add("copy 2")
    patches = patches_for(make_toy(), "a", WEIGHTS[:2])
    with pipeline.overlapping():
        for _ in realize_in_steps(patcher, WeightsTarget(EVERYTHING, patches)):
            pass
    side = trace.streams[2]
    assert side.seen["compute"] == last, "it waits for that run, and not for the one of another component"
    written = {patcher.module.get_parameter(name).data_ptr() for name in WEIGHTS[:2]}
    assert written <= {tensor.data_ptr() for tensor, stream in trace.lent if stream == side.name}
    pipeline.catch_up()
    assert trace.compute.seen[side.name] == side.steps
    patcher.unload()


@pytest.mark.parametrize("first", ["load", "switch"])
def test_a_switch_beside_a_run_waits_for_writes_that_no_run_has_followed(first: str) -> None:
    """Found in a review: after a load or a switch for a run that was cancelled, the next switch beside the run of
    another component did not wait, so that the first one, still queued, could write last."""
    trace = Trace()
    pipeline = TransferPipeline(torch.device("sim", 0), CopyStreams(trace.maker))
    patcher, old = patcher_of(make_toy(), tools=RunTools(pipeline=pipeline)), patches_for(make_toy(), "a", WEIGHTS[:2])
    if first == "switch":
        patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
        output(patcher)
    trace.compute.steps += 3
    patcher.realize(WeightsTarget(EVERYTHING, old))
    last = trace.compute.steps
    trace.compute.steps += 4  # another component runs
    trace.lending.add("copy 2")
    with pipeline.overlapping():
        for _ in realize_in_steps(patcher, WeightsTarget(EVERYTHING, PatchSet())):
            pass
    assert trace.streams[2].seen["compute"] == last
    pipeline.catch_up()
    patcher.unload()
