"""`RayNodeWriters`: processes on the nodes of a pool that write the outputs of a driver, or of the job service.

Each belongs to the process that started it, has its access to object stores, and ends with it. The pixels of an output
go from the object store of the node, small ones from the owner, to the place of the outputs; the owner gets the entry
of the manifest.

Rules
1. A process is started once a node has made some outputs. Until it has started, the owner writes them.
2. It writes to a place only if it finds a mark there that the owner has left (`actors.outputs.place_writer`). To a
   folder, only on the node of the owner: other nodes may share it, but not its lock.
3. Whatever happens to it, the owner writes in its place. Files have the user and the permissions of the owner.
4. One that has nothing to do for a while is ended.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.control.connection import ResultGone
from modelpool.actors.control.output_commit import NoWriter
from modelpool.actors.outputs.atomic_write import own_umask
from modelpool.actors.outputs.place import WriteOrder, WriteReport
from modelpool.actors.outputs.place_writer import PlaceMark, PlaceWriter, is_seen_by_others, place_mark
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.store_access import StoreAccess
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.ray.control_service import ControlService
from modelpool.actors.ray.node_affinity import on_node
from modelpool.actors.ray.ray_connection import check
from modelpool.actors.ray.ray_nodes import this_node
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.actors.worker.wire.packing import packed, result_of, unpacked
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.specs.spec import NodeId

logger = logging.getLogger(__name__)

#: outputs that the owner writes of a node before a process is started there: a few images are not worth one
START_AFTER = 4
#: outputs that a process writes at a time: most of the time is the store's
WRITES_AT_A_TIME = 16
#: limit of the start of a process, and of one output: a video in a slow store takes minutes
START_SECONDS = 60.0
WRITE_SECONDS = 600.0
#: time until a node is tried again on which a process could not write, or has ended
AGAIN_SECONDS = 60.0
#: a process that has written nothing for so long is ended: the next output starts another one
IDLE_SECONDS = 300.0
#: interval of looking for those, and whether this process still wants an answer
LOOK_SECONDS = 1.0
#: threads that start processes
STARTERS = 8
#: the tasks of the GPU come first
_NICENESS = 5


class OutputWriterActor:
    """Writes outputs on a node, for its owner. A problem is a value: Ray would wrap an exception."""

    def __init__(self) -> None:
        with suppress(OSError):
            os.nice(_NICENESS)
        self._places: dict[OutputAddress, PlaceWriter] = {}
        #: access of the latest place
        self._access: StoreAccess | None = None

    def open(self, address: OutputAddress, mark: PlaceMark, access: StoreAccess, umask: int | None) -> str:
        """Open a place; return why this process cannot write there, or "". `access` and `umask` are the owner's
        now; arguments of the constructor, unlike these, would be kept in Ray's control service, and so on its disk.
        """
        access.apply(self._access)
        self._access = access
        if umask is not None:
            os.umask(umask)
        try:
            self._places[address] = PlaceWriter(address, mark)
        except (UserError, OSError) as problem:
            return str(problem)
        return ""

    def write(self, address: OutputAddress, order: bytes, result: Any) -> bytes:
        """Write an output; return the report, or the problem, packed."""
        wanted: WriteOrder = unpacked(order)
        answer: WriteReport | _Problem
        try:
            answer = self._places[address].write(wanted, result_of(result))
        except UserError as problem:
            kind = "folder" if isinstance(problem, FolderFailed) else "output"
            answer = _Problem(kind if isinstance(problem, OutputFailed) else "field", str(problem))
        return packed(answer)


class _Raised(NoWriter):
    """Raised for an unexpected error in the process, by a bug or a failure of its node; the process continues."""


@dataclass(frozen=True, slots=True)
class _Problem:
    kind: str
    message: str

    def as_error(self) -> UserError:
        return {"folder": FolderFailed, "output": OutputFailed}.get(self.kind, UserError)(self.message)


@dataclass(slots=True)
class _Opened:
    """A place on a node.

    outputs     that the node has made so far
    not_before  time of the next attempt to open it, on the monotonic clock
    """

    outputs: int = 0
    is_opening: bool = False
    is_open: bool = False
    not_before: float = 0.0


@dataclass(slots=True)
class _Process:
    """A process of a node.

    writes   that it is asked for now
    used_at  the last time that it was asked or has answered, on the monotonic clock
    """

    actor: ActorHandle[Any]
    used_at: float
    writes: int = 0


class RayNodeWriters:
    """See `NodeWriters`."""

    def __init__(
        self,
        controller: Callable[[], ActorHandle[Any]],
        note: Callable[[str], None] = logger.warning,
        control_service: ControlService | None = None,
    ) -> None:
        """`controller` is the pool's: started processes get its code. `note` is called with a sentence, once for
        each place to which a node that has outputs cannot write. `control_service` as in `RayConnection`.
        """
        self._controller = controller
        self._note = note
        self._node = this_node()
        self._control_service = control_service or ControlService(ray.get_runtime_context().gcs_address)
        self._starters = ThreadPoolExecutor(STARTERS, thread_name_prefix="start output writers")
        self._starting = threading.Lock()
        self._closing = threading.Event()
        #: guards everything below
        self._lock = threading.Lock()
        self._opened: dict[tuple[NodeId, OutputAddress], _Opened] = {}
        self._processes: dict[NodeId, _Process] = {}
        self._noted: set[OutputAddress] = set()
        #: ends processes that are idle; runs while there are some
        self._idle_watch: threading.Thread | None = None

    def can_write(self, node: NodeId, address: OutputAddress) -> bool:
        """See `NodeWriters`."""
        if not is_seen_by_others(address) or (isinstance(address, Path) and node != self._node):
            return False
        with self._lock:
            opened = self._opened.setdefault((node, address), _Opened())
            opened.outputs += 1
            if opened.is_open:
                return True
            is_due = opened.outputs >= START_AFTER and time.monotonic() >= opened.not_before
            if is_due and not opened.is_opening and not self._closing.is_set():
                opened.is_opening = True
                self._starters.submit(self._open, node, address, opened)
            return False

    def write(self, node: NodeId, address: OutputAddress, order: WriteOrder, result: ResultRef) -> WriteReport:
        """See `NodeWriters`."""
        with self._lock:
            process = self._processes.get(node)
            if process is None:
                raise NoWriter("it has ended")
            process.writes += 1
        try:
            answer = self._answer(process.actor.write.remote(address, packed(order), result), WRITE_SECONDS)
        except _Raised as mistake:
            self._pause(node, address, str(mistake))
            raise
        except NoWriter:
            self._forget(node, process, time.monotonic() + AGAIN_SECONDS)
            raise
        finally:
            with self._lock:
                process.writes, process.used_at = process.writes - 1, time.monotonic()
        found: WriteReport | _Problem = unpacked(answer)
        if isinstance(found, _Problem):
            problem = found.as_error()
            if isinstance(problem, FolderFailed):
                self._pause(node, address, "")  # the owner finds out whether nobody can write there, and says so
            raise problem
        return found

    def close(self) -> None:
        """See `NodeWriters`."""
        self._closing.set()
        with self._lock:
            processes, self._processes = self._processes, {}
            idle_watch = self._idle_watch
        for process in processes.values():
            _end(process.actor)
        self._starters.shutdown(wait=True, cancel_futures=True)  # no thread may use Ray after its end
        if idle_watch is not None:
            idle_watch.join()

    def _open(self, node: NodeId, address: OutputAddress, opened: _Opened) -> None:
        """Have a process of a node open a place, in a thread of its own."""
        problem, process = "", None
        try:
            with place_mark(address) as mark:
                process = self._process(node)
                opening = process.actor.open.remote(address, mark, StoreAccess.of_this_process(), own_umask())
                problem = self._answer(opening, START_SECONDS)
        except FolderFailed:
            problem = "?"  # nobody can write there now: the owner notices, too
        except (_Raised, PoolLost) as raised:
            problem = str(raised)
        except NoWriter as gone:
            problem = str(gone)
            if process is not None:
                self._forget(node, process, time.monotonic() + AGAIN_SECONDS)
        except Exception as mistake:
            problem = _one_line(mistake)
        with self._lock:
            opened.is_opening, opened.is_open = False, not problem
            opened.not_before = time.monotonic() + AGAIN_SECONDS
        self._note_once(node, address, problem.strip("?"))

    def _pause(self, node: NodeId, address: OutputAddress, problem: str) -> None:
        """Have the owner write to a place what a node makes, until the place is opened there again."""
        with self._lock:
            opened = self._opened[node, address]
            opened.is_open, opened.not_before = False, time.monotonic() + AGAIN_SECONDS
        self._note_once(node, address, problem)

    def _note_once(self, node: NodeId, address: OutputAddress, problem: str) -> None:
        with self._lock:
            is_new = bool(problem) and address not in self._noted and not self._closing.is_set()
            if is_new:
                self._noted.add(address)
        if is_new:
            self._note(f"outputs of node {node[:8]} are written to {address} by this process, and not there: {problem}")

    def _process(self, node: NodeId) -> _Process:
        """Return the process of a node, which may still start."""
        with self._starting:
            with self._lock:
                if node in self._processes:
                    self._processes[node].used_at = time.monotonic()
                    return self._processes[node]
            environment = self._answer(self._controller().process_environment.remote(), START_SECONDS)
            options = {**on_node(node), "max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
            if environment:
                options["runtime_env"] = environment
            actor_class = ray.remote(OutputWriterActor)
            actor: ActorHandle[Any] = actor_class.options(max_concurrency=WRITES_AT_A_TIME, **options).remote()
            with self._lock:
                if not self._closing.is_set():
                    self._processes[node] = started = _Process(actor, time.monotonic())
                    self._watch_idle()
                    return started
        _end(actor)
        raise NoWriter("the pool is closed")

    def _forget(self, node: NodeId, process: _Process, not_before: float) -> None:
        """End a process; the owner writes until another one has started, `not_before` this time."""
        with self._lock:
            if self._processes.get(node) is process:
                del self._processes[node]
                for (other, _), opened in self._opened.items():
                    if other == node:
                        opened.is_open, opened.not_before = False, not_before
        _end(process.actor)

    def _watch_idle(self) -> None:
        """Have idle processes ended. Requires the lock."""
        if self._idle_watch is None or not self._idle_watch.is_alive():
            self._idle_watch = threading.Thread(target=self._end_idle, name="end idle output writers", daemon=True)
            self._idle_watch.start()

    def _end_idle(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            before = time.monotonic() - IDLE_SECONDS
            with self._lock:
                idle = [
                    (node, each) for node, each in self._processes.items() if not each.writes and each.used_at < before
                ]
            for node, process in idle:
                self._forget(node, process, 0.0)
            with self._lock:
                if not self._processes:
                    self._idle_watch = None
                    return

    def _answer(self, ref: Any, limit_seconds: float) -> Any:
        """Wait for a process. Raises NoWriter if it has ended or does not answer, _Raised if it has raised, ResultGone
        if the result for it is lost, and PoolLost.
        """
        until = time.monotonic() + limit_seconds
        while True:
            try:
                with self._control_service.call():
                    return ray.get(ref, timeout=LOOK_SECONDS)
            except GetTimeoutError:
                if self._closing.is_set():
                    raise NoWriter("the pool is closed") from None
                check(self._control_service)
                if time.monotonic() >= until:
                    raise NoWriter(f"it has not answered for {limit_seconds:.0f} s") from None
            except RayTaskError as raised:
                if isinstance(raised.cause, ObjectLostError):
                    raise ResultGone(str(raised.cause).splitlines()[0]) from raised
                raise _Raised(_one_line(raised.cause)) from raised  # of code or memory that a node lacks, say
            except ObjectLostError as lost:
                raise ResultGone(str(lost).splitlines()[0]) from lost
            except (RayActorError, RayError) as ended:
                raise NoWriter(f"it has ended: {' '.join(str(ended).split())[:300]}") from ended


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _end(actor: ActorHandle[Any]) -> None:
    with suppress(Exception):  # it has ended, or Ray has
        ray.kill(actor)
