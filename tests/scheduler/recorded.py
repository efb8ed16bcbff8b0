"""A shell that keeps what it was told and said, as a recorder does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import Command, ComponentsKnown, Event
from modelpool.scheduler.simulator.record.event_log import LogEntry, LogHeader, entry_line, header_line, read_entries
from tests.scheduler.world import COMPONENTS, Shell, image


class Recorded(SchedulerState):
    """The core, with its log as lines of text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lines = [header_line(LogHeader(self.config, "test"))]

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.lines.append(entry_line(event, commands))
        return commands


@dataclass
class RecordedShell(Shell):
    """See `Shell`."""

    state: Recorded = field(init=False)

    def __post_init__(self) -> None:
        self.state = Recorded(self.config)
        self.feed(ComponentsKnown(self.tick(), COMPONENTS))

    @property
    def lines(self) -> list[str]:
        """The log."""
        return self.state.lines

    @property
    def entries(self) -> list[LogEntry]:
        """The log, read."""
        return list(read_entries(self.lines[1:]))


def busy_afternoon() -> RecordedShell:
    """Twelve images of three texts on two workers, one of which is lost and comes back; one job is cancelled."""
    shell = RecordedShell()
    shell.workers(a=64, b=20)
    for seed in range(12):
        shell.submit(image(f"job-{seed}", prompt=f"text {seed % 3}", seed=seed, priority=seed % 2))
    for _ in range(4):
        for name in list(shell.running):
            shell.finish(name)
    shell.cancel("job-11")
    shell.lose("a")
    shell.come_up("a")
    while shell.running:
        for name in list(shell.running):
            shell.finish(name)
    assert len(shell.resolved) == 12
    return shell
