"""Weights in ggml's formats: packed as in a GGUF file, unpacked for computation.

A block is a row of bytes: one or two factors in float16, codes of a few bits, and for the K formats factors of
sub-blocks. Each function of `BLOCKS` maps blocks of shape (blocks, bytes per block) to float32 of shape (blocks, values
per block), equal bit for bit to `gguf.quants.dequantize`, where the weights are; the package's run in numpy. On one CPU
thread those take 2.2 times as long for Q8_0, and 0.4 to 0.6 times as long for Q4_K, Q5_0 and Q6_K (3,072 x 3,072
values). The package is the fallback for all other formats.

Knows bytes, formats and shapes; no files (`pool.files.formats.gguf_header`), nor the meaning of the weights.
Source: ggml's block layouts (ggml-common.h, MIT) as the `gguf` package 0.19 (MIT) has them in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.files.formats.ggml_types import block_size, package
from modelpool.pool.weights.ops.packed import NOMINAL_DTYPE, packed_weight
from modelpool.pool.weights.quant.formats import WEIGHT, Shape

#: values per block of the K formats
_K = 256
_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = tuple(range(8))


def _split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split the bytes of each block into pieces of `sizes` and the remainder."""
    return torch.split(blocks, [*sizes, blocks.shape[1] - sum(sizes)], dim=1)


def _halves(piece: Tensor) -> Tensor:
    """Convert bytes of float16 numbers to float32."""
    return piece.contiguous().view(torch.float16).float()


