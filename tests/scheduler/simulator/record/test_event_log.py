"""What the core is told and says can be written as lines of text and read back exactly; errors are named."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import types
import typing
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    RunCost,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    CancelRequested,
    Command,
    ComponentsKnown,
    Event,
    StartWorker,
    Tick,
    WorkerUp,
)
from modelpool.scheduler.simulator.record.event_log import (
    LogEntry,
    LogHeader,
    entry_line,
    header_line,
    read_entries,
    read_header,
)
from modelpool.scheduler.simulator.record.plain_values import in_full, plain, read

EVENTS = typing.get_args(Event)
COMMANDS = typing.get_args(Command)


@functools.cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of this type: every field is drawn, numbers of every size, minus zero and infinity among them."""
    if kind is ComponentSpec:  # which refuses sizes of nothing
        fields = {name: values_of(hint) for name, hint in typing.get_type_hints(kind).items()}
        fields["weight_bytes"] = fields["upload_bytes"] = st.integers(1, 1 << 70)
        return st.builds(kind, **fields)
    if isinstance(kind, typing.NewType):
        return values_of(kind.__supertype__)
    if kind is float:
        return st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, 5e-324, 0.1 + 0.2])
    if kind in (str, int, bool, types.NoneType):
        return st.from_type(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, localns={"Residency": Residency})
        return st.deferred(
            lambda: st.builds(kind, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)})
        )
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] != (Ellipsis,):
        return st.tuples(*[values_of(argument) for argument in typing.get_args(kind)])
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=2).map(tuple)
    return st.one_of(*[values_of(argument) for argument in typing.get_args(kind)])


def written_and_read(event: Event, commands: tuple[Command, ...]) -> LogEntry:
    (entry,) = read_entries([entry_line(event, commands)])
    return entry


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    """To the last bit: its text tells 0.0 from -0.0, and 1 from 1.0."""
    event = data.draw(values_of(kind))
    entry = written_and_read(event, ())
    assert entry == LogEntry(2, event, ())
    assert repr(entry.event) == repr(event)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_command_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    commands = tuple(data.draw(st.lists(values_of(kind), min_size=1, max_size=2)))
    entry = written_and_read(Tick(1.0), commands)
    assert repr(entry.commands) == repr(commands)


def test_what_has_its_default_takes_no_room() -> None:
    line = entry_line(Tick(0.5), [StartWorker(WorkerId("gpu-0"), 1)])
    assert json.loads(line) == {
        "event": {"Tick": {"at": 0.5}},
        "commands": [{"StartWorker": {"worker_id": "gpu-0", "incarnation": 1}}],
    }
    assert plain(RunCost(load_seconds=-0.0)) == {"load_seconds": -0.0}


def test_a_default_from_another_process_takes_no_room_either() -> None:
    """Found as a difference between logs of the compiled core and the Python one: the same report of a stopped run,
    sent from one to the other, had an empty cost of its own. A value that equals it only as a number is written."""
    report = TaskReport(TaskId("t"), 1, WorkerId("w"), 1, Residency(10))
    assert plain(pickle.loads(pickle.dumps(report))) == plain(report)
    assert "cost" not in plain(report)
    assert plain(replace(report, cost=RunCost(-0.0)))["cost"] == {"load_seconds": -0.0}
    task = TaskSpec(TaskId("t"), Stage.SAMPLE, (), 0, 1.0)
    assert plain(pickle.loads(pickle.dumps(task))) == plain(task), "the number of GPUs, a tuple"
    assert plain(replace(task, degrees=(True,)))["degrees"] == [True]


def test_a_configuration_is_written_in_full_and_comes_back() -> None:
    """Defaults may be others by the time it is read."""
    config = SchedulerConfig(window=7, story_length=None, run_timeout_seconds=2.5)
    line = header_line(LogHeader(config, "1.2.3"))
    assert set(json.loads(line)["config"]) == {field.name for field in dataclasses.fields(SchedulerConfig)}
    assert read_header(line) == LogHeader(config, "1.2.3")


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    whole = entry_line(Tick(1.0), ())
    assert len(list(read_entries([whole, whole[:-9]]))) == 1
    with pytest.raises(UnusableField, match=r"line 2: found .*, expected a JSON object"):
        list(read_entries([whole[:-9] + "\n", whole]))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"event": {"Tick": {}}, "commands": []}', "line 2: event.Tick.at: missing, expected a value"),
        ('{"event": {"Tick": {"at": "1"}}, "commands": []}', "line 2: event.Tick.at: found '1', expected a number"),
        ('{"event": {"Tick": {"at": 1.0, "of": 2}}, "commands": []}', "line 2: event.Tick: unknown field of Tick 'of'"),
        ('{"event": {"Tock": {"at": 1.0}}, "commands": []}', "line 2: event: unknown kind 'Tock'; did you mean 'Tick'"),
        ('{"event": {"Tick": {"at": 1.0}}}', "line 2: commands: found None, expected a list"),
        ('{"event": {"Tick": {"at": 1.0}}, "commands": [{"StopTask": {"worker_id": 3}}]}', "commands[0].StopTask"),
        ("[]", "line 2: found [], expected a JSON object"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_field(line: str, complaint: str) -> None:
    with pytest.raises((UnusableField, UnknownName)) as raised:
        list(read_entries([line + "\n"]))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "line 1: found ''"),
        ('{"digest": "aa"}', "line 1: modelpool: found None, expected 'event log'"),
        ('{"modelpool": "event log", "format": 1}', "line 1: format: found 1, expected 2"),
        ('{"modelpool": "event log", "format": 2, "config": {"widow": 1}}', "did you mean 'window'"),
    ],
)
def test_what_is_no_log_is_told_by_its_first_line(line: str, complaint: str) -> None:
    with pytest.raises((UnusableField, UnknownName)) as raised:
        read_header(line)
    assert complaint in str(raised.value)


def test_a_value_that_its_own_class_refuses_is_refused_here_too() -> None:
    line = entry_line(ComponentsKnown(0.0, (ComponentSpec(ComponentKey("a"), next(iter(_roles())), 1, 1),)), ())
    with pytest.raises(ValueError, match="weight_bytes and upload_bytes must be positive"):
        list(read_entries([line.replace('"weight_bytes":1', '"weight_bytes":0')]))


def test_whole_numbers_and_fractions_stay_what_they_are() -> None:
    spec = WorkerSpec(WorkerId("gpu-0"), 1, 1 << 40, 1e9)
    assert repr(read(WorkerUp, json.loads(json.dumps(plain(WorkerUp(1, spec)))))) == repr(WorkerUp(1, spec))
    assert in_full(CancelRequested(1.0, JobId("j"))) == {"at": 1.0, "job_id": "j"}


def _roles() -> Any:
    return typing.get_type_hints(ComponentSpec)["role"]
