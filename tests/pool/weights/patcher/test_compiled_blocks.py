"""Frozen blocks run compiled, all others as usual, and the weights are the weights of the patcher in either case.

With a backend that only records, which computes what the graph says: results are equal bit for bit.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.attention import DEFAULT_PRIORITY, AttentionBackend
from modelpool.pool.weights.ops.attention_calls import AttentionKernels
from modelpool.pool.weights.ops.casting_classes import Casting
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.compiled_blocks import (
    CACHE_VARIABLE,
    BlockCompiler,
    compiled_classes,
    repeated_blocks,
    shapes_of,
)
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import ResidentForm, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.toy import make_patch
from tests.pool.zoo import Case, build, store_in
from tests.pool.zoo.case import quiet_libraries

CPU = torch.device("cpu")


class Graphs:
    """A backend that runs graphs as they are. Counts those that were compiled, and their runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*inputs: Any) -> Any:
            self.runs += 1
            return graph.forward(*inputs)

        return run


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patcher_of(case: Case, compiler: BlockCompiler | None) -> ModelPatcher:
    """A patcher of weights in half precision that computes in single precision, with all of them resident."""
    store_in(case.module, torch.float16)
    key, form = ComponentKey("model"), WeightForm(torch.float32)
    tools = RunTools(compiler=compiler)
    patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, case.module, CPU, form, tools)
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), patcher.patches))
    return patcher


def output(patcher: ModelPatcher, case: Case, interrupt: Callable[[], None] | None = None) -> list[Tensor]:
    with patcher.running(interrupt):
        return case.run()


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def is_as_before(module: nn.Module) -> bool:
    return all(isinstance(m, Casting) and "forward" not in m.__dict__ for m in module.modules())


def lora(module: nn.Module, strength: float) -> PatchSet:
    weight = next(n for n, p in repeated_blocks(module)[0].named_parameters() if p.ndim == 2)
    block = next(n for n, m in module.named_modules() if m is repeated_blocks(module)[0])
    name = f"{block}.{weight}"
    return PatchSet((make_patch(name, tuple(module.get_parameter(name).shape), "lora", strength),))


def test_blocks_of_a_class_share_one_graph_whatever_their_weights() -> None:
    """Also after a switch of LoRAs, which replaces resident weights."""
    case, plain, graphs = build("qwenimage", torch.float16), build("qwenimage", torch.float16), Graphs()
    patcher, uncompiled = patcher_of(case, BlockCompiler(graphs)), patcher_of(plain, None)
    blocks = repeated_blocks(case.module)
    assert compiled_classes(blocks) == {"QwenImageTransformerBlock": 2}
    checks: tuple[list[int], list[int]] = ([], [])
    expected = output(uncompiled, plain, lambda: checks[1].append(1))
    assert_equal(output(patcher, case, lambda: checks[0].append(1)), expected)
    assert (graphs.compiled, graphs.runs) == (1, 2)
    assert len(blocks) <= len(checks[0]) < len(checks[1])
    assert is_as_before(case.module)

    for strength in (1.0, 0.5):
        for each in (patcher, uncompiled):
            patches = lora(each.module, strength)
            each.patches = patches
            each.realize(WeightsTarget(each.resident_modules(), patches))
        assert_equal(output(patcher, case), output(uncompiled, plain))
    assert (graphs.compiled, graphs.runs) == (1, 6)


