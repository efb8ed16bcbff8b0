"""Casting layers: modules that compute with weights that are elsewhere, in another dtype, or patched on the fly."""

from pool.ops.cast import WeightFunction, apply_weight_functions, cast
from pool.ops.classes import restore_classes, set_weight_functions, swap_to_casting
from pool.ops.context import ComputeContext, compute
from pool.ops.packed import Codec, PackedWeight, packed_weight, stored_bytes
from pool.ops.side_path import SidePath, set_side_path

__all__ = [
    "Codec",
    "ComputeContext",
    "PackedWeight",
    "SidePath",
    "WeightFunction",
    "apply_weight_functions",
    "cast",
    "compute",
    "packed_weight",
    "restore_classes",
    "set_side_path",
    "set_weight_functions",
    "stored_bytes",
    "swap_to_casting",
]
