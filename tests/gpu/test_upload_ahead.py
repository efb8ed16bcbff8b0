"""Weights that are brought beside a run on a real CUDA device: exact, and while it computes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, realize_in_steps
from modelpool.pool.weights.patcher.shared_weights import WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.toy import make_patch

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 4096, 24


def layers() -> nn.Sequential:
    """Some 800 MB in half precision."""
    with torch.no_grad():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH).half() for _ in range(LAYERS))).requires_grad_(False)


def patcher_on(pipeline: TransferPipeline, module: nn.Module) -> ModelPatcher:
    device = torch.device("cuda", 0)
    form = WeightForm(torch.float16)
    return ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, module, device, form, RunTools(pipeline=pipeline))


def bring(pipeline: TransferPipeline, patcher: ModelPatcher, patches: PatchSet) -> int:
    """All of it, as slices do; how often there was to wait for copies that are under way."""
    modules = frozenset(m.name for m in patcher.modules())
    steps, waits = realize_in_steps(patcher, WeightsTarget(modules, patches)), 0
    while True:
        if pipeline.is_full:
            waits += 1
            time.sleep(0.0005)
            continue
        with pipeline.overlapping():
            if next(steps, None) is None:
                return waits


def test_copies_go_on_while_the_device_computes() -> None:
    """Products keep the device busy for longer than the copies take: both together take hardly longer than they do."""
    device = torch.device("cuda", 0)
    busy = torch.randn(8192, 8192, device=device, dtype=torch.float16)

    def compute(products: int) -> None:
        x = busy
        for _ in range(products):
            x = (busy @ x).clamp(-1, 1)

    with TransferPipeline.open(device) as pipeline:
        module = layers()
        expected = {name: parameter.clone() for name, parameter in module.named_parameters()}
        patcher = patcher_on(pipeline, module)
        bring(pipeline, patcher, PatchSet())  # wakes everything
        pipeline.catch_up()
        patcher.unload()
        torch.cuda.synchronize()
        began = time.perf_counter()
        bring(pipeline, patcher, PatchSet())
        pipeline.catch_up()
        torch.cuda.synchronize()
        alone_seconds = time.perf_counter() - began
        patcher.unload()
        compute(4)
        torch.cuda.synchronize()
        began = time.perf_counter()
        compute(20)
        torch.cuda.synchronize()
        products = int(20 * 2 * alone_seconds / (time.perf_counter() - began)) + 20
        began = time.perf_counter()
        compute(products)
        torch.cuda.synchronize()
        compute_seconds = time.perf_counter() - began
        began = time.perf_counter()
        compute(products)
        bring(pipeline, patcher, PatchSet())
        pipeline.catch_up()
        torch.cuda.synchronize()
        together_seconds = time.perf_counter() - began
        assert together_seconds < compute_seconds + 0.5 * alone_seconds
        for name, parameter in patcher.module.named_parameters():
            assert parameter.device.type == "cuda"
            assert torch.equal(parameter.cpu(), expected[name]), name
        patcher.unload()


def test_patches_and_memory_that_is_freed_are_exact() -> None:
    """Weights are brought beside, read by the stream that computes, freed and brought again, over and over."""
    device = torch.device("cuda", 0)
    with TransferPipeline.open(device) as pipeline:
        patcher = patcher_on(pipeline, layers())
        patches = PatchSet((make_patch("0.weight", (WIDTH, WIDTH), "p", 0.5),))
        x_BD = torch.randn(64, WIDTH, device=device, dtype=torch.float16)
        sums = {}
        for turn in range(6):
            wanted = patches if turn % 2 else PatchSet()
            patcher.patches = wanted
            bring(pipeline, patcher, wanted)
            pipeline.catch_up()
            with patcher.running() as module:
                total = module(x_BD).float().sum()
            patcher.unload()  # while that may still be under way
            sums.setdefault(turn % 2, []).append(total)
        torch.cuda.synchronize()
        for found in sums.values():
            assert len({float(total) for total in found}) == 1
        assert float(sums[0][0]) != float(sums[1][0])