def test_a_block_that_is_not_frozen_runs_as_usual() -> None:
    """One with weights that stream; all, in a run with an option that acts on blocks; one of a class that torch
    refuses."""
    case, plain, graphs = build("qwenimage", torch.float16), build("qwenimage", torch.float16), Graphs()
    compiler = BlockCompiler(graphs)
    patcher, uncompiled = patcher_of(case, compiler), patcher_of(plain, None)
    expected = output(uncompiled, plain)

    kept = frozenset(m.name for m in patcher.modules() if not m.name.startswith("transformer_blocks.0."))
    patcher.realize(WeightsTarget(kept, patcher.patches))
    assert_equal(output(patcher, case), expected)
    assert graphs.runs == 1
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), patcher.patches))

    def doubled(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = extra["original_block"](args)
        return {**result, "img": result["img"] * 2}

    options = ModelOptions(transformer=TransformerOptions().with_block_replace(doubled, "double_block", 1))
    with quiet_libraries(), patcher.running(options=options), uncompiled.running(options=options):
        assert_equal(case.run(), plain.run())
    assert graphs.runs == 1
    with patcher.running():
        with patcher.running(options=options):
            assert_equal(case.run(), output_with(uncompiled, plain, options))
        assert graphs.runs == 1
        assert_equal(case.run(), expected)
    assert graphs.runs == 3


def output_with(patcher: ModelPatcher, case: Case, options: ModelOptions) -> list[Tensor]:
    with patcher.running(options=options):
        return case.run()


def test_a_class_that_cannot_be_compiled_runs_uncompiled_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    case, plain = build("qwenimage", torch.float16), build("qwenimage", torch.float16)

    def broken(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no compiler on this machine")

    compiler = BlockCompiler(broken)
    patcher = patcher_of(case, compiler)
    expected = output(patcher_of(plain, None), plain)
    for _ in range(2):
        assert_equal(output(patcher, case), expected)
    assert [cls.__name__ for cls in compiler.refused] == ["QwenImageTransformerBlock"]
    assert "no compiler on this machine" in next(iter(compiler.refused.values()))
    assert len([record for record in caplog.records if record.name.startswith("modelpool")]) == 1
    assert is_as_before(case.module)


def test_memory_that_runs_out_during_a_compilation_is_no_refusal() -> None:
    """Found in a review: the blocks of the class ran uncompiled from then on, and nothing made room."""
    case = build("qwenimage", torch.float16)

    def full(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    compiler = BlockCompiler(full)
    patcher = patcher_of(case, compiler)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        output(patcher, case)
    assert compiler.refused == {}
    assert is_as_before(case.module)


def test_blocks_run_uncompiled_after_an_attention_kernel_refused_a_shape() -> None:
    """Found in a review: the run was tried again without the kernel, by compiled code that contained it."""
    case, plain, graphs = build("qwenimage", torch.float16), build("qwenimage", torch.float16), Graphs()
    compiler = BlockCompiler(graphs)
    patcher, expected = patcher_of(case, compiler), output(patcher_of(plain, None), plain)
    assert_equal(output(patcher, case), expected)
    assert graphs.runs == 2
    tools = RunTools(attention=AttentionKernels(DEFAULT_PRIORITY), compiler=compiler)
    assert not tools.works_around(RuntimeError("another error"))
    assert not compiler.is_stopped
    refusal = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")
    assert tools.works_around(refusal)
    assert_equal(output(patcher, case), expected)
    assert graphs.runs == 2
    assert not tools.works_around(refusal), "the second time it is another's"


def test_a_refusal_inside_compiled_code_affects_one_size_of_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """Found in a review: compiled blocks stopped for all sizes until the process was restarted."""
    case, plain = build("qwenimage", torch.float16), build("qwenimage", torch.float16)
    refusals = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            nonlocal refusals
            refusals += 1
            raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.")

        return run

    compiler = BlockCompiler(backend)
    patcher, expected = patcher_of(case, compiler), output(patcher_of(plain, None), plain)
    for _ in range(2):
        assert_equal(output(patcher, case), expected)
    assert refusals == 1, "the second block and the second run know the size"
    assert compiler.refused == {}
    assert not compiler.is_stopped
    assert len(compiler.uncompiled) == 1
    (_, shapes), _ = next(compiler.uncompiled.items())
    assert shapes_of((torch.zeros(3, 5),), {}) != shapes
    assert len([record for record in caplog.records if record.name.startswith("modelpool")]) == 1


def test_blocks_are_compiled_where_calls_of_attention_are_routed() -> None:
    """As on CUDA: compiled code contains torch's function, and torch can trace the one in its place."""
    case, plain, graphs = build("qwenimage", torch.float16), build("qwenimage", torch.float16), Graphs()
    store_in(case.module, torch.float16)
    compiler = BlockCompiler(graphs)
    kernels = AttentionKernels((AttentionBackend.FLASH, AttentionBackend.MATH))
    key, form, tools = ComponentKey("model"), WeightForm(torch.float32), RunTools(attention=kernels, compiler=compiler)
    patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, case.module, CPU, form, tools)
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), patcher.patches))
    assert_equal(output(patcher, case), output(patcher_of(plain, None), plain))
    assert compiler.refused == {}
    assert (graphs.compiled, graphs.runs) == (1, 2)


