"""Parts "zoo" and "families": tiny models on the device compared with the CPU.

The zoo has one module per architecture, with streamed weights; the families run from text to pixels on the engine, in
float32 to compare numbers, and in the dtype that the device prefers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu.engine_jobs import EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from modelpool.pool.devices.detection import capabilities_here
from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.models.text.text_tokenizer import KINDS
from modelpool.pool.weights.ops.attention import AttentionBackend, attention_priority
from modelpool.pool.weights.ops.attention_calls import AttentionKernels
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool import zoo
from tests.pool.families.tiny_transformers import FAMILIES, TinyFamily
from tests.pool.models.text.tiny_tokenizers import tiny

#: largest difference in float32, relative to the largest value: sums are in another order
MOST_DIFFERENCE = 1e-3
#: of the sampled latents, after steps that amplify differences
MOST_LATENT_DIFFERENCE = 2e-2
MIB = 1 << 20
BUDGET_BYTES = 2048 * MIB
STEPS = 3
#: between kernels in half precision
MOST_MEAN_LEVELS = 4.0
#: with `small`, this many of each are compared
FEW = 2


def compare_zoo(record: Record, setting: Setting) -> None:
    """Run every architecture with weights that stream to the device."""
    device = open_device(setting.device, 0, BUDGET_BYTES).torch_device
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    names = sorted(zoo.FAMILIES)
    with TransferPipeline.open(device, ahead_bytes=MIB) as pipeline:
        for name in names[:FEW] if setting.small else names:
            with record.attempting(name, least_seconds=2.0):
                worst = _zoo_difference(name, device, pipeline)
                record.add(
                    f"{name}, float32 with streamed float16 weights",
                    worst,
                    "of the largest value",
                    goal=f"at most {MOST_DIFFERENCE}",
                    is_met=worst <= MOST_DIFFERENCE,
                )


def _zoo_difference(name: str, device: torch.device, pipeline: TransferPipeline) -> float:
    case = zoo.build(name, torch.float16)
    expected = case.run()
    zoo.store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    uploader = pipeline.uploader()
    try:
        for _ in range(2):  # the second pass copies ahead
            with compute(device, torch.float32, uploader=uploader):
                found = case.run(device)
    finally:
        uploader.close()
    return max(_difference(a.float(), b.float()) for a, b in zip(found, expected, strict=True))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)) if found.numel() else 0.0


def compare_families(record: Record, setting: Setting) -> None:
    """Make an image or a video with every family, on the CPU and on the device."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for number, (name, family) in enumerate(FAMILIES.items()):
        if setting.small and number >= FEW:
            record.skip("the other families", "small")
            return
        folder = setting.models / name
        with record.attempting(name, least_seconds=4.0):
            path = write_family(folder, family)
            expected_latent, expected = _made(path, family, "cpu", as_float32=True)
            latent, pixels = _made(path, family, setting.device, as_float32=True)
            scale = max(1.0, float(np.abs(expected_latent).max()))
            worst = float(np.abs(latent - expected_latent).max()) / scale
            levels = int(np.abs(pixels.astype(int) - expected).max())
            record.add(
                f"{name}, latents in float32",
                worst,
                "of the largest value",
                goal=f"at most {MOST_LATENT_DIFFERENCE}",
                is_met=worst <= MOST_LATENT_DIFFERENCE,
                note=f"pixels differ by at most {levels} of 255",
            )
            if setting.device == "cuda":
                latent, pixels = _made(path, family, setting.device, as_float32=False)
                is_finite = bool(np.isfinite(latent).all())
                mean = float(np.abs(pixels.astype(int) - expected).mean())
                record.add(f"{name}, mean pixel difference in half precision", mean, "of 255", is_met=is_finite)


def compare_precision(record: Record, setting: Setting) -> None:
    """Make an image or a video with every family in the dtypes that the device prefers, under each attention kernel:
    finite, and with the pixels of the first kernel within rounding."""
    kernels = attention_priority(capabilities_here(setting.device)) or tuple(AttentionBackend)
    expected: dict[str, np.ndarray] = {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        if setting.small and number >= FEW:
            record.skip("the other families", "small")
            return
        with record.attempting(name, least_seconds=4.0):
            path = write_family(setting.work / name, family)
            for kernel in kernels[:1] if setting.small and number else kernels:
                latent, pixels = _made(path, family, setting.device, as_float32=False, kernel=kernel)
                known = expected.setdefault(name, pixels.astype(int))
                mean = float(np.abs(pixels.astype(int) - known).mean())
                is_met = bool(np.isfinite(latent).all()) and mean <= MOST_MEAN_LEVELS
                record.add(f"{name}, {kernel.value}", mean, "of 255 on average", None, f"at most {MOST_MEAN_LEVELS}",
                           is_met if setting.device == "cuda" else None)  # fmt: skip


def write_family(folder: Path, family: TinyFamily) -> Path:
    """Write the tiny file of a family with its tokenizers."""
    folder.mkdir(parents=True)
    path = folder / "tiny.safetensors"
    save_file(family.file(), path)
    for member in family.encoders:
        if member in KINDS and KINDS[member] != "byt5":
            place = folder / f"tokenizer_{member}"
            place.mkdir(exist_ok=True)
            tiny(KINDS[member]).save(str(place / "tokenizer.json"))
    return path


def _made(
    path: Path, family: TinyFamily, device: str, as_float32: bool, kernel: AttentionBackend | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Latent and pixels; `kernel` is tried before all other kernels."""
    engine = open_engine(device, BUDGET_BYTES)
    try:
        if kernel is not None:
            order = (kernel, *(other for other in AttentionBackend if other is not kernel))
            engine._tools = replace(engine._tools, attention=AttentionKernels(order))
        jobs = EngineJobs(path, engine, as_float32)
        video = jobs.family.sampling.video
        extent = Extent(*family.sides, STEPS, 0 if video is None else 1 + video.multiple)
        latent = jobs.sample(jobs.sample_work(extent), jobs.texts())
        return np.asarray(latent.samples_CHW, dtype=np.float64), jobs.decode(extent, latent)
    finally:
        engine.close()
