"""Casting layers: modules that compute with weights that are elsewhere, in another dtype, or patched on the fly."""

from pool.ops.cast import WeightFunction, apply_weight_functions, cast
from pool.ops.classes import restore_classes, set_weight_functions, swap_to_casting
from pool.ops.context import ComputeContext, compute

__all__ = [
    "ComputeContext",
    "WeightFunction",
    "apply_weight_functions",
    "cast",
    "compute",
    "restore_classes",
    "set_weight_functions",
    "swap_to_casting",
]
