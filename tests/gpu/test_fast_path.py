"""Options of the fast path on a real CUDA device: each changes speed, and values within rounding only.

Each feature that `cpu` and `sim` cannot show has a test here, so that one run on a GPU proves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.capabilities import detect_capabilities
from modelpool.pool.devices.detection import capabilities_here
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.attention import attention_priority
from modelpool.pool.weights.ops.attention_calls import AttentionKernels, torch_attention
from modelpool.pool.weights.ops.attention_choices import KernelChoices
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget, realize_in_steps
from modelpool.pool.weights.patcher.weight_form import MemoryFormat, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.quantize import quantize
from modelpool.pool.weights.vram.vram_manager import VramManager, with_dependents
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import Pipeline
from tests.pool.toy import make_toy, patches_for, reference

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
PLENTY = EngineSettings("cuda", 0, 2048 * MIB)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    write_tiny_checkpoint(tmp_path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "twist.safetensors", 2)
    yield Catalog([tmp_path], [tmp_path / "loras"], capabilities_here("cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0, 0)  # the cap is the process's


def images_of(catalog: Catalog, settings: EngineSettings, strengths: tuple[float, ...]) -> list[np.ndarray]:
    """The image of the model with the LoRA at each strength, by one engine."""
    engine, images = Engine.open(settings), []
    for strength in strengths:
        pipeline = Pipeline(engine, catalog, {"twist": strength} if strength else {})
        images.append(pipeline.image().astype(int))
        assert all(cost.peak_bytes <= cost.planned_bytes for cost in pipeline.costs), "the plan's figure does not hold"
    engine.close()
    return images


def test_a_switch_of_loras_keeps_addresses_and_gives_the_bytes_of_a_load(catalog: Catalog) -> None:
    engine = Engine.open(PLENTY)
    before: dict[str, int] = {}
    for strength in (0.0, 0.8, 0.0, 0.8):
        pipeline = Pipeline(engine, catalog, {"twist": strength} if strength else {})
        switched = pipeline.image()
        module = engine.patcher(pipeline.model, Role.DIFFUSION_MODEL).module
        now = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        assert before in ({}, now)
        before = now
    engine.close()
    fresh = Engine.open(PLENTY)
    assert np.array_equal(Pipeline(fresh, catalog, {"twist": 0.8}).image(), switched)
    fresh.close()


def test_loras_at_run_time_give_the_images_of_merged_ones_within_rounding(catalog: Catalog) -> None:
    strengths = (0.0, 0.8, 0.4)
    merged = images_of(catalog, PLENTY, strengths)
    at_run_time = images_of(catalog, replace(PLENTY, loras_at_run_time=True), strengths)
    assert np.array_equal(merged[0], at_run_time[0])
    assert not np.array_equal(at_run_time[1], at_run_time[0])
    assert all(np.abs(a - b).mean() <= 1.0 for a, b in zip(merged, at_run_time, strict=True))


def test_channels_last_give_the_images_of_contiguous_weights_within_rounding(catalog: Catalog) -> None:
    strengths = (0.0, 0.8)
    usual = images_of(catalog, PLENTY, strengths)
    last = images_of(catalog, replace(PLENTY, memory_format=MemoryFormat.CHANNELS_LAST), strengths)
    assert all(np.abs(a - b).mean() <= 1.0 for a, b in zip(usual, last, strict=True))


def test_the_measured_attention_kernel_computes_the_same_within_rounding(tmp_path: Path) -> None:
    """For shapes of image and video models; choices are read again, and the order is torch's afterwards."""
    order = attention_priority(detect_capabilities(DeviceKind.CUDA, 0))
    before = list(torch._C._get_sdp_priority_order())
    file = tmp_path / "choices.txt"
    shapes = [(2, 10, 4096, 4096, 64), (2, 20, 1024, 77, 64), (1, 24, 4608, 4608, 128), (1, 1, 4096, 4096, 512)]
    for dtype in (torch.float16, torch.bfloat16):
        kernels = AttentionKernels(order, KernelChoices(file))
        for batch, heads, queries, keys, size in shapes:
            q, k, v = (torch.randn(batch, heads, n, size, device=CUDA, dtype=dtype) for n in (queries, keys, keys))
            expected = torch_attention(q, k, v)
            with compute(CUDA, dtype, attention=kernels):
                found = F.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert kernels.choices is not None
    assert len(kernels.choices.known) == 2 * len(shapes)
    assert KernelChoices(file).known == kernels.choices.known
    assert list(torch._C._get_sdp_priority_order()) == before
    assert not torch.cuda.is_current_stream_capturing()


