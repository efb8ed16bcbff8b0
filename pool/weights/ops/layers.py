"""Forwards of torch's stock layers, with weights that follow the input's device and dtype.

Used through `pool.weights.ops.casting_classes`: each function here replaces `forward` in a casting class. The
arithmetic is torch's; only the source of the weights differs. With resident weights in the input's dtype and without
functions, a layer costs the same as torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.weights.ops.cast import cast, gather_rows
from modelpool.pool.weights.ops.context import ComputeContext, LayerKernel, check_interrupt, current
from modelpool.pool.weights.ops.convolution import conv3d
from modelpool.pool.weights.ops.low_rank_linear import LOW_RANK_ATTRIBUTE, LowRankPath
from modelpool.pool.weights.ops.packed import PackedWeight


def _weights(layer: nn.Module, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return `layer`'s weight and bias cast for `x`, each None if the layer has none."""
    parameters = layer._parameters
    functions = layer.__dict__.get("_weight_functions")
    weight, bias = parameters["weight"], parameters.get("bias")
    if functions:
        return (
            None if weight is None else cast(weight, x.device, x.dtype, functions.get("weight", ())),
            None if bias is None else cast(bias, x.device, x.dtype, functions.get("bias", ())),
        )
    device, dtype = x.device, x.dtype
    # compare the type: `isinstance` takes twice as long with tensor classes, and PackedWeight has no subclasses
    stored_as: type[Any] = type(weight)
    if weight is not None and (weight.dtype != dtype or weight.device != device or stored_as is PackedWeight):
        weight = cast(weight, device, dtype)  # type: ignore[assignment]
    if bias is not None and (bias.dtype != dtype or bias.device != device):
        bias = cast(bias, device, dtype)  # type: ignore[assignment]
    return weight, bias


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    context = check_interrupt()
    attributes = self.__dict__
    if LOW_RANK_ATTRIBUTE in attributes:
        return _linear_low_rank(self, x, context)
    if context is not None and context.linear is not None and not attributes.get("_weight_functions"):
        parameters = self._parameters
        out = context.linear(x, parameters["weight"], parameters.get("bias"))  # type: ignore[arg-type] # a linear layer has a weight
        if out is not None:
            return out
    weight, bias = _weights(self, x)
    return F.linear(x, weight, bias)  # type: ignore[arg-type] # the same


def _linear_low_rank(self: nn.Linear, x: Tensor, context: ComputeContext | None) -> Tensor:
    """A linear layer that computes its weight functions as a separate low-rank product."""
    parameters = self._parameters
    weight, bias = parameters["weight"], parameters.get("bias")
    assert weight is not None
    bias_functions = self.__dict__.get("_weight_functions", {}).get("bias", ())
    out = None
    if context is not None and context.linear is not None and not bias_functions:
        out = context.linear(x, weight, bias)
    if out is None:
        cast_bias = None if bias is None else cast(bias, x.device, x.dtype, bias_functions)
        out = F.linear(x, cast(weight, x.device, x.dtype), cast_bias)
    low_rank: LowRankPath = self.__dict__[LOW_RANK_ATTRIBUTE]
    return low_rank.add_to(out, x)


#: a layer's arithmetic: layer, input, weight and bias -> result, by one operation of torch
LayerFunction: TypeAlias = Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]


def _by_kernel(kernel: LayerKernel, function: LayerFunction, layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return what the device's layer kernel computes of stored weights; None if it declines, or weights have
    functions."""
    if layer.__dict__.get("_weight_functions"):
        return None
    parameters = layer._parameters
    return kernel(function, layer, x, parameters["weight"], parameters.get("bias"))


def _forward(function: LayerFunction) -> Callable[[Any, Tensor], Tensor]:
    """Return the forward that computes `function`, by the device's layer kernel where it takes the call."""

    def forward(self: Any, x: Tensor) -> Tensor:
        context = check_interrupt()
        if context is not None and context.layer is not None:
            out = _by_kernel(context.layer, function, self, x)
            if out is not None:
                return out
        weight, bias = _weights(self, x)
        return function(self, x, weight, bias)

    return forward


#: the arithmetic of convolutions that is one operation: a class or an object patch may have put another in its place
_STOCK_CONVOLUTIONS = frozenset((*(cls._conv_forward for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)), conv3d))


