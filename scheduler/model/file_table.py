"""`FileTable`: values of the files of one machine, by the component that is read from them and by the file.

Equal components of several files share a key, so that the file counts, too: one file that is missing or another one
than expected says nothing of the other files with that component.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from modelpool.pool.values.specs.spec import ANY_FILE, ComponentKey, ReadFile

V = TypeVar("V")

#: files of one component that are remembered, the oldest forgotten first
MOST_FILES_OF_COMPONENT = 16


class FileTable(Generic[V]):
    """Values of files, within a bound of components; the oldest are forgotten first."""

    def __init__(self, most_components: int) -> None:
        self._most_components = most_components
        self._files: OrderedDict[ComponentKey, dict[str, V]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._files)

    def items(self) -> Iterator[tuple[ReadFile, V]]:
        """All files and their values, the components of the latest last."""
        for key, files in self._files.items():
            for file, value in files.items():
                yield (key, file), value

    def values(self) -> Iterator[V]:
        """The values of all files."""
        for files in self._files.values():
            yield from files.values()

    def of(self, file: ReadFile) -> V | None:
        """The value of this file, or of one that may be this file; None without any."""
        key, name = file
        files = self._files.get(key)
        if files is None:
            return None
        if name == ANY_FILE:
            return next(iter(files.values()))
        return files.get(name) or files.get(ANY_FILE)

    def first_of(self, files: Iterable[ReadFile]) -> V | None:
        """The value of the first of these files that has one; None without any."""
        if self._files:
            for file in files:
                value = self.of(file)
                if value is not None:
                    return value
        return None

    def put(self, file: ReadFile, value: V) -> None:
        """Set the value of a file."""
        key, name = file
        files = self._files.setdefault(key, {})
        files.pop(name, None)
        files[name] = value
        if len(files) > MOST_FILES_OF_COMPONENT:
            del files[next(iter(files))]
        self._files.move_to_end(key)
        while len(self._files) > self._most_components:
            self._files.popitem(last=False)

    def remove(self, file: ReadFile) -> bool:
        """Forget this file, and what may be this file. Return whether one was known."""
        key, name = file
        files = self._files.get(key)
        if files is None:
            return False
        if name == ANY_FILE:
            del self._files[key]
            return True
        found = [each for each in (name, ANY_FILE) if files.pop(each, None) is not None]
        if not files:
            del self._files[key]
        return bool(found)

    def remove_if(self, is_over: Callable[[V], bool]) -> bool:
        """Forget the files with such values. Return whether there were any."""
        over = [file for file, value in self.items() if is_over(value)]
        for key, name in over:
            del self._files[key][name]
            if not self._files[key]:
                del self._files[key]
        return bool(over)

    def clear(self) -> None:
        """Forget all files."""
        self._files.clear()
