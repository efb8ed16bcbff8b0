"""Table of GPU kinds: relative speed, memory and link bandwidth.

For the first estimates of a scheduler before any run, and for simulated clusters; measurements always take precedence.
Names and figures only, no device access.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.values.core.errors import GIB

#: effective bandwidth of 16 lanes, bytes per second. Source: 27.2 GB/s over PCIe 4 x16 and 6.8 GB/s over PCIe 3 x8,
#: measured by ComfyUI-MultiGPU (charts of its README); PCIe 5 doubles PCIe 4. A tenth less, since those are good
#: machines
PCIE3, PCIE4, PCIE5 = 12.0e9, 24.5e9, 49.0e9

#: speed grows with peak ** SPEED_EXPONENT: the faster a GPU, the less of its peak is used, since memory-bound and
#: launch-bound parts do not scale. Fitted to Flux in the Hugging Face blog "lora-fast", which reports 7.89 s per image
#: on an H100 and 23.61 s on an RTX 4090: (989.4 / 165.2) ** 0.61 is their ratio
SPEED_EXPONENT = 0.61
#: the peak of the A100, the kind with speed 1
REFERENCE_TFLOPS = 312.0


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of GPU.

    name         common name without blanks: "H100", "RTX4090"
    half_tflops  peak of dense matrix products in float16 or bfloat16 with float32 sums
    gang_link_bytes_per_second  from one GPU to others of a machine, each way; 0 if a bridge that not all machines have
                                decides
    """

    name: str
    half_tflops: float
    memory_bytes: int
    link_bytes_per_second: float
    gang_link_bytes_per_second: float = 0.0

    @property
    def speed(self) -> float:
        """Speed of diffusion, as a multiple of an A100."""
        return float((self.half_tflops / REFERENCE_TFLOPS) ** SPEED_EXPONENT)


#: NVLink between modules on one board: half of the sum of both ways that data sheets state
NVLINK2, NVLINK3, NVLINK4, NVLINK5 = 150.0e9, 300.0e9, 450.0e9, 900.0e9


def _kind(name: str, half_tflops: float, memory_gib: int, link: float, gang_link: float = 0.0) -> GpuKind:
    return GpuKind(name, half_tflops, memory_gib * GIB, link, gang_link)


