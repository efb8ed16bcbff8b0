"""Classifies torch operations for the simulated device by their schema, once each, and frequent methods by name.

`pool.devices.sim.tensor` carries them out.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


class OpKind(enum.Enum):
    """The way in which an operation is carried out."""

    PURE = enum.auto()  # results are fresh, or share storage with an argument
    WHOLE = enum.auto()  # PURE, and one of WHOLE_OPS
    VIEW = enum.auto()  # results are views of the first argument
    IN_PLACE = enum.auto()  # writes into arguments and returns them
    OUT = enum.auto()  # writes into keyword arguments made for that, and returns them
    RANDOM = enum.auto()  # draws random numbers: PURE or IN_PLACE, from the device's own stream
    COPY = enum.auto()  # Tensor.copy_, which may cross devices
    CONVERT = enum.auto()  # Tensor.to, which may cross devices
    READ_SCALAR = enum.auto()  # Tensor.item, which goes to the host
    RESTRIDE = enum.auto()  # changes shape and strides of its first argument in place, on the same storage
    SAME_CLASS = enum.auto()  # checks whether one tensor could replace the other
    REFUSED = enum.auto()  # would change or replace a storage without being accounted for


@dataclass(frozen=True, slots=True)
class OpPlan:
    """The plan for carrying out one operation."""

    op: OpOverload  # the operation
    compute: Callable[..., Any]  # what to call with CPU tensors and otherwise the same arguments
    kind: OpKind
    tensor_positions: tuple[int, ...]  # arguments that may hold tensors or lists of tensors, by position
    tensor_names: frozenset[str]  # the same, by name
    cpu_positions: frozenset[int]  # of `tensor_positions`: where CUDA, too, takes CPU tensors (indices)
    written_positions: tuple[int, ...]  # IN_PLACE: arguments that are returned, in the order of the returns
    written_names: tuple[str, ...]  # OUT: likewise, by name
    size_position: int | None  # for an operation that creates a tensor of a specified size: the argument with the size


# Operations that torch breaks into parts before a device sees them, and which the simulated device takes whole: it then
# computes what the CPU computes by the CPU's own choice of parts, and crosses into Python once instead of several
# times. The price is that they record no gradient.
WHOLE_OPS = (
    aten.linear.default,
    aten.matmul.default,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.rms_norm.default,
    aten.scaled_dot_product_attention.default,
)

# Operations that make a tensor from no tensor. Most would otherwise fill an empty tensor that torch resizes first,
# which the wrapper cannot follow.
FACTORY_NAMES = (
    "arange",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "fft_fftfreq",
    "fft_rfftfreq",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)

_SPECIAL_KINDS = {
    aten.copy_.default: OpKind.COPY,
    aten._to_copy.default: OpKind.CONVERT,
    aten._local_scalar_dense.default: OpKind.READ_SCALAR,
    aten._has_compatible_shallow_copy_type.default: OpKind.SAME_CLASS,
    aten._resize_output_.default: OpKind.REFUSED,
    aten._copy_from_and_resize.default: OpKind.REFUSED,
    aten.set_data.default: OpKind.REFUSED,
}

# torch marks a conjugate or a negative with a bit that the wrapper does not carry: compute them instead.
_SUBSTITUTES = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}

# The same operations by the entrance that Python code uses: it parses its arguments several microseconds faster than
# `torch.ops`. Only operations that a step of a diffusion model calls often, with arguments in the same order.
_FAST_ENTRANCES: dict[OpOverload, Callable[..., Any]] = {
    aten._softmax.default: torch._softmax,
    aten.add.Tensor: torch.add,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.conv2d.default: torch.conv2d,
    aten.conv3d.default: torch.conv3d,
    aten.div.Tensor: torch.div,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.group_norm.default: torch.group_norm,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: torch.nn.functional.linear,
    aten.matmul.default: torch.matmul,
    aten.mul.Tensor: torch.mul,
    aten.permute.default: torch.permute,
    aten.scaled_dot_product_attention.default: torch.nn.functional.scaled_dot_product_attention,
    aten.silu.default: torch._C._nn.silu,
    aten.sub.Tensor: torch.sub,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


class DirectKind(enum.Enum):
    """What a method of DIRECT_METHODS returns."""

    BINARY = enum.auto()  # a fresh tensor; the only argument is a number or a tensor
    ELEMENTWISE = enum.auto()  # a fresh tensor; other tensors may be among the positional arguments
    VIEW = enum.auto()  # a view of the tensor
    VIEWS = enum.auto()  # several views of the tensor
    COPYING = enum.auto()  # the tensor itself, a view or a copy of it
    CONVERTING = enum.auto()  # Tensor.to
    INDEXING = enum.auto()  # Tensor.__getitem__


# Methods of tensors that a step of a diffusion model calls often. Each is one operation: parts of it would be charged
# to the device otherwise.
DIRECT_METHODS: Mapping[str, DirectKind] = MappingProxyType(
    {
        **dict.fromkeys(("__add__", "__matmul__", "__mul__", "__sub__", "__truediv__"), DirectKind.BINARY),
        **dict.fromkeys(
            ("__neg__", "add", "div", "matmul", "mean", "mul", "neg", "pow", "sub"), DirectKind.ELEMENTWISE
        ),
        **dict.fromkeys(
            ("expand", "permute", "squeeze", "transpose", "unflatten", "unsqueeze", "view"), DirectKind.VIEW
        ),
        **dict.fromkeys(("chunk", "split", "unbind"), DirectKind.VIEWS),
        **dict.fromkeys(("contiguous", "flatten", "float", "reshape"), DirectKind.COPYING),
        "to": DirectKind.CONVERTING,
        "__getitem__": DirectKind.INDEXING,
    }
)

_INDEXING_OPS = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
    }
)


@functools.cache
def plan_of(op: OpOverload) -> OpPlan:
    """Return the plan of `op`, a pure function of its schema and tags."""
    arguments = op._schema.arguments
    tensor_places = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
    return OpPlan(
        op=op,
        compute=_SUBSTITUTES.get(op) or _FAST_ENTRANCES.get(op, op),
        kind=_kind_of(op),
        tensor_positions=tuple(i for i in tensor_places if not arguments[i].kwarg_only),
        tensor_names=frozenset(arguments[i].name for i in tensor_places),
        cpu_positions=frozenset({1}) if op in _INDEXING_OPS else frozenset(),
        written_positions=tuple(i for i, a in enumerate(arguments) if not a.kwarg_only and _is_returned(op, a)),
        written_names=tuple(a.name for a in arguments if a.kwarg_only and _is_returned(op, a)),
        size_position=next((i for i, a in enumerate(arguments) if a.name == "size"), None),
    )


@functools.cache
def factory_ops() -> tuple[OpOverload, ...]:
    """Return every overload of FACTORY_NAMES that takes no tensor and has a device argument."""
    found = []
    for name in FACTORY_NAMES:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            if any("Tensor" in str(a.type) for a in arguments) or all(a.name != "device" for a in arguments):
                continue
            found.append(op)
    return tuple(found)


def _kind_of(op: OpOverload) -> OpKind:
    special = _SPECIAL_KINDS.get(op)
    if special is not None:
        return special
    if op in WHOLE_OPS:
        return OpKind.WHOLE
    if torch.Tag.inplace_view in op.tags:
        return OpKind.REFUSED if op._schema.name.startswith(("aten::resize", "aten::set_")) else OpKind.RESTRIDE
    if torch.Tag.nondeterministic_seeded in op.tags:
        return OpKind.RANDOM
    if any(argument.is_out for argument in op._schema.arguments):
        return OpKind.OUT
    aliases = [r.alias_info for r in op._schema.returns if r.alias_info is not None]
    if any(alias.is_write for alias in aliases):
        return OpKind.IN_PLACE
    return OpKind.VIEW if aliases else OpKind.PURE


def _is_returned(op: OpOverload, argument: torch.Argument) -> bool:
    """Whether `argument` is written and is one of the results."""
    written = argument.alias_info
    if written is None or not written.is_write:
        return False
    returned = [r.alias_info.before_set for r in op._schema.returns if r.alias_info is not None]
    return written.before_set in returned