def test_cuda_graphs_give_the_images_of_usual_calls_and_keep_to_the_plan(catalog: Catalog) -> None:
    """Also after a switch of LoRAs, which captures nothing again, and after an eviction, which does."""
    strengths = (0.0, 0.0, 0.8, 0.0)
    usual = images_of(catalog, PLENTY, strengths)
    engine, images = Engine.open(replace(PLENTY, cuda_graphs=True)), []
    store = engine._tools.graphs
    assert store is not None
    captured = []
    for strength in strengths:
        pipeline = Pipeline(engine, catalog, {"twist": strength} if strength else {})
        images.append(pipeline.image().astype(int))
        captured.append(len(store))
        assert all(cost.peak_bytes <= cost.planned_bytes for cost in pipeline.costs), "the plan's figure does not hold"
    assert all(np.abs(a - b).max() <= 1 for a, b in zip(images, usual, strict=True))
    assert captured[-1] > 0
    assert captured[1:] == [captured[1]] * 3, "a switch captures nothing"
    assert 0 < store.held_bytes <= torch.cuda.memory_reserved(0)
    engine.vram.unload_all()
    assert store.held_bytes == 0
    again = Pipeline(engine, catalog, {}).image().astype(int)
    assert np.abs(again - usual[0]).max() <= 1
    engine.close()


def test_compiled_blocks_and_cuda_graphs_together_give_the_images_of_usual_calls(catalog: Catalog) -> None:
    usual = images_of(catalog, PLENTY, (0.0, 0.0, 0.8))
    both = images_of(catalog, replace(PLENTY, cuda_graphs=True, compiles=True), (0.0, 0.0, 0.8))
    assert all(np.abs(a - b).mean() <= 1.0 for a, b in zip(both, usual, strict=True))


def test_factors_of_a_lora_stay_for_a_run_within_the_plan() -> None:
    """On packed weights, through the real pipeline: values as on the CPU, equal in each call."""
    results = {}
    for name in ("cpu", "cuda"):
        toy = make_toy(3, torch.float32)
        for layer in (toy.wide, toy.narrow):
            layer.weight = torch.nn.Parameter(quantize(layer.weight.detach(), "float8_e4m3fn"), requires_grad=False)
        device = torch.device(name, 0) if name == "cuda" else torch.device(name)
        pipeline = TransferPipeline.open(device, ahead_bytes=8)  # too little for any factor
        form, tools = WeightForm(torch.float32), RunTools(pipeline=pipeline)
        patcher = ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, device, form, tools)
        patcher.patches = patches_for(make_toy(), "a", ("wide.weight", "narrow.weight"))
        vram = VramManager(1 << 24)
        ids_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]], device=device)
        with vram.lease(with_dependents(patcher), 1 << 20) as lease:
            assert lease.kept_bytes == patcher.product_bytes > 0
            with patcher.running() as module:
                results[name] = [module(ids_BL).cpu() for _ in range(3)]
        vram.close()
        pipeline.close()
    torch.testing.assert_close(results["cuda"], results["cpu"], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(results["cuda"][0], later) for later in results["cuda"][1:])


def test_a_switch_beside_a_run_is_seen_by_the_next_run_only() -> None:
    """Weights are written in place on a stream of their own, after the last run that read them."""
    device, names = torch.device("cuda", 0), ("wide.weight", "narrow.weight")
    pipeline = TransferPipeline.open(device)
    tools = RunTools(pipeline=pipeline)
    toy, form = make_toy(), WeightForm(torch.float32)
    patcher = ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, device, form, tools)
    everything = frozenset(module.name for module in patcher.modules())
    patcher.realize(WeightsTarget(everything, PatchSet()))
    ids_BL = torch.tensor([[1, 4, 9, 49, 0]], device=device)
    expected = reference(make_toy(), PatchSet(), ids_BL.cpu())
    for turn in range(20):
        with patcher.running() as module:
            torch.cuda._sleep(10_000_000)  # the run is far behind the host
            found = module(ids_BL)
        patches = patches_for(make_toy(), f"lora {turn}", names)
        with pipeline.overlapping():
            for _ in realize_in_steps(patcher, WeightsTarget(everything, patches)):
                pass
        pipeline.catch_up()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
        expected = reference(make_toy(), patches, ids_BL.cpu())
    patcher.unload()
    pipeline.close()