#: Sources are the vendors' data sheets, and for GeForce the white papers of the architecture. Where a sheet states the
#: figure with sparsity, this is half of it.
_ROWS = (
    # data centre, NVIDIA
    _kind("B200", 2250.0, 180, PCIE5, NVLINK5),  # DGX B200 data sheet: 36 PFLOPS sparse of eight, 1440 GB
    _kind("H200", 989.4, 141, PCIE5, NVLINK4),  # H200 data sheet, SXM
    _kind("H100", 989.4, 80, PCIE5, NVLINK4),  # H100 data sheet, SXM
    _kind("H100NVL", 835.5, 94, PCIE5),  # H100 NVL product brief
    _kind("H100PCIe", 756.5, 80, PCIE5),  # H100 white paper
    _kind("H20", 148.0, 96, PCIE5, NVLINK4),  # H20 data sheet
    _kind("A100", 312.0, 80, PCIE4, NVLINK3),  # A100 data sheet
    _kind("A100-40GB", 312.0, 40, PCIE4, NVLINK3),  # A100 data sheet of 2020
    _kind("A40", 149.7, 48, PCIE4),  # A40 data sheet
    _kind("A30", 165.0, 24, PCIE4),  # A30 data sheet
    _kind("A10", 125.0, 24, PCIE4),  # A10 data sheet
    _kind("A10G", 70.0, 24, PCIE4),  # AWS G5: 140 sparse
    _kind("L40S", 362.1, 48, PCIE4),  # L40S data sheet
    _kind("L40", 181.1, 48, PCIE4),  # L40 data sheet
    _kind("L4", 121.0, 24, PCIE4),  # L4 data sheet
    _kind("V100", 125.0, 32, PCIE3, NVLINK2),  # V100 data sheet, SXM2
    _kind("T4", 65.0, 16, PCIE3),  # T4 data sheet
    # workstation, NVIDIA
    _kind("RTXPRO6000", 503.8, 96, PCIE5),  # RTX PRO Blackwell white paper
    _kind("RTX6000Ada", 364.2, 48, PCIE4),  # RTX 6000 Ada data sheet
    _kind("RTXA6000", 154.8, 48, PCIE4),  # RTX A6000 data sheet
    _kind("RTXA5000", 111.1, 24, PCIE4),  # RTX A5000 data sheet
    _kind("RTXA4000", 76.7, 16, PCIE4),  # RTX A4000 data sheet
    # GeForce
    _kind("RTX5090", 209.5, 32, PCIE5),  # Blackwell white paper
    _kind("RTX5080", 112.6, 16, PCIE5),
    _kind("RTX5070Ti", 87.9, 16, PCIE5),
    _kind("RTX4090", 165.2, 24, PCIE4),  # Ada white paper
    _kind("RTX4080", 97.5, 16, PCIE4),
    _kind("RTX4070Ti", 80.2, 12, PCIE4),
    _kind("RTX4060Ti", 44.1, 16, PCIE4 / 2),  # eight lanes
    _kind("RTX3090Ti", 80.0, 24, PCIE4),  # Ampere white paper
    _kind("RTX3090", 71.0, 24, PCIE4),
    _kind("RTX3080", 59.5, 10, PCIE4),
    _kind("RTX3060", 25.5, 12, PCIE4),
    _kind("RTX2080Ti", 53.8, 11, PCIE3),  # Turing white paper
    # data centre, AMD
    _kind("MI300X", 1307.4, 192, PCIE5),  # MI300X data sheet
    _kind("MI250X", 383.0, 128, PCIE4),  # MI250X data sheet, both dies
)

GPU_KINDS: Mapping[str, GpuKind] = MappingProxyType({kind.name: kind for kind in _ROWS})

#: memory sizes that distinguish kinds of one name: "NVIDIA A100-SXM4-40GB"
_GIGABYTES = re.compile(r"(\d+)\s?GB\b", re.IGNORECASE)
#: what vendors write around the name of a kind
_DECORATION = re.compile(
    r"\b(NVIDIA|AMD|Tesla|GeForce|Quadro|Instinct|Generation|Graphics|HBM\w*|SXM\d?|OAM|Blackwell|Server|Workstation|"
    r"Edition|Laptop|GPU|DGX\w*|Max-Q|\d+GB)\b",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\s_-]+")


def kind_of(device_name: str) -> GpuKind | None:
    """The kind of a GPU by its driver's or a user's name for it: "NVIDIA H100 80GB HBM3", "rtx 4090". None for names
    that are not in the table; laptop GPUs are excluded: they carry the desktop's name with a third of its power."""
    if re.search(r"\b(Laptop|Max-Q|MIG)\b", device_name, re.IGNORECASE):
        return None
    plain = _plain(_DECORATION.sub(" ", device_name))
    if plain not in _BY_PLAIN_NAME:
        plain = plain.removesuffix("pcie")  # the card has the chip of the module, unless the table distinguishes them
    found = _BY_PLAIN_NAME.get(plain) or _BY_PLAIN_NAME.get(f"rtx{plain}")
    size = _GIGABYTES.search(device_name)
    if found is not None and size is not None:
        return _BY_PLAIN_NAME.get(f"{plain}{size[1]}gb", found)
    return found


def gang_link_of(device_name: str) -> float:
    """The bytes per second from a GPU with this driver's name to others of its machine, by its data sheet. 0 if that
    is unknown, as for cards: not all machines connect them."""
    kind = None if re.search("PCIe", device_name, re.IGNORECASE) else kind_of(device_name)
    return 0.0 if kind is None else kind.gang_link_bytes_per_second


def _plain(name: str) -> str:
    return _BETWEEN.sub("", name).lower()


_BY_PLAIN_NAME: Mapping[str, GpuKind] = {_plain(kind.name): kind for kind in _ROWS}
