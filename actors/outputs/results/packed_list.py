"""`PackedList`: a list that grows with every job of a submission, in little memory: compressed, and on disk when it is
long.

It keeps the latest items as they are. Earlier ones are compressed in chunks; chunks beyond `MOST_IN_MEMORY_BYTES` go to
a temporary file without a name, which ends with the process. Without space on the disk, they stay in memory.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from typing import IO, Any, Generic, TypeVar, overload

from modelpool.pool.values.core.errors import counted

T = TypeVar("T")

#: items that are compressed together: reading one reads all of these
CHUNK_ITEMS = 64
#: chunks that are kept as they are after they were read, and the latest ones, which are likely to be read
MOST_UNPACKED = 16
#: of compressed chunks; later ones are on disk
MOST_IN_MEMORY_BYTES = 16 << 20
#: a chunk that is larger has content of users, such as images, which its items may share with others: it stays as it is
MOST_CHUNK_BYTES = 1 << 20
_IN_FILE = -1
#: modules of the types of pixels
_ARRAYS = ("numpy", "PIL", "torch")


class PackedList(Sequence[T], Generic[T]):
    """A list of values that only grows. An item that is read is equal to the one that was added, and another object
    once it was packed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: list[T] = []
        #: full chunks: as they are, compressed, or None for those in the file
        self._chunks: list[bytes | list[T] | None] = []
        #: chunks that were added or read last
        self._unpacked: OrderedDict[int, list[T]] = OrderedDict()
        self._in_memory_bytes = 0
        self._file: IO[bytes] | None = None
        #: of the chunks in the file; behind them may be a part of one that found no space
        self._file_bytes = 0
        #: where chunks begin in the file, by number, and their size; `_IN_FILE` for those that are not in it
        self._begins = array("q")
        self._sizes = array("q")

    def append(self, item: T) -> None:
        """Add an item."""
        self.extend((item,))

    def extend(self, items: Iterable[T]) -> None:
        """Add items."""
        with self._lock:
            for item in items:
                self._latest.append(item)
                if len(self._latest) == CHUNK_ITEMS:
                    chunk, self._latest = self._latest, []
                    self._add_chunk(chunk)

    def __len__(self) -> int:
        with self._lock:
            return len(self._chunks) * CHUNK_ITEMS + len(self._latest)

    @overload
    def __getitem__(self, position: int) -> T: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[T, ...]: ...
    def __getitem__(self, position: int | slice) -> T | tuple[T, ...]:
        count = len(self)
        if isinstance(position, slice):
            return tuple(self[place] for place in range(*position.indices(count)))
        place = position + count if position < 0 else position
        if not 0 <= place < count:
            raise IndexError(f"found item {position} of {count}, expected one of these")
        number, within = divmod(place, CHUNK_ITEMS)
        with self._lock:
            return self._latest[within] if number == len(self._chunks) else self._chunk(number)[within]

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items of this moment: each chunk is read once, and not kept."""
        with self._lock:
            chunks, latest = len(self._chunks), tuple(self._latest)
        for number in range(chunks):
            with self._lock:
                chunk = self._chunk(number, keep=False)
            yield from chunk
        yield from latest

    def so_far(self) -> FirstItems[T]:
        """Return the items of this moment, which take no memory of their own."""
        return FirstItems(self, len(self))

    def _add_chunk(self, chunk: list[T]) -> None:
        packed = _packed(chunk)
        number = len(self._chunks)
        self._begins.append(_IN_FILE)
        self._sizes.append(0)
        self._chunks.append(chunk if packed is None else self._stored(number, packed))
        if packed is not None:
            self._keep_unpacked(number, chunk)

    def _stored(self, number: int, packed: bytes) -> bytes | None:
        """Return the part of a chunk that stays in memory: its bytes, or None after writing them to the file."""
        if self._in_memory_bytes + len(packed) > MOST_IN_MEMORY_BYTES:
            try:
                if self._file is None:  # without a buffer: one that a full disk does not take would fail reads
                    file = tempfile.TemporaryFile(prefix="modelpool-", buffering=0)  # noqa: SIM115  # ends with the list
                    self._file = file
                _write_at(self._file.fileno(), packed, self._file_bytes)
            except OSError:
                pass  # no space: memory has some
            else:
                self._begins[number], self._sizes[number] = self._file_bytes, len(packed)
                self._file_bytes += len(packed)
                return None
        self._in_memory_bytes += len(packed)
        return packed

    def _chunk(self, number: int, keep: bool = True) -> list[T]:
        """Return a full chunk; `keep` it for the next time."""
        kept = self._chunks[number]
        if isinstance(kept, list):
            return kept
        if number in self._unpacked:
            return self._unpacked[number]
        if kept is None:
            assert self._file is not None, "a chunk that is not in memory is in the file"
            kept = os.pread(self._file.fileno(), self._sizes[number], self._begins[number])
        chunk: list[T] = pickle.loads(zlib.decompress(kept))  # written by this object: nobody else has the file
        if keep:
            self._keep_unpacked(number, chunk)
        return chunk

    def _keep_unpacked(self, number: int, chunk: list[T]) -> None:
        self._unpacked[number] = chunk
        while len(self._unpacked) > MOST_UNPACKED:
            self._unpacked.popitem(last=False)


def _write_at(descriptor: int, content: bytes, at: int) -> None:
    """Write all of `content` to a file, from the byte `at` on. Raises OSError."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written


class FirstItems(Sequence[T], Generic[T]):
    """The first `count` items of a list. Equal to a tuple with the same items, and one when it is pickled."""

    __slots__ = ("_count", "_items")

    def __init__(self, items: PackedList[T], count: int) -> None:
        self._items = items
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> T: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[T, ...]: ...
    def __getitem__(self, position: int | slice) -> T | tuple[T, ...]:
        if isinstance(position, slice):
            return tuple(self._items[place] for place in range(*position.indices(self._count)))
        return self._items[range(self._count)[position]]

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._items), self._count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (FirstItems, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{counted(self._count, 'item')}>"

    def __reduce__(self) -> tuple[type[tuple[Any, ...]], tuple[tuple[T, ...]]]:
        return tuple, (tuple(self),)  # a file cannot travel


class _NotPlainError(Exception):
    """The items have pixels, which do not become smaller, and which other items may share."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        """Refuse pixels; see `pickle.Pickler`."""
        if type(found).__module__.partition(".")[0] in _ARRAYS:
            raise _NotPlainError
        return NotImplemented


def _packed(chunk: list[Any]) -> bytes | None:
    """Return the items as bytes; None if they have to stay as they are."""
    buffer = BytesIO()
    try:
        _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(chunk)
    except Exception:  # whatever an object of a user raises
        return None
    content = buffer.getbuffer()
    return zlib.compress(content, 1) if len(content) <= MOST_CHUNK_BYTES else None
