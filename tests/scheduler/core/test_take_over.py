"""A worker of an earlier controller: the core knows its weights, and uses it."""

from __future__ import annotations

import json

from modelpool.pool.values.specs.spec import ComponentKey, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.model.messages import WorkerUp
from modelpool.scheduler.simulator.record.event_log import LogHeader, entry_line, header_line, read_entries, read_header
from modelpool.scheduler.simulator.record.replay import replay
from tests.scheduler.world import DRAW, PAINT, TEXT, VAE, Shell, image, sample

PAINTER = (Resident(TEXT, 4), Resident(PAINT, 12), Resident(VAE, 3))
DRAWER = (Resident(TEXT, 4), Resident(DRAW, 10), Resident(VAE, 3))


def test_work_goes_to_the_worker_that_has_its_weights_and_moves_none() -> None:
    shell = Shell()
    shell.want("a", "b")
    shell.come_up("a", entries=PAINTER)
    shell.come_up("b", entries=DRAWER)
    shell.submit(image("j", model=DRAW))
    shell.finish("a")  # both have the text encoder
    assert shell.on("b") == sample(image("j").tasks[0].task_id, model=DRAW).task_id
    assert shell.running[WorkerId("b")].command.why.upload_bytes == 0
    shell.finish("b")
    shell.finish("a" if shell.on("a") else "b")
    assert shell.outcome("j") is not None
    residency = shell.state.worker_table.workers[WorkerId("b")].residency
    assert residency is not None
    assert set(residency.entries) == set(DRAWER)
    story = [line.note for line in shell.state.log.lines(frozenset({"b"}))]
    assert any("taken over with 17 B of weights" in note for note in story), story


def test_weights_of_unknown_sizes_are_kept_until_room_is_needed() -> None:
    unknown = Resident(ComponentKey("of an earlier catalog"), 50)
    shell = Shell()
    shell.want("a")
    shell.come_up("a", entries=(unknown,))
    shell.submit(image("j"))
    held = shell.state.worker_table.workers[WorkerId("a")].residency
    assert held is not None
    assert held.of(unknown.component) == unknown, "there is room for the first task next to it"
    for _ in range(3):
        shell.finish("a")
    assert shell.outcome("j") is not None
    held = shell.state.worker_table.workers[WorkerId("a")].residency
    left = None if held is None else held.of(unknown.component)
    assert left is None or left.resident_bytes < 50, "the sample needs part of its room"


def test_a_takeover_is_recorded_and_replayed() -> None:
    shell = Shell()
    lines = []
    handle = shell.state.handle

    def recorded(event):  # type: ignore[no-untyped-def]
        commands = handle(event)
        lines.append(entry_line(event, commands))
        return commands

    shell.state.handle = recorded  # type: ignore[method-assign]
    lines.append(entry_line(*_known(shell)))
    shell.want("a")
    shell.come_up("a", entries=PAINTER)
    shell.submit(image("j"))
    header = read_header(header_line(LogHeader(shell.config)))
    entries = list(read_entries(lines))
    assert any(isinstance(e.event, WorkerUp) and e.event.residency == Residency(64, PAINTER) for e in entries)
    assert replay(header, entries, check=True).same


def _known(shell: Shell):  # type: ignore[no-untyped-def]
    """The event that the shell began with."""
    from modelpool.scheduler.model.messages import ComponentsKnown
    from tests.scheduler.world import COMPONENTS

    return ComponentsKnown(1.0, COMPONENTS), []


def test_logs_of_before_are_read() -> None:
    line = {"event": {"WorkerUp": {"at": 1.0, "worker": {}}}, "commands": []}
    spec = {"worker_id": "a", "incarnation": 1, "capacity_bytes": 1, "link_bytes_per_second": 1.0}
    line["event"]["WorkerUp"]["worker"] = spec  # type: ignore[index]
    (entry,) = read_entries([json.dumps(line) + "\n"])
    assert entry.event == WorkerUp(1.0, WorkerSpec(WorkerId("a"), 1, 1, 1.0))
