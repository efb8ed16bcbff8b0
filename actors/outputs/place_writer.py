"""`PlaceWriter`: writes outputs to a place that another process owns. Also finds out whether this process can.

The owner of a place, such as the driver, knows its manifest. A writer knows only what an order says. Both follow the
rules of the place, by which an output is created once: it does no harm if two of them write the same output, or if a
writer ends in between.

Whether two processes mean the same place by an address, with the same credentials and endpoint, or the same disk, is
not decided by guesses: the owner leaves a mark there, and the other process must find it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.atomic_write import MARK_NAME, TEMPORARY_SUFFIX, temporary_file
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.layout import LayoutKind, objects_at, read_layout
from modelpool.actors.outputs.objects import TEMPORARY_FOLDER
from modelpool.actors.outputs.place import WriteOrder, WriteReport
from modelpool.actors.outputs.store import OutputStore
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.pool.files.fetch.source_url import scheme_of
from modelpool.pool.values.core.stage_params import Output

#: file systems that each process has for itself
_OF_ONE_PROCESS = frozenset({"memory"})


class OtherPlace(FolderFailed):
    """Raised if this process finds another place at the address than its owner."""


@dataclass(frozen=True, slots=True)
class PlaceMark:
    """A small object that shows whether two processes see the same place.

    user  of the process that owns the place
    """

    name: str
    content: bytes
    user: int = field(default_factory=os.geteuid)


def is_seen_by_others(address: OutputAddress) -> bool:
    """Whether another process can see a place with this address at all."""
    return isinstance(address, Path) or scheme_of(address) not in _OF_ONE_PROCESS


@contextlib.contextmanager
def place_mark(address: OutputAddress) -> Iterator[PlaceMark]:
    """Leave a mark in a place until the end of the block. Raises FolderFailed."""
    name = f"{MARK_NAME}{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    if isinstance(address, Path):
        with _file_mark(address, f".{name}") as mark:
            yield mark
        return
    mark = PlaceMark(f"{TEMPORARY_FOLDER}{name}", uuid.uuid4().bytes)
    objects = objects_at(address)
    objects.replace(mark.name, mark.content)
    try:
        yield mark
    finally:
        objects.remove([mark.name])


@contextlib.contextmanager
def _file_mark(folder: Path, name: str) -> Iterator[PlaceMark]:
    """As `place_mark`. What a killed process leaves is removed by whoever opens the folder next."""
    mark = PlaceMark(name, uuid.uuid4().bytes)
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(temporary_file(folder / name))
            file.write(mark.content)
            file.flush()
        except OSError as error:
            raise FolderFailed(f"{folder}: cannot be written ({error.strerror or error})") from error
        yield mark


class PlaceWriter:
    """Writes what the owner of a place orders. Thread-safe."""

    def __init__(self, address: OutputAddress, mark: PlaceMark | None = None) -> None:
        """Raises FolderFailed if this process cannot write there: OtherPlace if it does not find the mark."""
        self._objects = objects_at(address)
        if mark is not None and self._objects.read_one(mark.name) != mark.content:
            raise OtherPlace(f"{address}: another place for this process than for the owner of the outputs")
        if mark is not None and isinstance(address, Path) and mark.user != os.geteuid():
            raise OtherPlace(f"{address}: files of this process would belong to user {os.geteuid()}, not {mark.user}")
        self._layout = read_layout(address)
        self._folder: OutputFolder | None = None
        if isinstance(address, Path) and self._layout.kind is LayoutKind.FILES:
            self._folder = OutputFolder(address, self._layout.thumbnail_pixels)
        else:
            self._objects.check_writable()

    def write(self, order: WriteOrder, output: Output) -> WriteReport:
        """Write and list an output, unless it is complete. Raises as `OutputPlace.write`, and OtherPlace if the layout
        has changed.
        """
        is_sharded = self._layout.kind is not LayoutKind.FILES
        if (order.is_sharded, order.thumbnail_pixels) != (is_sharded, self._layout.thumbnail_pixels):
            raise OtherPlace(f"{self._objects.url}: it has another layout since this process has opened it")
        image = order.facts.with_output(output)
        if self._folder is not None:
            return self._folder.write_ordered(order, image)
        store = OutputStore.ordered(self._objects, order, self._layout.thumbnail_pixels, is_sharded)
        return store.reported(store.write(image), image.key)
