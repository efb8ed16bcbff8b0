"""`ListedEntries`: the entries of a manifest file by their keys. They stay in the file: memory has where each begins.

An entry takes 5 KB as an object and 100 bytes here: a folder of a million outputs is no different from a small one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.key_index import KeyIndex


class ListedEntries:
    """The latest entry of each output, in the order of the first ones. `read` yields the entries that begin at these
    bytes of the file. Not thread-safe."""

    __slots__ = ("_begins", "_files", "_keys", "_newest", "_owners", "_read", "latest_run")

    def __init__(self, read: Callable[[Iterable[int]], Iterator[ManifestEntry]]) -> None:
        self._read = read
        self._keys = KeyIndex()
        #: where the latest entry of each key begins, by the number of the key
        self._begins = array("q")
        #: names of listed files, and the number of the key of each
        self._files = KeyIndex()
        self._owners = array("q")
        #: the entry that was noted last: its writer asks for it at once
        self._newest: ManifestEntry | None = None
        #: the largest number of a run; 0 without entries
        self.latest_run = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def note(self, entry: ManifestEntry, at_byte: int) -> None:
        """Note an entry that begins there, in place of an earlier one of its output."""
        number = _set(self._begins, self._keys.add(entry.key), at_byte)
        _set(self._owners, self._files.add(entry.file), number)
        self.latest_run = max(self.latest_run, entry.run)
        self._newest = entry

    def get(self, key: str) -> ManifestEntry | None:
        """Return the entry of an output; None if it is not listed."""
        if self._newest is not None and self._newest.key == key:
            return self._newest
        number = self._keys.find(key)
        return None if number is None else next(self._read((self._begins[number],)))

    def is_file(self, name: str) -> bool:
        """Whether a file of this name is listed."""
        return name in self._files

    def is_of_another(self, name: str, key: str) -> bool:
        """Whether a file of this name is listed, as that of another output."""
        number = self._files.find(name)
        return number is not None and self._owners[number] != self._keys.find(key)

    def __iter__(self) -> Iterator[ManifestEntry]:
        """Iterate over the entries of this moment."""
        return self._read(tuple(self._begins))


def _set(numbers: "array[int]", place: int, value: int) -> int:
    """Set an item, or append it if it is the next one; return its place."""
    if place == len(numbers):
        numbers.append(value)
    else:
        numbers[place] = value
    return place
