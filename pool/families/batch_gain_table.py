"""`MEASURED`: how many times the images of single passes batches make, by family, size and device, with their sources.

A row is a measurement, never an estimate: rows that are missing count as not measured, with the batch size 1 if nobody
chooses another one. `python -m benchmarks.together` measures a row for the machine on which it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.values.core.batch_gains import MeasuredGain

_SD1 = frozenset({"sd1"})
_SDXL = frozenset({"sdxl"})
_QWEN = frozenset({"qwen_image"})
_FLUX = frozenset({"flux_dev", "flux_schnell"})
_HOST = frozenset({"cpu", "sim"})
_CUDA = frozenset({"cuda"})

#: sampling of 8 steps with guidance and decoding together, medians of 3, one thread in float32. The simulated device
#: computes on the CPU
_SHAPES = "benchmarks/RESULTS.md, Batching of tasks: the shapes model"
_SHAPES_BYTES = 9_400_000
#: iterations per second times the batch size, "torch 2.0 - no compile", text to image in float16
_DIFFUSERS = "huggingface.co/docs/diffusers, optimization/torch2.0 (diffusers 0.17)"
_SD1_BYTES = 1_720_000_000
#: seconds of a step, bfloat16 with torch.compile
_SGLANG = "github.com/sgl-project/sglang, pull request 22183"
_QWEN_BYTES = 41_000_000_000
#: minutes of 100 images of 1024x1024, batches of 1 and of 4
_DATADREAMER = "github.com/luxonis/datadreamer, pull request 34"
_SDXL_BYTES = 5_140_000_000
#: seconds of 1 and of 4 images of schnell in bfloat16; Kontext takes twice as long for two images as for one
_TORCHAO = "github.com/pytorch/ao, pull request 4072"
_KONTEXT = "github.com/huggingface/diffusers, issue 12459"
_FLUX_BYTES = 23_800_000_000


def _gains(**by_size: float) -> Mapping[int, float]:
    return MappingProxyType({int(size.removeprefix("of_")): gain for size, gain in by_size.items()})


MEASURED: tuple[MeasuredGain, ...] = (
    MeasuredGain(_SD1, _HOST, "one CPU thread", 64, _SHAPES_BYTES, _gains(of_2=1.65, of_4=2.24, of_8=2.48), _SHAPES),
    MeasuredGain(_SD1, _HOST, "one CPU thread", 128, _SHAPES_BYTES, _gains(of_2=1.27, of_4=1.45, of_8=1.39), _SHAPES),
    MeasuredGain(_SD1, _HOST, "one CPU thread", 256, _SHAPES_BYTES, _gains(of_2=1.01, of_4=1.05, of_8=0.84), _SHAPES),
    MeasuredGain(_SD1, _CUDA, "T4", 512, _SD1_BYTES, _gains(of_4=1.04, of_16=0.99), _DIFFUSERS),
    MeasuredGain(_SD1, _CUDA, "RTX 3090", 512, _SD1_BYTES, _gains(of_4=1.15, of_16=1.21), _DIFFUSERS),
    MeasuredGain(_SD1, _CUDA, "RTX 4090", 512, _SD1_BYTES, _gains(of_4=1.25, of_16=1.25), _DIFFUSERS),
    MeasuredGain(_SD1, _CUDA, "V100", 512, _SD1_BYTES, _gains(of_4=1.26, of_16=1.40), _DIFFUSERS),
    MeasuredGain(_SD1, _CUDA, "A100", 512, _SD1_BYTES, _gains(of_4=2.14, of_16=2.25), _DIFFUSERS),
    MeasuredGain(_SDXL, _CUDA, "L4", 1024, _SDXL_BYTES, _gains(of_4=1.09), _DATADREAMER),
    MeasuredGain(_QWEN, _CUDA, "H200", 512, _QWEN_BYTES, _gains(of_2=1.82, of_4=2.77, of_8=3.14, of_16=3.21), _SGLANG),
    MeasuredGain(_QWEN, _CUDA, "H200", 1024, _QWEN_BYTES, _gains(of_2=1.02), _SGLANG),
    MeasuredGain(_FLUX, _CUDA, "B200", 1024, _FLUX_BYTES, _gains(of_4=1.12), _TORCHAO),
    MeasuredGain(_FLUX, _CUDA, "not named", 1024, _FLUX_BYTES, _gains(of_2=1.0), _KONTEXT),
)


def measured_gains(family: str, kind: str) -> tuple[MeasuredGain, ...]:
    """Return the measurements of a family on a kind of device."""
    return tuple(each for each in MEASURED if family in each.families and kind in each.kinds)