def _fields(piece: Tensor, width: int, shifts: Sequence[int]) -> Tensor:
    """Return the bit fields of each `width` bytes: the lowest field of all of them, then the next; as uint8, flat."""
    shift = torch.tensor(shifts, dtype=torch.uint8, device=piece.device).reshape(1, 1, -1, 1)
    mask = (1 << (8 // len(shifts))) - 1
    return ((piece.reshape(piece.shape[0], -1, 1, width) >> shift) & mask).reshape(piece.shape[0], -1)


def _q8_0(blocks: Tensor) -> Tensor:
    d, q = _split(blocks, 2)
    return q.contiguous().view(torch.int8).float() * _halves(d)


def _q4_0(blocks: Tensor) -> Tensor:
    d, q = _split(blocks, 2)
    return _halves(d) * (_fields(q, 16, _NIBBLES).float() - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, q = _split(blocks, 2, 2)
    return _halves(d) * _fields(q, 16, _NIBBLES).float() + _halves(m)


def _fifth_bits(piece: Tensor) -> Tensor:
    """Return 32 bits in order, each shifted to the fifth bit of a code."""
    shift = torch.arange(8, dtype=torch.uint8, device=piece.device)
    return ((piece.unsqueeze(-1) >> shift) & 1).reshape(piece.shape[0], 32) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, low = _split(blocks, 2, 4)
    return _halves(d) * ((_fields(low, 16, _NIBBLES) | _fifth_bits(high)).float() - 16.0)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, low = _split(blocks, 2, 2, 4)
    return _halves(d) * (_fields(low, 16, _NIBBLES) | _fifth_bits(high)).float() + _halves(m)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, q, d, d_min = _split(blocks, _K // 16, _K // 4, 2)
    scale = (_halves(d) * (scales & 15).float()).unsqueeze(-1)
    least = (_halves(d_min) * (scales >> 4).float()).unsqueeze(-1)
    return (scale * _fields(q, 32, _PAIRS).float().reshape(-1, 16, 16) - least).reshape(-1, _K)


def _q3_k(blocks: Tensor) -> Tensor:
    mask, low, scales, d = _split(blocks, _K // 8, _K // 4, 12)
    low_scales, high_scales = _split(scales, 8)
    scale = (_fields(low_scales, 8, _NIBBLES) | (_fields(high_scales, 4, _PAIRS) << 4)).float() - 32.0
    # a set bit of the mask adds nothing, an unset one subtracts four
    missing = (_fields(mask, 32, _BITS) ^ 1).float() * 4.0
    codes = _fields(low, 32, _PAIRS).float() - missing
    return ((_halves(d) * scale).unsqueeze(-1) * codes.reshape(-1, 16, 16)).reshape(-1, _K)


def _scales_and_minima(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits from 12 bytes: the last four of each are spread over all bytes."""
    first, second, third = piece[:, :4], piece[:, 4:8], piece[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    d, d_min, packed, q = _split(blocks, 2, 2, 12)
    scales, minima = _scales_and_minima(packed)
    codes = _fields(q, 32, _NIBBLES).float().reshape(-1, 8, 32)
    return ((_halves(d) * scales).unsqueeze(-1) * codes - (_halves(d_min) * minima).unsqueeze(-1)).reshape(-1, _K)


def _q5_k(blocks: Tensor) -> Tensor:
    d, d_min, packed, high, low = _split(blocks, 2, 2, 12, _K // 8)
    scales, minima = _scales_and_minima(packed)
    codes = (_fields(low, 32, _NIBBLES) | (_fields(high, 32, _BITS) << 4)).float().reshape(-1, 8, 32)
    return ((_halves(d) * scales).unsqueeze(-1) * codes - (_halves(d_min) * minima).unsqueeze(-1)).reshape(-1, _K)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = _split(blocks, _K // 2, _K // 4, _K // 16)
    scale = _halves(d) * scales.contiguous().view(torch.int8).float()
    codes = (_fields(low, 64, _NIBBLES) | (_fields(high, 32, _PAIRS) << 4)).float() - 32.0
    return (scale.unsqueeze(-1) * codes.reshape(-1, 16, 16)).reshape(-1, _K)


#: by ggml's name of the format
BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)


#: values unpacked at once, and largest scratch bytes for each: bounds the memory besides the result
CHUNK_VALUES = 1 << 20
CHUNK_SCRATCH_BYTES = 16


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """A `pool.weights.ops.packed.Codec` of one of ggml's formats.

    name         ggml's name of it
    block_bytes  bytes per block
    row_step     1 where rows are stored separately; 0 where blocks cross row ends; the rows of an attention head where
                 the file interleaves the rows of its two halves
    """

    name: str
    block_bytes: int
    row_step: int

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """The codes run over the rows in their first dimension."""
        return {WEIGHT: 0}

    def row_entries(self, name: str, rows: int) -> int:
        """One for each row."""
        return rows

    def reshaped(self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]) -> None:
        """None: blocks are laid out for the shape in the file."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values, computed in float32, as a new tensor."""
        codes = parts[WEIGHT]
        blocks = (deinterleave_halves(codes, self.row_step) if self.row_step > 1 else codes).reshape(
            -1, self.block_bytes
        )
        known = BLOCKS.get(self.name)
        size = math.prod(shape) // max(blocks.shape[0], 1)
        values = torch.empty((blocks.shape[0], size), dtype=dtype, device=blocks.device)
        for some, into in zip(*(t.split(max(CHUNK_VALUES // max(size, 1), 1)) for t in (blocks, values)), strict=True):
            into.copy_(known(some) if known else _by_package(some, self.name))
        return values.reshape(tuple(shape))

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result."""
        ordered = elements // block_size(self.name)[0] * self.block_bytes if self.row_step > 1 else 0
        return min(elements, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES + ordered


def gguf_tensor(codes: Tensor, kind: str, shape: Shape, dtype: torch.dtype = NOMINAL_DTYPE, heads: int = 0) -> Tensor:
    """Return the packed weight of `shape` with the nominal dtype `dtype` from `codes` (uint8, flat, as in the file) in
    ggml's format `kind`; shares their memory. With `heads`, its rows are that many heads with interleaved halves."""
    values, block_bytes = block_size(kind)
    by_row = len(shape) > 1 and math.prod(shape[1:]) % values == 0
    assert by_row or not heads, f"heads of {kind} {shape}, whose rows are not stored separately"
    codec = GgufCodec(kind, block_bytes, shape[0] // heads if heads else int(by_row))
    return packed_weight(codec, {WEIGHT: codes.reshape(shape[0], -1) if by_row else codes}, shape, dtype)


def gguf_values(codes: Tensor, kind: str, max_bytes: int) -> Iterator[Tensor]:
    """Yield the values of `codes` (as for `gguf_tensor`) in float32, flat, from at most `max_bytes` of codes at a
    time."""
    values, block_bytes = block_size(kind)
    for some in codes.reshape(-1, block_bytes).split(max(max_bytes // block_bytes, 1)):
        yield GgufCodec(kind, block_bytes, 1).unpack({WEIGHT: some}, (len(some) * values,), torch.float32)


def deinterleave_halves(rows: Tensor, head_rows: int) -> Tensor:
    """Return a copy of `rows` with the second half of each head after the first. The heads of `rows`, of `head_rows`
    rows, alternate rows of both halves.

    llama.cpp stores the queries and keys of Llama and Mistral interleaved; transformers rotates halves, not neighbours.
    """
    pairs = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _by_package(blocks: Tensor, kind: str) -> Tensor:
    """Dequantize blocks with the package, on the host in numpy."""
    gguf = package()
    values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(blocks.device)
