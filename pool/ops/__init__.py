"""Casting layers: modules that compute with weights that are elsewhere, in another dtype, or patched on the fly."""

from pool.ops.attention import AttentionBackend, attending_with, attention_priority
from pool.ops.cast import WeightFunction, apply_weight_functions, cast
from pool.ops.classes import restore_classes, set_weight_functions, swap_to_casting
from pool.ops.context import ComputeContext, LinearKernel, compute
from pool.ops.convolution import conv_nd, needs_conv3d_workaround
from pool.ops.filling import assert_filled, fill
from pool.ops.initialisation import without_initialisation
from pool.ops.packed import Codec, PackedWeight, packed_weight, stored_bytes
from pool.ops.pick import OperationFlags, Operations, OperationsKind, pick_operations
from pool.ops.side_path import SidePath, set_side_path

__all__ = [
    "AttentionBackend",
    "Codec",
    "ComputeContext",
    "LinearKernel",
    "OperationFlags",
    "Operations",
    "OperationsKind",
    "PackedWeight",
    "SidePath",
    "WeightFunction",
    "apply_weight_functions",
    "assert_filled",
    "attending_with",
    "attention_priority",
    "cast",
    "compute",
    "conv_nd",
    "fill",
    "needs_conv3d_workaround",
    "packed_weight",
    "pick_operations",
    "restore_classes",
    "set_side_path",
    "set_weight_functions",
    "stored_bytes",
    "swap_to_casting",
    "without_initialisation",
]
