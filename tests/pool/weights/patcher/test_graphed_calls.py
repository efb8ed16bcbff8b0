"""Captured calls: which ones, what becomes of them, and that they compute what usual calls do.

With graphs on the CPU that, like CUDA's, repeat their operations on the memory that they were captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.pool.devices.cuda_graphs import ReadTensors
from modelpool.pool.devices.device_waits import WaitsForDevice
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.compiled_blocks import BlockCompiler
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.graphed_calls import MOST_GRAPHS, GraphStore
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import ResidentForm, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.vram.vram_manager import VramManager, with_dependents
from tests.pool.toy import Toy, make_toy, patches_for, reference
from tests.pool.weights.patcher.recorded_graphs import RecordedGraphs
from tests.pool.zoo import Case, build, store_in
from tests.pool.zoo.case import quiet_libraries, tensors_in

CPU = torch.device("cpu")
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
EVERYTHING = frozenset({"table", "wide", "narrow", "norm", "gain", "conv"})
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight")


@pytest.fixture
def maker() -> RecordedGraphs:
    return RecordedGraphs()


@pytest.fixture
def store(maker: RecordedGraphs) -> GraphStore:
    return GraphStore(maker)


def toy_patcher(store: GraphStore, toy: Toy | None = None, form: WeightForm | None = None) -> ModelPatcher:
    key, role, form = ComponentKey("toy"), Role.DIFFUSION_MODEL, form or WeightForm(torch.float32)
    patcher = ModelPatcher.of(key, role, toy or make_toy(), CPU, form, RunTools(graphs=store))
    patcher.realize(WeightsTarget(EVERYTHING, PatchSet()))
    return patcher


def call(patcher: ModelPatcher, ids_BL: Tensor = IDS_BL, **options: Any) -> Tensor:
    with patcher.running(captures=True, **options) as module:
        result: Tensor = module(ids_BL)
    assert "forward" not in patcher.module.__dict__
    return result


def switch(patcher: ModelPatcher, patches: PatchSet) -> None:
    patcher.patches = patches
    patcher.realize(WeightsTarget(patcher.resident_modules(), patches))


def test_a_shape_is_captured_at_its_second_use_and_then_replayed(maker: RecordedGraphs, store: GraphStore) -> None:
    patcher, toy = toy_patcher(store), make_toy()
    other = torch.flip(IDS_BL, (0,))
    checks: list[int] = []
    results = [call(patcher, ids, interrupt=lambda: checks.append(1)) for ids in (IDS_BL, other, IDS_BL, other)]
    assert [graph.replays for graph in maker.made] == [3]
    expected = [reference(toy, PatchSet(), ids) for ids in (IDS_BL, other)] * 2
    assert all(torch.equal(found, e) for found, e in zip(results, expected, strict=True))
    assert len({r.data_ptr() for r in results}) == 4, "a later call does not overwrite the result of an earlier one"
    assert len(checks) >= 4, "an interrupt is noticed before each call"
    call(patcher, IDS_BL[:1])
    assert len(maker.made) == 1
    call(patcher, IDS_BL[:1])
    assert len(maker.made) == 2
    assert store.calls == 4


def test_a_switch_of_loras_keeps_the_graph_and_changes_what_it_computes(
    maker: RecordedGraphs, store: GraphStore
) -> None:
    toy = make_toy()
    patcher = toy_patcher(store)
    for patches in (PatchSet(), patches_for(toy, "a", WEIGHTS), patches_for(toy, "b", WEIGHTS[:1]), PatchSet()):
        switch(patcher, patches)
        for _ in range(2):
            assert torch.equal(call(patcher), reference(toy, patches, IDS_BL))
    assert len(maker.made) == 1
    assert maker.made[0].replays == 7


def test_weights_that_come_again_have_other_addresses_and_another_graph(
    maker: RecordedGraphs, store: GraphStore
) -> None:
    toy, patches = make_toy(), patches_for(make_toy(), "a", WEIGHTS)
    patcher = toy_patcher(store)
    call(patcher)
    call(patcher)
    patcher.evict_except(frozenset({"conv"}))
    assert torch.equal(call(patcher), reference(toy, PatchSet(), IDS_BL)), "in part, as usual"
    patcher.realize(WeightsTarget(EVERYTHING, patches))
    patcher.patches = patches
    for _ in range(2):
        assert torch.equal(call(patcher), reference(toy, patches, IDS_BL))
    assert [graph.replays for graph in maker.made] == [1, 2]
    assert len(store) == 1, "the graph of the old addresses is gone"


OTHERS = (
    "streamed",
    "stored in 8 bits",
    "patched at each use",
    "not asked",
    "an object patch",
    "suspended",
    "no room",
    "refused",
)


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_call_runs_as_usual(case: str, maker: RecordedGraphs, store: GraphStore) -> None:
    form, toy, patches = WeightForm(torch.float32), make_toy(), PatchSet()
    if case == "stored in 8 bits":
        form, toy = WeightForm(torch.float32, ResidentForm.STORED), make_toy(storage=torch.float8_e4m3fn)
    if case == "patched at each use":
        form = WeightForm(torch.float32, patches_at_run_time=True)
    expected_toy = make_toy(storage=torch.float8_e4m3fn) if case == "stored in 8 bits" else make_toy()
    patcher = toy_patcher(store, toy, form)
    if case == "streamed":
        patcher.evict_except(EVERYTHING - {"wide"})
    if case == "patched at each use":
        patches = patches_for(make_toy(), "a", WEIGHTS[:1])
        switch(patcher, patches)
    if case == "no room":
        store.has_room = lambda: False
    if case == "refused":
        maker.refuses = RuntimeError("operation not permitted when stream is capturing")
    if case == "an object patch":
        patcher.state = patcher.state.with_object_patch("norm.eps", 1e-5)
    expected = reference(expected_toy, patches, IDS_BL)
    for _ in range(3):
        suspending = patcher.thawed if case == "suspended" else nullcontext
        with patcher.running(captures=case != "not asked") as module, suspending():
            assert torch.allclose(module(IDS_BL), expected, rtol=1e-5, atol=1e-5)
    assert maker.made == []


def test_memory_that_runs_out_in_a_capture_lets_all_graphs_go(maker: RecordedGraphs, store: GraphStore) -> None:
    patcher = toy_patcher(store)
    call(patcher)
    call(patcher)
    assert store.held_bytes == maker.held_bytes
    maker.refuses = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(3):
        call(patcher, IDS_BL[:1])
    assert store.held_bytes == 0
    maker.refuses = None
    call(patcher)
    assert len(maker.made) == 2


def test_nothing_is_captured_after_a_refusal(
    maker: RecordedGraphs, store: GraphStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Found in a review: each shape was tried, and each refusal left more of torch's state as in a capture. Graphs that
    were captured before are replayed."""
    patcher = toy_patcher(store)
    call(patcher)
    call(patcher)
    maker.refuses = RuntimeError("operation not permitted when stream is capturing")
    for _ in range(2):
        call(patcher, IDS_BL[:1])
    tries = maker.tries
    for ids in (IDS_BL[:, :1], IDS_BL[:, :2], IDS_BL[:, :3]):
        for _ in range(3):
            call(patcher, ids)
    assert maker.tries == tries
    assert "not permitted" in store.refusal
    assert caplog.text.count("nor is any other from now on") == 1
    call(patcher)
    assert maker.made[0].replays == 2


