"""What a device can compute with, as a frozen value, and how each kind of device is asked.

The rules that turn a card's name and generation into abilities are pure. Decides nothing about models
(`pool.precision`, `pool.ops.pick`).
Source of the rules: comfyui-behaviour facts, section 3 (`should_use_fp16`, `should_use_bf16`, `supports_fp8_compute`,
`maximum_vram_for_weights`).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import StrEnum

import psutil
import torch

from pool.devices.kinds import DeviceKind

#: a CUDA generation, "compute capability": (8, 9) is Ada
Generation = tuple[int, int]

#: first generation with fast float16, with bfloat16, with 8-bit matrix products
FLOAT16_FROM: Generation = (7, 0)
BFLOAT16_FROM: Generation = (8, 0)
FP8_FROM: Generation = (8, 9)
#: first generation that has float16 at all
ANY_FLOAT16_FROM: Generation = (6, 0)

#: words in the names of Pascal cards on which float16 is right, if no faster
_SOUND_PASCAL = ("1080", "1070", "titan x", "p3000", "p3200", "p4000", "p4200", "p5000", "p5200", "p6000", "1060",
                 "1050", "p40", "p100", "p6", "p4")  # fmt: skip
#: words in the names of Turing cards whose float16 gives wrong numbers
_BROKEN_TURING = ("1660", "1650", "1630", "t500", "t550", "t600", "mx550", "mx450", "cmp 30hx", "t2000", "t1000",
                  "t1200")  # fmt: skip

#: share of a card's memory that weights may take, and what a run needs beside them
WEIGHTS_SHARE = 0.88
INFERENCE_BYTES = 0.8 * (1 << 30) + 400 * (1 << 20)


class HalfStorage(StrEnum):
    """Whether weights may be kept in float16 on a device that computes with them in float32."""

    ALWAYS = "always"
    WHEN_SHORT = "when memory is short"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """What one device can do.

    kind          what it is
    name          as its maker calls it
    generation    CUDA generation; None where there is none
    total_bytes   of its memory
    float16, bfloat16  it computes well in them
    half_storage  whether weights may rest in float16 where it does not compute well in it
    fp8_matmul    it multiplies 8-bit float matrices
    cublas_half   the package `cublas_ops` is there to be used
    """

    kind: DeviceKind
    name: str
    generation: Generation | None = None
    total_bytes: int = 0
    float16: bool = False
    bfloat16: bool = False
    half_storage: HalfStorage = HalfStorage.NEVER
    fp8_matmul: bool = False
    cublas_half: bool = False

    @property
    def weight_bytes(self) -> float:
        """What weights may take of its memory when everything is to stay on it."""
        return self.total_bytes * WEIGHTS_SHARE - INFERENCE_BYTES

    def computes(self, dtype: torch.dtype) -> bool:
        """It computes well in `dtype`."""
        known = {torch.float16: self.float16, torch.bfloat16: self.bfloat16, torch.float32: True, torch.float64: True}
        return known.get(dtype, False)


def cuda_capabilities(
    name: str, generation: Generation, total_bytes: int, cublas_half: bool = False
) -> DeviceCapabilities:
    """What an Nvidia card of this name and generation can do. Pure."""
    broken = generation == (7, 5) and _names(name, _BROKEN_TURING)
    sound_pascal = generation[0] == 6 and _names(name, _SOUND_PASCAL)
    if generation < ANY_FLOAT16_FROM:
        storage = HalfStorage.NEVER
    elif sound_pascal or (generation >= FLOAT16_FROM and not broken):
        storage = HalfStorage.ALWAYS
    else:
        storage = HalfStorage.WHEN_SHORT
    return DeviceCapabilities(
        kind=DeviceKind.CUDA,
        name=name,
        generation=generation,
        total_bytes=total_bytes,
        float16=generation >= FLOAT16_FROM and not broken,
        bfloat16=generation >= BFLOAT16_FROM,
        half_storage=storage,
        fp8_matmul=generation >= FP8_FROM,
        cublas_half=cublas_half and generation >= FLOAT16_FROM,
    )


def host_capabilities(kind: DeviceKind, total_bytes: int) -> DeviceCapabilities:
    """What a CPU, or a simulated device that computes on one, can do: float32. Its half precision is slower. Pure."""
    name = "CPU" if kind is DeviceKind.CPU else "simulated GPU"
    return DeviceCapabilities(kind=kind, name=name, total_bytes=total_bytes)


def detect_capabilities(kind: DeviceKind, index: int = 0, total_bytes: int | None = None) -> DeviceCapabilities:
    """What the device of this machine can do. `total_bytes` when it is to be used in part only.

    Asks the driver about a CUDA device; reserves no memory there.
    """
    if kind is not DeviceKind.CUDA:
        return host_capabilities(kind, total_bytes or int(psutil.virtual_memory().total))
    properties = torch.cuda.get_device_properties(index)
    return cuda_capabilities(
        properties.name,
        (properties.major, properties.minor),
        total_bytes or properties.total_memory,
        cublas_half=importlib.util.find_spec("cublas_ops") is not None,
    )


def default_device_kind() -> DeviceKind:
    """The kind of device that a pool uses on this machine unless it is told otherwise."""
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def _names(name: str, words: tuple[str, ...]) -> bool:
    """`name` has one of `words` as a word of its own ("1080" in "GTX 1080 Ti", not in "RTX 10800")."""
    lowered = name.lower()
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\d)", lowered) for word in words)
