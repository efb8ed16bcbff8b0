"""`ListedEntries`: the entries of a manifest by their keys. They stay where they are, in the file of a folder or
compressed: this object knows where each begins.

An entry takes 5 KB as an object and 100 bytes here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator

from modelpool.actors.graph.features.recorded_batches import RecordedBatches
from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.key_index import KeyIndex

#: the owner of a file that no output here lists
_NOBODY = -1


class ListedEntries:
    """The latest entry of each output, in the order of the first ones. `read` yields the entries that begin at these
    places, bytes of a file or numbers of lines. Not thread-safe."""

    __slots__ = ("_begins", "_files", "_keys", "_more_owners", "_newest", "_owners", "_read", "batches", "latest_run")

    def __init__(self, read: Callable[[Iterable[int]], Iterator[ManifestEntry]]) -> None:
        self._read = read
        self._keys = KeyIndex()
        #: where the latest entry of each key begins, by the number of the key
        self._begins = array("q")
        #: names of listed files, and the number of the key of each
        self._files = KeyIndex()
        self._owners = array("q")
        #: earlier owners of files with reused names, in places of earlier versions
        self._more_owners: dict[int, set[int]] = {}
        #: the entry that was noted last: its writer asks for it at once
        self._newest: ManifestEntry | None = None
        #: the largest number of a run; 0 without entries
        self.latest_run = 0
        #: the batch sizes of the outputs, by kind
        self.batches = RecordedBatches()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def note(self, entry: ManifestEntry, place: int) -> None:
        """Note an entry that begins at `place`, in place of an earlier one of its output."""
        _set(self._begins, self._keys.add(entry.key), place)
        self.note_file(entry)
        self.latest_run = max(self.latest_run, entry.run)
        self.batches.note(entry.recipe)
        self._newest = entry

    def note_file(self, entry: ManifestEntry) -> None:
        """Note that the file of an entry is of its output, which is listed, maybe with another file."""
        number, file = self._keys.find(entry.key), self._files.add(entry.file)
        owner = _NOBODY if number is None else number
        before = self._owners[file] if file < len(self._owners) else owner
        if before not in (owner, _NOBODY):
            self._more_owners.setdefault(file, set()).add(before)
        _set(self._owners, file, owner)

    def take(self, names: Iterable[str]) -> None:
        """Note that files with these names are of other outputs than any that is listed."""
        for name in names:
            _set(self._owners, self._files.add(name), _NOBODY)

    def with_files(self, names: Collection[str]) -> list[ManifestEntry]:
        """Return the entries with these files, in the order of all."""
        files = {number for name in names if (number := self._files.find(name)) is not None}
        owners = {self._owners[file] for file in files}.union(*(self._more_owners.get(file, ()) for file in files))
        begins = [self._begins[owner] for owner in sorted(owners - {_NOBODY})]
        wanted = set(names)
        return [entry for entry in self._read(begins) if entry.file in wanted]

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
        """Whether another output lists a file of this name."""
        number = self._files.find(name)
        return number is not None and self._owners[number] != self._keys.find(key)

    def __iter__(self) -> Iterator[ManifestEntry]:
        """Iterate over the entries of this moment."""
        return self._read(tuple(self._begins))


def _set(numbers: array[int], place: int, value: int) -> int:
    """Set an item, or append it if it is the next one; return its place."""
    if place == len(numbers):
        numbers.append(value)
    else:
        numbers[place] = value
    return place
