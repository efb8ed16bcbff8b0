"""`RunFiles`: the files that the runs of one worker read: brings them here, checks them, and verifies their content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.worker.fetch_cost import FetchCost
from modelpool.actors.worker.file_check import ComponentFile, FileCheck, FilesUnavailable
from modelpool.actors.worker.file_verifier import FilesInUse, FileVerifier
from modelpool.actors.worker.wire.messages import ExpectedFile, FetchOrder, LoadRequest, RunRequest
from modelpool.actors.worker.worker_setup import WorkerNode
from modelpool.pool.files.fetch.fetch_errors import FETCH_ERRORS
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.stage_params import Outcome
from modelpool.pool.values.specs.spec import FileOnDisk, JudgedFile

if TYPE_CHECKING:
    from modelpool.actors.worker.worker_files import WorkerFiles


class RunFiles:
    """Belongs to the thread that uses the engine, except `ranges_of`, `tell_again`, `is_settled` and `close`."""

    def __init__(
        self,
        node: WorkerNode,
        on_judged: Callable[[tuple[JudgedFile, ...]], None] | None,
        close_models: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        """`on_judged` receives verdicts about files, on any
        thread; without it, files are not hashed. `close_models` closes the models that no run uses, with their files.
        `is_over` ends prefetching."""
        self._node = node
        self._cache = node.cache
        self._on_judged = on_judged
        self._close_models = close_models
        self._is_over = is_over
        self._fetched: WorkerFiles | None = None
        self._check = FileCheck()
        self._verifier = FileVerifier(self._tell_judged)
        #: `FileVerifier.changes` when models were closed last
        self._changes_seen = 0

    def open(self) -> None:
        """Open the node's cache, if there is one. Raises CacheFull."""
        if self._cache is not None:
            from modelpool.actors.worker.worker_files import WorkerFiles

            self._fetched = WorkerFiles(self._cache, self._node.host, self._node.node, self._close_models)

    @property
    def address(self) -> str:
        """The address at which other nodes get fetched files; "" without a cache."""
        return "" if self._fetched is None else self._fetched.address

    @property
    def cache_bytes(self) -> int:
        """The bound of the cache; 0 without one."""
        return 0 if self._cache is None else self._cache.bound_bytes or 0

    @property
    def is_settled(self) -> bool:
        """Whether the hashes of all files that runs have read are known."""
        return self._verifier.is_settled

    def on_disk(self) -> tuple[FileOnDisk, ...]:
        """Return the large files in the cache, the least recently used first."""
        return () if self._fetched is None else self._fetched.on_disk()

    def tell_again(self) -> None:
        """Tell a new controller the verdicts about files."""
        self._verifier.tell_again()

    def close(self) -> None:
        """Stop hashing and fetching. Idempotent."""
        self._verifier.close()
        if self._fetched is not None:
            self._fetched.close()

    def _fetch(self, order: FetchOrder, should_stop: Callable[[], bool], files: Iterable[ComponentFile]) -> FetchCost:
        assert self._fetched is not None, "a pool with sources has a cache"
        try:
            return self._fetched.bring(order, should_stop)
        except FETCH_ERRORS as problem:
            raise FilesUnavailable(str(problem), files) from problem

    def fetch_of_load(self, request: LoadRequest, should_stop: Callable[[], bool]) -> None:
        """Bring the files of a load to this node. Raises FilesUnavailable if that is impossible here, and Stopped."""
        assert request.fetch is not None, "asked for loads with something to fetch"
        self._fetch(request.fetch, should_stop, _files_of_load(request))

    def fetch_of_runs(self, requests: Sequence[RunRequest], should_stop: Callable[[RunRequest], bool]) -> FetchCost:
        """Bring the files of these runs to this node. Raises as `fetch_of_load`."""
        cost = FetchCost()
        for request in requests:
            if request.fetch is None:
                continue
            files = task_files(request.task, request.work).items()
            cost += self._fetch(request.fetch, partial(should_stop, request), files)
        return cost

    def ranges_of(self, part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
        """Return what to prefetch, after fetching it to this node."""
        if part.files and self._fetched is not None:
            self._fetched.prefetch(part.files, self._is_over)
        return byte_ranges(part)

    def begin_runs(self, requests: Sequence[RunRequest]) -> FilesInUse:
        """Check the files of runs before they read them; close models with changed files. Raises
        FilesUnavailable."""
        files = [file for request in requests for file in task_files(request.task, request.work).items()]
        in_use = self._begin([file for request in requests for file in request.files], files)
        if in_use.has_changed:
            self._check.check_again(files)
        self._close_changed()
        return in_use

    def begin_joining(self, request: RunRequest) -> FilesInUse:
        """As `begin_runs` for a run that joins others, which use the models: none is closed."""
        files = tuple(task_files(request.task, request.work).items())
        in_use = self._begin(request.files, files, joins=True)
        if in_use.has_changed:
            self._check.check_again(files)
        return in_use

    def begin_load(self, request: LoadRequest) -> None:
        """Check the files of a load, as `begin_runs`."""
        self._begin(request.files, _files_of_load(request))
        self._close_changed()

    def end_run(self, outcome: Outcome, in_use: FilesInUse) -> tuple[Outcome, tuple[int, ...]]:
        """Return the outcome of a run with the states of its files with unknown hashes. The outcome is an error
        if the files have changed."""
        if isinstance(outcome, Exception):
            return outcome, ()
        try:
            return outcome, self._verifier.end(in_use)
        except FilesUnavailable as changed:
            return changed, ()

    def explained(self, request: RunRequest, raised: Exception) -> Exception:
        """Return `raised`, or FilesUnavailable if a file of the run is gone since it was checked."""
        if isinstance(raised, UserError) and not isinstance(raised, FilesUnavailable):
            try:
                self._check.check_again(task_files(request.task, request.work).items())
            except FilesUnavailable as gone:
                return gone
        return raised

    def _begin(
        self, expected: Sequence[ExpectedFile], files: Iterable[ComponentFile], joins: bool = False
    ) -> FilesInUse:
        self._check.check(expected)
        if self._on_judged is not None:
            self._verifier.expect(expected)
        return self._verifier.begin(files, joins)

    def _tell_judged(self, files: tuple[JudgedFile, ...]) -> None:
        if self._on_judged is not None:
            self._on_judged(files)

    def _close_changed(self) -> None:
        """Close all models if files of some have changed since they were opened, or are not the expected ones."""
        changes = self._verifier.changes
        if changes != self._changes_seen:
            self._changes_seen = changes
            self._close_models()


def _files_of_load(request: LoadRequest) -> tuple[ComponentFile, ...]:
    """Return the file of each component of a load."""
    model = request.model
    return tuple(
        (key, FilePart(model.path, role, model.assembly, model.files, model.sha256))
        for key, role in zip(request.components, request.roles, strict=True)
    )