def test_weights_that_change_during_a_run_are_those_of_compiled_blocks() -> None:
    """As patches of a part of the steps do."""
    case, plain, graphs = build("qwenimage", torch.float16), build("qwenimage", torch.float16), Graphs()
    patcher, uncompiled = patcher_of(case, BlockCompiler(graphs)), patcher_of(plain, None)
    with patcher.running(), uncompiled.running():
        for each, of in ((patcher, case), (uncompiled, plain)):
            of.run()
            each.realize(WeightsTarget(each.resident_modules(), lora(each.module, 1.0)))
        assert_equal(case.run(), plain.run())
    assert (graphs.compiled, graphs.runs) == (1, 4)
    assert is_as_before(case.module)


def test_blocks_that_are_never_compiled_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Found in a review: nothing told that `compile` has no effect on a model in 8 bits."""
    case, graphs = build("qwenimage", torch.float8_e4m3fn), Graphs()
    store_in(case.module, torch.float8_e4m3fn)
    form, tools = WeightForm(torch.float32, ResidentForm.STORED), RunTools(compiler=BlockCompiler(graphs))
    patcher = ModelPatcher.of(ComponentKey("model"), Role.DIFFUSION_MODEL, case.module, CPU, form, tools)
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), patcher.patches))
    for _ in range(2):
        output(patcher, case)
    assert graphs.compiled == 0
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("modelpool"))
    assert "8 bits" in said
    assert "2 QwenImageTransformerBlock" in said


class Small(nn.Module):
    """A block of which torch makes one kernel: a C++ compiler takes seconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BL: Tensor) -> Tensor:
        return x_BL + torch.relu(self.linear(x_BL)) * 0.5


class SmallStack(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Small(), Small()])

    def forward(self, x_BL: Tensor) -> Tensor:
        for block in self.blocks:
            x_BL = block(x_BL)
        return x_BL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own modules, about one another
def test_the_compiler_of_torch_computes_the_same_within_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for both blocks, also after a switch of LoRAs; its code is in the folder for it."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch's compiler for CPUs needs a C++ compiler")
    from torch._inductor import config

    graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    monkeypatch.setattr(config.cpp, "simdlen", 0)  # else it compiles programs to find what the CPU has
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    compiler, x_BL = BlockCompiler(), torch.randn(3, 8)
    generator = torch.Generator().manual_seed(1)
    module = SmallStack().requires_grad_(False).half()
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    results: dict[bool, list[Tensor]] = {}
    for compiles in (False, True):
        key, form = ComponentKey("small"), WeightForm(torch.float32)
        tools = RunTools(compiler=compiler if compiles else None)
        patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, copy.deepcopy(module), CPU, form, tools)
        everything = frozenset(m.name for m in patcher.modules())
        for strength in (0.0, 1.0):
            patches = PatchSet((make_patch("blocks.1.linear.weight", (8, 8), "lora", strength),))
            patcher.patches = patches
            patcher.realize(WeightsTarget(everything, patches))
            with patcher.running() as run:
                results.setdefault(compiles, []).append(run(x_BL))
    torch.testing.assert_close(results[True], results[False])
    assert not torch.equal(results[True][0], results[True][1])
    assert compiler.refused == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs_before == 1
    assert any(path.suffix in (".cpp", ".so") for path in tmp_path.rglob("*"))
