"""Values that are made with every event: they compare and travel by their fields, and the type checker guards them."""

from __future__ import annotations

import pickle
from dataclasses import asdict, fields, replace

from pool.spec import ComponentKey, TaskId, WorkerId
from scheduler.messages import EndWorker, Mate, Prefetch, RunTask
from scheduler.values import value
from scheduler.why import Candidate, Rule, Why


def test_commands_compare_and_hash_by_their_fields_and_are_no_other_command() -> None:
    mate = Mate(TaskId("t"), 1)
    assert {mate: "known"}[Mate(TaskId("t"), 1)] == "known"
    assert mate != Mate(TaskId("t"), 2)
    one, other = RunTask(WorkerId("w"), 1, TaskId("t"), 1), RunTask(WorkerId("w"), 1, TaskId("t"), 2)
    assert one != other
    assert replace(one, attempt=2) == other
    assert EndWorker(WorkerId("w"), 1) != Mate(TaskId("w"), 1)


def test_commands_travel_and_take_no_other_fields() -> None:
    """They are sent to the shell of another process as they are."""
    why = Why(Rule.CHEAPEST, Candidate(WorkerId("w"), 0.0, 1.0, 2.0))
    command = RunTask(WorkerId("w"), 1, TaskId("t"), 1, why=why, mates=(Mate(TaskId("u"), 1),))
    assert pickle.loads(pickle.dumps(command)) == command
    assert asdict(command)["why"]["chosen"]["run_seconds"] == 2.0
    assert [field.name for field in fields(Prefetch)] == ["worker_id", "incarnation", "components"]
    assert not hasattr(Prefetch(WorkerId("w"), 1, (ComponentKey("c"),)), "__dict__")


def test_the_type_checker_is_told_that_they_are_frozen_and_run_time_is_not() -> None:
    """By what PEP 681 has it read; Python 3.11 keeps that among what it does not know. A frozen dataclass would refuse
    the write below, and take longer to make."""
    told = value.__dataclass_transform__  # type: ignore[attr-defined]
    assert {**told["kwargs"], **told}["frozen_default"] is True
    mate = Mate(TaskId("t"), 1)
    mate.attempt = 2  # type: ignore[misc]
    assert mate == Mate(TaskId("t"), 2)
