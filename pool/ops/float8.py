"""8-bit floats to wider ones on the CPU, several times as fast as torch, which converts them one by one.

Two neighbours are one 16-bit number, and a table says what every such pair becomes. The table is torch's own doing, so
that the result is too, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: below this the table takes as long as the conversion
LEAST_ELEMENTS = 1 << 18
#: looked up in one go: what is read and written then stays in the processor's cache, and the indices take no memory
_BLOCK_PAIRS = 1 << 16
_TENSORS = (Tensor, nn.Parameter)
_NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
#: whole numbers that hold a pair of what the table gives
_PAIRS = {torch.float16: torch.int32, torch.bfloat16: torch.int32, torch.float32: torch.int64}


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, by the faster way where there is one."""
    if x.dtype not in _NARROW or dtype not in _PAIRS or not _is_plain(x):
        return x.to(dtype)
    table = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(x.dtype).to(dtype).view(_PAIRS[dtype])
    made = torch.empty(x.shape, dtype=dtype)
    pairs, into = x.detach().view(-1).view(torch.uint16), made.view(-1).view(_PAIRS[dtype])
    for indices, block in zip(pairs.split(_BLOCK_PAIRS), into.split(_BLOCK_PAIRS), strict=True):
        torch.index_select(table, 0, indices.to(torch.int32), out=block)
    return made


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is numbers in the host's memory, in pairs, one after the other, and enough of them."""
    return (
        type(x) in _TENSORS
        and x.device.type == "cpu"
        and x.numel() >= LEAST_ELEMENTS
        and x.numel() % 2 == x.storage_offset() % 2 == 0
        and x.is_contiguous()
        and not x.requires_grad
        and not torch.compiler.is_compiling()
    )
