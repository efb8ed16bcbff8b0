"""Checks that this machine has the files that the controller expects, before a run reads them.

A model folder may be missing on a machine, or contain another file of the same name: neither may produce a wrong image
or fail a job that another machine could run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from modelpool.actors.worker.wire.messages import ExpectedFile
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.errors import CorruptFile, UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import ComponentKey, file_name

#: a component, and the file that it is read from
ComponentFile: TypeAlias = tuple[ComponentKey, FilePart]
#: checked files that are remembered, to check them again when a run cannot read one
FILES_REMEMBERED = 4096


class FilesUnavailable(UserError):
    """Files that are missing on this machine, or are other files here."""

    def __init__(self, message: str, files: Iterable[ComponentFile]) -> None:
        super().__init__(message)
        found = dict.fromkeys((key, file_name(part.sha256)) for key, part in files)
        self.components = tuple(key for key, _ in found)
        self.file_names = tuple(name for _, name in found)


class FileCheck:
    """The files that were checked in this process. Not thread-safe."""

    def __init__(self, fingerprint: Callable[[FilePart], str] = fingerprint) -> None:
        self._fingerprint = fingerprint
        self._checked: OrderedDict[ComponentFile, ExpectedFile] = OrderedDict()

    def check(self, files: Iterable[ExpectedFile]) -> None:
        """Check these files. Raises FilesUnavailable, naming each file and what was expected."""
        problems: dict[ComponentFile, str] = {}
        for file in files:
            key, problem = (file.component, file.part), self._problem(file)
            if problem is not None:
                problems[key] = problem
                continue
            self._checked[key] = file
            if len(self._checked) > FILES_REMEMBERED:
                self._checked.popitem(last=False)
        if problems:
            raise FilesUnavailable("; ".join(dict.fromkeys(problems.values())), problems)

    def check_again(self, files: Iterable[ComponentFile]) -> None:
        """Check files again that were checked for earlier runs: one of them could not be read now. Raises
        FilesUnavailable."""
        self.check([self._checked[key] for key in files if key in self._checked])

    def _problem(self, file: ExpectedFile) -> str | None:
        """Return why the file cannot be used; None if it can."""
        try:
            found = self._fingerprint(file.part)
        except CorruptFile as missing:
            return str(missing)
        except UserError as other:
            return f"{file.part.path}: is not the file that the controller has ({other})"
        if found != file.fingerprint:
            return f"{file.part.path}: is not the file that the controller has, its content differs"
        return None
