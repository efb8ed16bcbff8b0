"""Memory-maps weights files and returns their tensors as views: no weight is copied, or read before it is used.

Knows how bytes become torch tensors, not what they mean. Processes that map the same file share its pages; the mapping
is private, so a write to a view would copy a page and never reach the file: nothing in this project writes to one. A
file must not be truncated in place while it is mapped; replace it by renaming. A checkpoint of several files is several
mappings behind one set of names.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.files.formats.byte_ranges import ByteRange, merge_ranges
from modelpool.pool.files.formats.ggml_types import is_block_type
from modelpool.pool.files.formats.page_tables import PrefetchRanges, start_prefetch
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.files.formats.weights_file import read_part
from modelpool.pool.values.core.errors import CorruptFile, counted
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.quant.gguf_codec import deinterleave_halves, gguf_tensor, gguf_values

#: block size of `find_non_finite`; bounds its memory to a few times as much
CHECK_BLOCK_BYTES = 4 << 20

#: of Linux on x86-64 and ARM64; Python's mmap has no name for it before 3.12. Source: asm-generic/mman.h
_MAP_NORESERVE = 0x4000


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A weights file mapped into memory, or several that are one checkpoint. The mappings live as long as this value or
    any view of them."""

    header: Header
    #: by the path of the file
    _storages: Mapping[str, torch.UntypedStorage]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> MappedFile:
        """Map the weights at `path`: a file, an index of shards or a folder. Reads only headers.

        Raises CorruptFile and UnsafeFile as `read_part` does.
        """
        return cls.of(read_part(os.fspath(path), allow_pickle=allow_pickle))

    @classmethod
    def of(cls, header: Header) -> MappedFile:
        """Map the files that `header` was read from.

        Raises CorruptFile when one is not as long as it was then, or cannot be mapped.
        """
        return cls(header, {path: _map_file(path, size_bytes) for path, size_bytes in header.files.items()})

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`: a view of the mapping, or a copy when its bytes are misaligned for its type or its
        values are stored in a different form (`TensorEntry.is_as_stored`). Packed if it is in one of ggml's block
        formats.

        Raises KeyError when the file has no such tensor, CorruptFile when torch has no such type.
        """
        entry = self.header.tensors[name]
        if entry.dtype not in TORCH_DTYPES and is_block_type(entry.dtype):
            return gguf_tensor(self._bytes(entry), entry.dtype, entry.shape, heads=entry.heads)
        if entry.heads or entry.added:
            return _restored(self._plain(entry), entry)
        return self._plain(entry)

    def _plain(self, entry: TensorEntry) -> Tensor:
        dtype = self._dtype(entry)
        if entry.begin % dtype.itemsize:
            plain = self._bytes(entry).clone().view(dtype)
            return plain.reshape(entry.shape) if entry.strides is None else plain.as_strided(entry.shape, entry.strides)
        view = torch.empty(0, dtype=dtype, device="cpu")
        offset, storage = entry.begin // dtype.itemsize, self._storages[self.header.path_of(entry.name)]
        if entry.strides is None:
            return view.set_(storage, offset, entry.shape)  # type: ignore[call-overload, no-any-return]
        return view.set_(storage, offset, entry.shape, entry.strides)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors by name; each view is created on access."""
        return _Views(self)

    def numbers(self, name: str, max_bytes: int) -> Iterator[Tensor]:
        """Yield all numbers of the tensor `name`, flat, in blocks of at most `max_bytes`, in file order.

        Raises as `tensor` does. Copies only misaligned blocks.
        """
        entry = self.header.tensors[name]
        dtype = self._dtype(entry)
        block_bytes = max(max_bytes // dtype.itemsize, 1) * dtype.itemsize
        for block in torch.split(self._bytes(entry), block_bytes):
            # a block is as misaligned as its tensor
            yield (block.clone() if entry.begin % dtype.itemsize else block).view(dtype)

    def raw(self, name: str) -> Tensor:
        """Return the stored bytes of the tensor `name`, flat, whatever its type: a view of the mapping."""
        return self._bytes(self.header.tensors[name])

    def prefetch(self, names: Iterable[str] | None = None) -> None:
        """Start reading the tensors `names` (all when None) into the page cache and the page table in the background,
        in file order: reading in module order would make the disk seek. Advisory; returns at once."""
        wanted = self.header.tensors if names is None else names
        by_path: dict[str, list[ByteRange]] = {}
        for name in wanted:
            entry = self.header.tensors[name]
            by_path.setdefault(self.header.path_of(name), []).append((entry.begin, entry.end))
        start_prefetch(
            [PrefetchRanges(path, self._storages[path], merge_ranges(ranges)) for path, ranges in by_path.items()]
        )

    def _dtype(self, entry: TensorEntry) -> torch.dtype:
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptFile(
                f"{self.header.path_of(entry.name)}: tensor {brief(entry.name)} has type {entry.dtype}, which cannot "
                f"be read yet"
            )
        return dtype

    def _bytes(self, entry: TensorEntry) -> Tensor:
        view = torch.empty(0, dtype=torch.uint8, device="cpu")
        return view.set_(self._storages[self.header.path_of(entry.name)], entry.begin, (entry.storage_bytes,))  # type: ignore[call-overload, no-any-return]


def _restored(stored: Tensor, entry: TensorEntry) -> Tensor:
    """Return a copy of a tensor that the file stores with permuted rows or an added constant, with that undone."""
    ordered = deinterleave_halves(stored, stored.shape[0] // entry.heads) if entry.heads else stored
    return (ordered.float() - entry.added).to(stored.dtype) if entry.added else ordered


def _map_file(path: str, size_bytes: int) -> torch.UntypedStorage:
    """Map the file privately. Raises CorruptFile when its size is no longer `size_bytes`."""
    with open_regular(path) as (file, now_bytes):
        if now_bytes != size_bytes:
            raise CorruptFile(f"{path}: changed while it was being opened: {size_bytes} bytes, then {now_bytes}")
        try:
            storage = torch.UntypedStorage.from_file(path, False, size_bytes)
            assert isinstance(storage, torch.UntypedStorage)
        except RuntimeError as error:
            if not sys.platform.startswith("linux"):
                raise CorruptFile(f"{path}: cannot be mapped into memory: {error}") from error
        else:
            return storage
        # Linux refuses private mappings larger than memory and swap unless they are MAP_NORESERVE. That mapping keeps a
        # file open as long as it lives, so it is only the fallback.
        try:
            room = mmap.mmap(
                file.fileno(),
                size_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, ValueError, OverflowError) as error:
            raise CorruptFile(f"{path}: cannot be mapped into memory: {error}") from error
        return torch.frombuffer(room, dtype=torch.uint8).untyped_storage()


class _Views(Mapping[str, Tensor]):
    """A `MappedFile` as a mapping."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped = mapped

    def __getitem__(self, name: str) -> Tensor:
        return self._mapped.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapped.header.tensors)

    def __len__(self) -> int:
        return len(self._mapped.header.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._mapped.header.tensors


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with infinite or undefined numbers.

    undefined  number of NaNs; the rest of `count` is infinite
    """

    name: str
    count: int
    elements: int
    undefined: int


def find_non_finite(mapped: MappedFile, names: Iterable[str] | None = None) -> tuple[NonFinite, ...]:
    """Return the tensors among `names` (all when None) that contain an infinity or NaN.

    Reads all their bytes, block by block, in memory of a few blocks. Skips integer tensors and types that torch cannot
    compute with: their scales are separate tensors.
    """
    found = []
    for name in mapped.header.tensors if names is None else names:
        entry = mapped.header.tensors[name]
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None and is_block_type(entry.dtype):
            numbers = gguf_values(mapped.raw(name), entry.dtype, CHECK_BLOCK_BYTES)
        elif dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            numbers = mapped.numbers(name, CHECK_BLOCK_BYTES)
        else:
            continue
        counts = [_non_finite_in(block) for block in numbers]
        count = sum(c for c, _ in counts)
        if count:
            found.append(NonFinite(name, count, entry.elements, sum(u for _, u in counts)))
    return tuple(found)


def check_finite(mapped: MappedFile) -> None:
    """Read the complete file and check that every weight is a finite number.

    Raises CorruptFile naming the first tensors that are not.
    """
    found = find_non_finite(mapped)
    if found:
        listed = ", ".join(f"{f.name} ({f.count} of {f.elements})" for f in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        holding = counted(len(found), "tensor holds", "tensors hold")
        raise CorruptFile(
            f"{mapped.header.path}: {holding} infinite or undefined numbers: {listed}{more}; expected finite weights"
        )


def _non_finite_in(block: Tensor) -> tuple[int, int]:
    """Return the count of infinite or undefined numbers, and the count of undefined ones."""
    # 8-bit floats have no arithmetic; complex and 64-bit numbers keep their range
    wide = block if block.is_complex() or block.dtype == torch.float64 else block.float()
    count = int(block.numel() - torch.isfinite(wide).sum())
    return count, int(torch.isnan(wide).sum()) if count else 0
