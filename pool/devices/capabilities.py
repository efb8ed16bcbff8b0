"""Compute capabilities of a device as a frozen value, and their detection for each kind.

The rules that map a card's name and generation to capabilities are pure. Decisions about models are in
`pool.weights.patcher.compute_dtype` and `pool.weights.ops.layer_choice`. Source of the rules: comfyui-behaviour facts,
section 3 (`should_use_fp16`, `should_use_bf16`, `supports_fp8_compute`, `maximum_vram_for_weights`).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from modelpool.pool.devices.kind_names import ACCELERATORS, DeviceKind
from modelpool.pool.devices.memory_limits import host_memory
from modelpool.pool.devices.torch_modules import FindModule, device_count, device_module, device_name
from modelpool.pool.values.core.errors import UserError, unknown_name

#: a CUDA generation, "compute capability": (8, 9) is Ada
Generation = tuple[int, int]

#: first generation with fast float16, with bfloat16, with 8-bit matrix products
FLOAT16_FROM: Generation = (7, 0)
BFLOAT16_FROM: Generation = (8, 0)
FP8_FROM: Generation = (8, 9)
#: first generation that has float16 at all
ANY_FLOAT16_FROM: Generation = (6, 0)

#: words in the names of Pascal cards on which float16 is correct, but not faster
_AUDIO_PASCAL = ("1080", "1070", "titan x", "p3000", "p3200", "p4000", "p4200", "p5000", "p5200", "p6000", "1060",
                 "1050", "p40", "p100", "p6", "p4")  # fmt: skip
#: words in the names of Turing cards with wrong numbers in float16
_BROKEN_TURING = ("1660", "1650", "1630", "t500", "t550", "t600", "mx550", "mx450", "cmp 30hx", "t2000", "t1000",
                  "t1200")  # fmt: skip

#: AMD architectures with emulated or missing bfloat16: older than RDNA 3, and the first two of Vega.
#: Source: AMD's tables of matrix instructions; not tested on such a card
_ROCM_WITHOUT_BFLOAT16 = ("gfx803", "gfx900", "gfx906", "gfx101", "gfx103")
#: first release of macOS with GPU kernels that take bfloat16
_MACOS_BFLOAT16_FROM = 14
#: first generation of Cambricon cards with bfloat16
_MLU_BFLOAT16_FROM = 5

#: assumed card if only "cuda" is known
UNKNOWN_CARD: tuple[str, Generation] = ("an Nvidia GPU", (8, 0))

#: fraction of device memory for weights, and memory that a run needs in addition
WEIGHTS_SHARE = 0.88
INFERENCE_BYTES = 0.8 * (1 << 30) + 400 * (1 << 20)


class HalfStorage(StrEnum):
    """Whether weights may be kept in float16 on a device that computes with them in float32."""

    ALWAYS = "always"
    WHEN_SHORT = "when memory is short"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """Capabilities of one device.

    kind          device kind
    name          vendor name
    generation    CUDA compute capability; None for others
    total_bytes   of its memory
    float16, bfloat16  it computes well in them
    half_storage  whether weights may be stored in float16 if it does not compute well in it
    fp8_matmul    it multiplies 8-bit float matrices
    shares_host_memory  its memory is host memory
    """

    kind: DeviceKind
    name: str
    generation: Generation | None = None
    total_bytes: int = 0
    float16: bool = False
    bfloat16: bool = False
    half_storage: HalfStorage = HalfStorage.NEVER
    fp8_matmul: bool = False
    shares_host_memory: bool = False

    @property
    def weight_bytes(self) -> float:
        """Memory available to weights if everything stays on the device."""
        return self.total_bytes * WEIGHTS_SHARE - INFERENCE_BYTES

    def computes(self, dtype: torch.dtype) -> bool:
        """Whether it computes well in `dtype`."""
        known = {torch.float16: self.float16, torch.bfloat16: self.bfloat16, torch.float32: True, torch.float64: True}
        return known.get(dtype, False)


def cuda_capabilities(
    name: str,
    generation: Generation,
    total_bytes: int,
    shares_host_memory: bool = False,
) -> DeviceCapabilities:
    """Return the capabilities of an Nvidia card of this name and generation. Pure."""
    broken = generation == (7, 5) and _names(name, _BROKEN_TURING)
    audio_pascal = generation[0] == 6 and _names(name, _AUDIO_PASCAL)
    if generation < ANY_FLOAT16_FROM:
        storage = HalfStorage.NEVER
    elif audio_pascal or (generation >= FLOAT16_FROM and not broken):
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
        shares_host_memory=shares_host_memory,
    )


def host_capabilities(kind: DeviceKind, total_bytes: int) -> DeviceCapabilities:
    """Return the capabilities of a CPU, or a simulated device that computes on one: float32; half precision is slower.
    Pure."""
    shares = kind.facts.shares_host_memory
    return DeviceCapabilities(kind, kind.facts.title, total_bytes=total_bytes, shares_host_memory=shares)


def other_capabilities(
    kind: DeviceKind, name: str, total_bytes: int, bfloat16: bool, shares_host_memory: bool = False
) -> DeviceCapabilities:
    """Return the capabilities of an accelerator other than Nvidia's: float16 always, and no kernels for packed weights.
    Pure.

    8-bit products are off: their kernels here were tested on Nvidia cards only, and AMD's first ones use another 8-bit
    format.
    """
    return DeviceCapabilities(
        kind=kind,
        name=name,
        total_bytes=total_bytes,
        float16=True,
        bfloat16=bfloat16,
        half_storage=HalfStorage.ALWAYS,
        shares_host_memory=shares_host_memory or kind.facts.shares_host_memory,
    )


def rocm_bfloat16(architecture: str) -> bool:
    """Whether an AMD card of this architecture ("gfx1100", with or without ":features") computes in bfloat16. Pure."""
    return not architecture.startswith(_ROCM_WITHOUT_BFLOAT16)


def capabilities_of(device: str | DeviceCapabilities) -> DeviceCapabilities:
    """Return `device` itself, or the assumed capabilities of a device kind. Pure.

    For "cuda" that is a card of the Ampere generation, similarly for others: the calling process may have no GPU.
    Raises UnknownName.
    """
    if isinstance(device, DeviceCapabilities):
        return device
    if device not in {kind.value for kind in DeviceKind}:
        raise unknown_name("device kind", device, [kind.value for kind in DeviceKind])
    kind = DeviceKind(device)
    if kind.computes_on_host:
        return host_capabilities(kind, 0)
    if kind is DeviceKind.CUDA:
        return cuda_capabilities(*UNKNOWN_CARD, 0)
    return other_capabilities(kind, kind.facts.title, 0, bfloat16=kind is not DeviceKind.DIRECTML)


def weakest(devices: Iterable[DeviceCapabilities]) -> DeviceCapabilities:
    """Return the device of a pool with the widest dtypes: sizes computed for it hold for all. Pure.

    Raises ValueError if there is none.
    """
    return min(devices, key=lambda d: (d.bfloat16, d.float16, d.generation or (0, 0), d.total_bytes))


def detect_capabilities(
    kind: DeviceKind, index: int = 0, total_bytes: int | None = None, find_module: FindModule = device_module
) -> DeviceCapabilities:
    """Return the capabilities of a device of this machine. `total_bytes` limits its memory.

    Queries the driver of an accelerator; reserves no memory there. Raises UserError if this process has no such device.
    """
    if kind.computes_on_host:
        return host_capabilities(kind, total_bytes or host_memory().total_bytes)
    module = find_module(kind)
    if index >= device_count(module):
        raise UserError(f"device {kind.value}:{index}: found {device_count(module)} of kind {kind.facts.title}")
    name = device_name(kind, module, index)
    ask = getattr(module, "get_device_properties", None)
    facts = None if kind is DeviceKind.DIRECTML or ask is None else ask(index)
    size_bytes = total_bytes or int(getattr(facts, "total_memory", 0))
    integrated = bool(getattr(facts, "is_integrated", False))
    if kind is DeviceKind.CUDA:
        generation = (facts.major, facts.minor) if facts is not None else UNKNOWN_CARD[1]
        return cuda_capabilities(name, generation, size_bytes, integrated)
    if kind is DeviceKind.MPS:
        size_bytes = total_bytes or int(module.recommended_max_memory())
    return other_capabilities(kind, name, size_bytes, _has_bfloat16(kind, module, facts), integrated)


def default_device_kind(find_module: FindModule = device_module) -> DeviceKind:
    """Return the default device kind on this machine."""
    for kind in ACCELERATORS:
        try:
            if device_count(find_module(kind)):
                return kind
        except UserError:
            continue  # reported by `modelpool doctor`
    return DeviceKind.CPU


def _has_bfloat16(kind: DeviceKind, module: Any, facts: Any) -> bool:
    """Whether an accelerator other than Nvidia's computes in bfloat16, as reported by its kind."""
    match kind:
        case DeviceKind.ROCM:
            return rocm_bfloat16(str(getattr(facts, "gcnArchName", "")))
        case DeviceKind.MPS:
            release = platform.mac_ver()[0].partition(".")[0]
            return release.isdecimal() and int(release) >= _MACOS_BFLOAT16_FROM
        case DeviceKind.MLU:
            return int(getattr(facts, "major", 0)) >= _MLU_BFLOAT16_FROM
        case DeviceKind.XPU | DeviceKind.NPU:
            says = getattr(module, "is_bf16_supported", None)
            return True if says is None else bool(says())
        case _:
            return False


def _names(name: str, words: tuple[str, ...]) -> bool:
    """Whether `name` contains one of `words` as a separate word ("1080" in "GTX 1080 Ti", not in "RTX 10800")."""
    lowered = name.lower()
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\d)", lowered) for word in words)