def _convolved(self: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out: Tensor = self._conv_forward(x, weight, bias)
    return out


def _conv(self: Any, x: Tensor) -> Tensor:
    context = check_interrupt()
    # another padding is an operation more, and other arithmetic may be several: no layer kernel takes them
    if (
        context is not None
        and context.layer is not None
        and self.padding_mode == "zeros"
        and getattr(self._conv_forward, "__func__", None) in _STOCK_CONVOLUTIONS
    ):
        found = _by_kernel(context.layer, _convolved, self, x)
        if found is not None:
            return found
    weight, bias = _weights(self, x)
    out: Tensor = self._conv_forward(x, weight, bias)
    return out


def _conv_transpose(function: Callable[..., Tensor], num_dims: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        check_interrupt()
        weight, bias = _weights(self, x)
        output_padding = self._output_padding(
            x, output_size, self.stride, self.padding, self.kernel_size, num_dims, self.dilation
        )
        return function(x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation)

    return forward


def _group_normed(self: nn.GroupNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if x.numel() == self.num_groups:  # torch's function refuses groups of one value, at three times the price
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)
    return torch.group_norm(x, self.num_groups, weight, bias, self.eps, torch.backends.cudnn.enabled)


def _layer_normed(self: nn.LayerNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.layer_norm(x, self.normalized_shape, weight, bias, self.eps, False)


def _rms_normed(self: nn.RMSNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _silu(self: nn.SiLU, x: Tensor) -> Tensor:
    context = None if torch.compiler.is_compiling() else current()
    if context is not None and context.layer is not None and not self.inplace:
        out = context.layer(_silu_of, self, x, None, None)
        if out is not None:
            return out
    return F.silu(x, inplace=self.inplace)


def _silu_of(self: nn.SiLU, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.silu(x)


def _embedding(self: nn.Embedding, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return rows in `out_dtype`, else in the dtype of the context, else as stored."""
    check_interrupt()
    if self.max_norm is not None:
        raise NotImplementedError("an embedding with max_norm writes to its table; pooled weights are read-only")
    table = self._parameters["weight"]
    assert table is not None
    functions = self.__dict__.get("_weight_functions", {}).get("weight", ())
    context = current()
    dtype = out_dtype or (table.dtype if context is None else context.dtype)
    if functions:
        return F.embedding(ids, cast(table, ids.device, dtype, functions), self.padding_idx)
    return gather_rows(table, ids, dtype)


def _dropout(self: nn.Dropout, x: Tensor) -> Tensor:
    """Return the input, as torch does outside of training, without a call of the dispatcher."""
    return F.dropout(x, self.p, True, self.inplace) if self.training else x


#: torch's forward -> the replacement, of layers without weights
WEIGHTLESS_FORWARDS: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {nn.Dropout.forward: _dropout, nn.SiLU.forward: _silu}
)
#: torch's forward -> the replacement
FORWARDS: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        nn.Linear.forward: _linear,
        nn.Conv1d.forward: _conv,
        nn.Conv2d.forward: _conv,
        nn.Conv3d.forward: _conv,
        nn.ConvTranspose1d.forward: _conv_transpose(F.conv_transpose1d, 1),
        nn.ConvTranspose2d.forward: _conv_transpose(F.conv_transpose2d, 2),
        nn.ConvTranspose3d.forward: _conv_transpose(F.conv_transpose3d, 3),
        nn.GroupNorm.forward: _forward(_group_normed),
        nn.LayerNorm.forward: _forward(_layer_normed),
        nn.RMSNorm.forward: _forward(_rms_normed),
        nn.Embedding.forward: _embedding,
    }
)
