"""Kernels that a device has for the quantized weights of a component, with the cost of each. Pure.

A cost is what does not depend on the device's speed: the bytes of weights that a call of the component reads and writes
in device memory, and the rate of its products relative to those in the compute dtype. Used by `modelpool plan`; engines
decide by the same rules (`pool.engine.load_decisions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.engine.load_decisions import PLAIN_FORMATS, StoredFormat, why_not_native
from modelpool.pool.files.formats.ggml_types import is_block_type
from modelpool.pool.weights.ops.layer_choice import Products
from modelpool.pool.weights.quant.formats import FORMATS

#: dense products per second relative to float16, of kernels for 4-bit and for 8-bit inputs. Source: NVIDIA's data
#: sheets of the Ada, Hopper and Blackwell generations
_RATES: Mapping[str, float] = MappingProxyType({"nvfp4": 4.0, "convrot_w4a4": 4.0})
_EIGHT_BIT_RATE = 2.0
#: formats of the reference arithmetic, and bytes of a value in it
_REFERENCE = ("float8_e4m3fn", "float8_e5m2")
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel for the weights of one format.

    format          as stored
    kernel          "unpack", "native" or "reference"
    layers          linear layers with such weights
    traffic_bytes   of weights, read and written by a call of the component
    rate            of its products, relative to those in the compute dtype; inputs are quantized where it is above 1
    is_used         whether runs use it
    why             reason for that
    """

    format: str
    kernel: str
    layers: int
    traffic_bytes: int
    rate: float
    is_used: bool
    why: str


def kernel_costs(
    formats: Mapping[str, StoredFormat], compute_bytes: int, capabilities: DeviceCapabilities, products: Products
) -> tuple[KernelCost, ...]:
    """Return the kernels for each quantized format among `formats`, most layers first; none for plain weights.

    compute_bytes  of a value in the compute dtype
    """
    found: list[KernelCost] = []
    for name, stored in sorted(formats.items(), key=lambda item: -item[1].layers):
        if name in FORMATS or name in PLAIN_FORMATS or is_block_type(name):
            found += _of_format(name, stored, compute_bytes, capabilities, products)
    return tuple(found)


def _of_format(
    name: str, stored: StoredFormat, compute_bytes: int, capabilities: DeviceCapabilities, products: Products
) -> list[KernelCost]:
    why_not = why_not_native(name, capabilities)
    native = products is Products.AUTO and why_not is None
    emulated = products is Products.REFERENCE and PLAIN_FORMATS.get(name, name) in _REFERENCE
    unpack_bytes = stored.stored_bytes + 2 * stored.values * compute_bytes  # read, write values, read them
    reason = f"products = {products.value!r}"
    costs = [
        KernelCost(
            name, "unpack", stored.layers, unpack_bytes, 1.0, not (native or emulated),
            "every device has it" if not (native or emulated) else reason,
        ),
        KernelCost(
            name, "native", stored.layers, stored.stored_bytes, _RATES.get(name, _EIGHT_BIT_RATE), native,
            why_not or reason,
        ),
    ]  # fmt: skip
    if emulated:
        reference_bytes = stored.stored_bytes + 2 * stored.values * _FLOAT_BYTES
        costs.append(KernelCost(name, "reference", stored.layers, reference_bytes, 1.0, True, reason))
    return costs
