"""`KeptOutputs`: the complete outputs of a folder at one moment, by key. Their entries stay in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.key_index import KeyIndex
from modelpool.actors.outputs.place import KeptImage


class KeptOutputs(Mapping[str, KeptImage]):
    """The outputs with these `keys`, in the order of the manifest. Outputs that are finished later are not among them;
    of one that is written again, the new entry is."""

    def __init__(
        self,
        keys: Iterable[str],
        read: Callable[[str], ManifestEntry | None],
        read_all: Callable[[], Iterator[ManifestEntry]],
        kept: Callable[[ManifestEntry], KeptImage],
    ) -> None:
        """`read` returns the entry of a key, `read_all` yields all entries, and `kept` adds the facts of the file."""
        self._keys = KeyIndex()
        for key in keys:
            self._keys.add(key)
        self._read = read
        self._read_all = read_all
        self._kept = kept

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._keys

    def __getitem__(self, key: str) -> KeptImage:
        entry = self._read(key) if key in self._keys else None
        if entry is None:
            raise KeyError(key)
        return self._kept(entry)

    def __iter__(self) -> Iterator[str]:
        return (entry.key for entry in self._read_all() if entry.key in self._keys)