def test_a_model_that_reads_the_device_is_tried_once(
    maker: RecordedGraphs, store: GraphStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Five families do. Found in a review: one refused capture for each shape."""
    x = torch.ones(4)
    maker.refuses = WaitsForDevice("it waits for the device in aten.nonzero.default")
    for length in (1, 2, 3):
        for _ in range(3):
            store.call(ComponentKey("reading"), 0, lambda t: t * 2, (x[:length],), {}, CPU)
    assert maker.tries == 1
    assert caplog.text.count("aten.nonzero") == 1
    maker.refuses = None
    for _ in range(2):
        store.call(ComponentKey("other"), 0, lambda t: t * 2, (x,), {}, CPU)
    assert len(maker.made) == 1, "other models are not affected"


def test_the_number_of_graphs_is_bounded(maker: RecordedGraphs, store: GraphStore) -> None:
    patcher = toy_patcher(store)
    for length in range(1, MOST_GRAPHS + 3):
        for _ in range(2):
            call(patcher, IDS_BL[:, :1].repeat(1, length))
    assert len(store) == MOST_GRAPHS
    assert store.held_bytes == MOST_GRAPHS * maker.held_bytes
    call(patcher, IDS_BL[:, :1].repeat(1, MOST_GRAPHS + 2))
    assert len(maker.made) == MOST_GRAPHS + 2, "the newest are kept"


def test_arguments_whose_values_would_be_part_of_the_graph_are_told_apart(
    maker: RecordedGraphs, store: GraphStore
) -> None:
    """Numbers are; a tensor of another device and an object of unknown kind are not captured."""
    seen: list[float] = []

    def run(x: Tensor, factor: Any) -> Tensor:
        seen.append(factor)
        return x * (factor if isinstance(factor, float) else 1.0)

    key, x = ComponentKey("a"), torch.ones(3)
    for factor in (1.0, 2.0, 1.0, 2.0, 2.0):
        assert torch.equal(store.call(key, 0, run, (x,), {"factor": factor}, CPU), x * factor)
    assert len(maker.made) == 2
    for other in (object(), torch.zeros(1, device="meta")):
        for _ in range(3):
            store.call(key, 0, run, (x,), {"factor": other}, CPU)
    assert len(maker.made) == 2


def test_what_else_replaces_or_returns_is_respected(maker: RecordedGraphs, store: GraphStore) -> None:
    """A forward that a user put in place of the module's; a result with tensors that cannot be found; weights that
    leave are not held by a graph."""
    patcher = toy_patcher(store)
    patcher.state = patcher.state.with_object_patch("forward", lambda ids_BL: ids_BL + 1)
    for _ in range(3):
        assert torch.equal(call(patcher), IDS_BL + 1)
    assert maker.made == []

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    x = torch.ones(3)
    for _ in range(3):
        assert torch.equal(store.call(ComponentKey("a"), 0, lambda t: Box(t * 2), (x,), {}, CPU).tensor, x * 2)
    assert len(store) == 0

    usual = toy_patcher(store)
    call(usual)
    call(usual)
    assert len(store) == 1
    usual.evict_except(EVERYTHING - {"conv"})
    assert len(store) == 0


@pytest.mark.parametrize("family", ["unet", "flux", "wan", "qwenimage", "sd3"])
def test_architectures_compute_the_same_as_graphs(family: str, maker: RecordedGraphs, store: GraphStore) -> None:
    """Also with compiled blocks in them. Tables that a module makes at its first call and keeps are read again."""
    case, plain = build(family, torch.float16), build(family, torch.float16)

    def run(case: Case, graphs: GraphStore | None) -> Iterator[list[Tensor]]:
        store_in(case.module, torch.float16)
        key, form, tools = ComponentKey(family), WeightForm(torch.float32), RunTools(graphs=graphs)
        patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, case.module, CPU, form, tools)
        patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), PatchSet()))
        for _ in range(3):
            with quiet_libraries(), patcher.running(captures=True) as module:
                made = tensors_in(module(**case.inputs))
            yield made  # outside: the contexts of two runs in turns would end in another order than they began

    for found, expected in zip(run(case, store), run(plain, None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [graph.replays for graph in maker.made] == [2]


def test_compiled_blocks_are_part_of_graphs(maker: RecordedGraphs, store: GraphStore) -> None:
    torch._dynamo.reset()
    runs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph.forward(*inputs)

        return run

    case = build("qwenimage", torch.float16)
    store_in(case.module, torch.float16)
    tools = RunTools(graphs=store, compiler=BlockCompiler(backend))
    key, form = ComponentKey("qwen"), WeightForm(torch.float32)
    patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, case.module, CPU, form, tools)
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), PatchSet()))
    found = []
    for _ in range(3):
        with quiet_libraries(), patcher.running(captures=True) as module:
            found.append(tensors_in(module(**case.inputs)))
    assert runs == 4, "two blocks, in the first call and in the capture"
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(later, found[0], strict=True))
    torch._dynamo.reset()


def test_plans_count_graphs_and_drop_them_before_anything_leaves(maker: RecordedGraphs, store: GraphStore) -> None:
    patcher = toy_patcher(store)
    patcher.unload()
    other = ModelPatcher.of(ComponentKey("other"), Role.VAE, make_toy(), CPU, WeightForm(torch.float32))
    weight_bytes, scratch_bytes = patcher.spec().weight_bytes, patcher.use().scratch_bytes
    activation_bytes = maker.held_bytes = 1000
    capacity_bytes = 2 * weight_bytes + scratch_bytes + 2 * activation_bytes + scratch_bytes
    vram = VramManager(capacity_bytes, graphs=store)
    vram.load(other)
    for _ in range(3):
        with vram.lease(with_dependents(patcher), activation_bytes) as lease:
            call(patcher)
            assert lease.plan.evict == ()
    assert vram.graph_bytes == 1000
    assert vram.room_bytes == capacity_bytes - 2 * weight_bytes - 1000
    uses = [patcher.use()]
    assert vram.activation_room(uses, 0) == capacity_bytes - scratch_bytes, "no run is divided for graphs"
    with vram.lease(with_dependents(patcher), activation_bytes + scratch_bytes + 500) as lease:
        assert lease.plan.evict == ()
        assert vram.graph_bytes == 0, "they leave before the other component does"
        call(patcher)
        assert vram.graph_bytes == 0, "and there is no room for another"
    assert vram.residency().of(other.key) is not None
    with vram.lease(with_dependents(patcher), activation_bytes):
        call(patcher)
    assert vram.graph_bytes == 1000
    vram.unload(patcher.key)
    assert vram.graph_bytes == 0, "the graphs of what leaves"
    vram.close()


def test_what_a_call_reads_and_did_not_make_is_found() -> None:
    weight, table, x = torch.randn(3, 3), torch.randn(3), torch.randn(2, 3)
    with ReadTensors() as reads:
        y = (x @ weight + table).relu_()
        y.view(-1).mul_(2.0)
    assert {t.data_ptr() for t in reads.found()} == {weight.data_ptr(), table.data_ptr(), x.data_ptr()}
