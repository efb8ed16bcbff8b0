"""Writers of outputs on the nodes of a pool, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.output_commit import NoWriter
from modelpool.actors.outputs.place import WriteOrder, WriteReport
from modelpool.actors.outputs.place_writer import PlaceWriter
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from tests.actors.fake_fleet import FakeRef
from tests.actors.loop_connection import LoopConnection

NODE = NodeId("node-of-all-workers")


class FakeWriters:
    """See `NodeWriters`. `before` and `after` are called with the number of each write, from 0, and may raise."""

    def __init__(
        self,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int], None] = lambda number: None,
        can_write: bool = True,
    ) -> None:
        self.before, self.after = before, after
        self.is_able = can_write
        self.asked: list[tuple[NodeId, OutputAddress]] = []
        self.written: list[str] = []
        self.closed = 0
        self._lock = threading.Lock()
        self._places: dict[OutputAddress, PlaceWriter] = {}

    def can_write(self, node: NodeId, address: OutputAddress) -> bool:
        self.asked.append((node, address))
        return self.is_able

    def write(self, node: NodeId, address: OutputAddress, order: WriteOrder, result: FakeRef) -> WriteReport:
        with self._lock:
            number = len(self.written)
            self.written.append(order.facts.job_id)
            self._places.setdefault(address, PlaceWriter(address))
        self.before(number)
        report = self._places[address].write(order, result.value)
        self.after(number)
        return report

    def close(self) -> None:
        self.closed += 1


def place_workers(line: LoopConnection) -> None:
    """Have the controller know the node of all its workers, as Ray's would."""
    while len(line.fleet.workers) < line.worker_count:
        time.sleep(0.001)
    for worker_id, incarnation in tuple(line.fleet.workers):
        line.call(Controller.worker_placed, WorkerId(worker_id), incarnation, NODE)


def dies(every: int) -> Callable[[int], None]:
    """The process ends at every so-manieth write."""

    def die(number: int) -> None:
        if number % every == every - 1:
            raise NoWriter("it has ended")

    return die


class Outage:
    """A place that nobody can write to for a while."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_on = threading.Event()

    def check(self) -> None:
        if self.is_on.is_set():
            raise FolderFailed(f"{self.path}: cannot be written (No space left on device)")
