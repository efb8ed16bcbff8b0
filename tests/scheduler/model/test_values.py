"""Values that are made with every event: they compare and travel by their fields, and the type checker guards them."""

from __future__ import annotations

import inspect
import pickle
import typing
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from modelpool.pool.values.specs import resident, spec
from modelpool.pool.values.specs.resident import Residency, Resident
from modelpool.pool.values.specs.spec import ComponentKey, TaskId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.scheduler.model import messages, placement_record
from modelpool.scheduler.model.messages import BatchMate, EndWorker, Prefetch, Preload, RunTask
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, PreloadNote, TaskStart, Why
from modelpool.scheduler.simulator.record.plain_values import plain, read
from tests.each_case import each_case

MODULES = (resident, spec, messages, placement_record)
KINDS = [kind for module in MODULES for kind in vars(module).values() if is_dataclass(kind)]
#: the kinds that are made so often that freezing them costs too much
UNFROZEN: list[Any] = [kind for kind in KINDS if not kind.__dataclass_params__.frozen]  # type: ignore[attr-defined]


def test_commands_compare_and_hash_by_their_fields_and_are_no_other_command() -> None:
    batch_mate = BatchMate(TaskId("t"), 1)
    assert {batch_mate: "known"}[BatchMate(TaskId("t"), 1)] == "known"
    assert batch_mate != BatchMate(TaskId("t"), 2)
    one, other = RunTask(WorkerId("w"), 1, TaskId("t"), 1), RunTask(WorkerId("w"), 1, TaskId("t"), 2)
    assert one != other
    assert replace(one, attempt=2) == other
    assert EndWorker(WorkerId("w"), 1) != BatchMate(TaskId("w"), 1)


def test_what_is_on_a_gpu_and_used_there_compares_by_every_field() -> None:
    """Both say themselves how they compare."""
    entry = Resident(ComponentKey("c"), 3, "patches", 2)
    use = spec.ComponentUse(ComponentKey("c"), 1, "patches", 2, 3, (ComponentKey("lora"),))
    for value in (entry, use):
        assert value == replace(value)
        assert hash(value) == hash(replace(value))
        for field in fields(value):
            held = getattr(value, field.name)
            other = {str: "another", int: 99, tuple: ()}[type(held)]
            assert value != replace(value, **{field.name: other}), field.name
        assert value != "c"


def test_commands_travel_and_take_no_other_fields() -> None:
    """They are sent to the shell of another process as they are."""
    why = Why(PlacementRule.CHEAPEST, PlacementOption(WorkerId("w"), 0.0, 1.0, 2.0))
    command = RunTask(WorkerId("w"), 1, TaskId("t"), 1, why=why, batch_mates=(BatchMate(TaskId("u"), 1),))
    assert pickle.loads(pickle.dumps(command)) == command
    assert asdict(command)["why"]["chosen"]["run_seconds"] == 2.0
    assert [field.name for field in fields(Prefetch)] == ["worker_id", "incarnation", "components"]
    assert not hasattr(Prefetch(WorkerId("w"), 1, (ComponentKey("c"),)), "__dict__")


def test_what_is_left_out_where_it_is_the_default_is_read_back() -> None:
    command = Preload(WorkerId("w"), 1, (TaskId("t"),))
    assert plain(command) == {"worker_id": "w", "incarnation": 1, "task_ids": ["t"]}
    assert read(Preload, plain(command)) == command
    there = Residency(3, (Resident(ComponentKey("c"), 3),))
    assert plain(there) == {"capacity_bytes": 3, "entries": [{"component": "c", "resident_bytes": 3}]}
    assert read(Residency, plain(there)) == there


@each_case("kind", UNFROZEN)
def test_nobody_writes_to_one_that_is_made(kind: type[Any]) -> None:
    """Which the type checker sees to: every field is `Final`."""
    assert all(field.type.startswith("Final[") for field in fields(kind)), kind


@each_case("kind", KINDS)
def test_the_fields_are_the_arguments_in_order(kind: type[Any]) -> None:
    """By which a `WireValue` is pickled, and a changed copy made of any."""
    given = inspect.signature(kind).parameters
    assert tuple(given) == tuple(field.name for field in fields(kind)) == kind.__match_args__
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in given.values())
    assert issubclass(kind, WireValue) or kind in (TaskStart, PreloadNote), (
        "the story keeps these, and tells of them in words"
    )


def test_that_there_are_values_to_look_at() -> None:
    sent = {*typing.get_args(messages.Event), *typing.get_args(messages.Command)}
    assert sent < set(KINDS)
    assert {Resident, Residency, RunTask, Why, PlacementOption} < set(UNFROZEN)
