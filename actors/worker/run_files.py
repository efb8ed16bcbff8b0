"""`RunFiles`: the files that the runs of one worker read: brings them here, checks them, and verifies their content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from modelpool.actors.graph.task_files import task_files
from modelpool.actors.worker.fetch_cost import FetchCost
from modelpool.actors.worker.file_check import FileCheck, FilesUnavailable
from modelpool.actors.worker.file_verifier import FilesInUse, FileVerifier
from modelpool.actors.worker.wire.messages import ExpectedFile, FetchOrder, LoadRequest, RunRequest
from modelpool.actors.worker.worker_setup import WorkerNode
from modelpool.pool.files.fetch.fetch_errors import FETCH_ERRORS
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.stage_params import Outcome
from modelpool.pool.values.specs.spec import ComponentKey, FileOnDisk, JudgedFile, TaskSpec

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

    def fetch(
        self, order: FetchOrder, should_stop: Callable[[], bool], components: Iterable[ComponentKey]
    ) -> FetchCost:
        """Bring files of these components to this node. Raises FilesUnavailable if that is impossible here, and
        Stopped."""
        assert self._fetched is not None, "a pool with sources has a cache"
        try:
            return self._fetched.bring(order, should_stop)
        except FETCH_ERRORS as problem:
            raise FilesUnavailable(str(problem), tuple(components)) from problem

    def fetch_of_runs(self, requests: Sequence[RunRequest], should_stop: Callable[[RunRequest], bool]) -> FetchCost:
        """Bring the files of these runs to this node. Raises as `fetch`."""
        cost = FetchCost()
        for request in requests:
            if request.fetch is None:
                continue
            used = dict.fromkeys(key for use in request.task.uses for key in (use.component, *use.adapters))
            cost += self.fetch(request.fetch, partial(should_stop, request), used)
        return cost

    def ranges_of(self, part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
        """Return what to prefetch, after fetching it to this node."""
        if part.files and self._fetched is not None:
            self._fetched.prefetch(part.files, self._is_over)
        return byte_ranges(part)

    def begin_runs(self, requests: Sequence[RunRequest]) -> FilesInUse:
        """Check the files of runs before they read them; close models with changed files. Raises
        FilesUnavailable."""
        components = {key: None for request in requests for key in task_files(request.task, request.work)}
        in_use = self._begin([file for request in requests for file in request.files], components)
        if in_use.has_changed:
            self._check.check_again(components)
        self._close_changed()
        return in_use

    def begin_joining(self, request: RunRequest) -> FilesInUse:
        """As `begin_runs` for a run that joins others, which use the models: none is closed."""
        components = dict.fromkeys(task_files(request.task, request.work))
        in_use = self._begin(request.files, components)
        if in_use.has_changed:
            self._check.check_again(components)
        return in_use

    def begin_load(self, request: LoadRequest) -> None:
        """Check the files of a load, as `begin_runs`."""
        self._begin(request.files, request.components)
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

    def explained(self, task: TaskSpec, raised: Exception) -> Exception:
        """Return `raised`, or FilesUnavailable if a file of the task is gone since it was checked."""
        if isinstance(raised, UserError) and not isinstance(raised, FilesUnavailable):
            try:
                self._check.check_again(key for use in task.uses for key in (use.component, *use.adapters))
            except FilesUnavailable as gone:
                return gone
        return raised

    def _begin(self, expected: Sequence[ExpectedFile], components: Iterable[ComponentKey]) -> FilesInUse:
        self._check.check(expected)
        if self._on_judged is not None:
            self._verifier.expect(expected)
        return self._verifier.begin(components)

    def _tell_judged(self, files: tuple[JudgedFile, ...]) -> None:
        if self._on_judged is not None:
            self._on_judged(files)

    def _close_changed(self) -> None:
        """Close all models if files of some have changed since they were opened, or are not the expected ones."""
        changes = self._verifier.changes
        if changes != self._changes_seen:
            self._changes_seen = changes
            self._close_models()
