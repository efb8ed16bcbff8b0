"""Which workers of an earlier controller are taken over, and which are ended. Without a Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from modelpool.actors.control.losses import Death
from modelpool.actors.control.succession import WorkerOrigin, successor
from modelpool.actors.ray import ray_fleet, survivors
from modelpool.actors.ray.actor_options import WorkerNeeds
from modelpool.actors.ray.ray_fleet import RayFleet
from modelpool.actors.ray.ray_nodes import ActorReport
from modelpool.actors.ray.survivors import Succession, take_over
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_process import WorkerProcess
from modelpool.pool.specs.spec import NO_NODE, NodeId, WorkerId, WorkerSpec

N1 = NodeId("n1")


def left(name: str) -> Any:
    return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))


def origin(name: str, group: str = "", kind: str = "now") -> WorkerOrigin:
    return WorkerOrigin(WorkerId(name), 1, group, kind=kind)


def taken(answers: dict[str, Any], records: dict[str, ActorReport | None] | None = None) -> tuple[list, list]:
    """Take over workers that answer so; the names of those that are used, and of those to end."""

    async def change_controller(handle: Any) -> Any:
        answer = answers[handle._actor_id.hex()]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise RayTaskError("follow", "traceback", answer)
        return answer, WorkerProcess(1, 1.0, N1)

    async def record_of(name: str) -> ActorReport | None:
        return (records or {}).get(name, ActorReport(N1))

    found, others = asyncio.run(
        take_over([left(name) for name in answers], change_controller, {"": "now", "big": "large"}.get, record_of)
    )
    return [one.origin.worker_id for one in found], [handle._actor_id.hex() for handle in others]


def test_those_that_answer_and_were_started_for_this_configuration_are_taken_over() -> None:
    answers = {
        "b": origin("b"),
        "a": origin("a"),
        "other": origin("other", kind="before"),
        "big": origin("big", "big", "large"),
        "gone group": origin("gone group", "small", "now"),
        "broken": ValueError("it has no engine"),
    }
    assert taken(answers) == (["a", "b", "big"], ["other", "gone group", "broken"])


def test_one_that_does_not_answer_is_ended_and_delays_nobody_for_long(monkeypatch) -> None:
    monkeypatch.setattr(survivors, "ANSWER_SECONDS", 0.05)
    assert taken({"silent": None, "a": origin("a")}) == (["a"], ["silent"])


def test_one_that_waits_for_a_node_or_has_ended_is_not_asked() -> None:
    records = {"pending": ActorReport(NO_NODE), "dead": ActorReport(N1, Death.EXITED), "unknown": None}
    assert taken(dict.fromkeys(records), records) == ([], ["pending", "dead", "unknown"])


def test_a_controller_that_was_replaced_itself_notices() -> None:
    with pytest.raises(OlderEpoch):
        taken({"a": origin("a"), "b": OlderEpoch("this worker serves the controller of epoch 3")})


def test_a_worker_continues_under_its_name_or_as_another_of_its_group() -> None:
    workers = [origin("gpu-1"), origin("gpu-0"), origin("big-0", "big")]
    assert successor(workers, WorkerId("gpu-0"), "") == 1
    assert successor(workers, WorkerId("gpu-5"), "") == 0
    assert successor(workers, WorkerId("big-7"), "big") == 2
    assert successor(workers, WorkerId("gpu-0"), "small") is None


class Handle:
    """A worker that answers every call with its process or its spec, and no actor of Ray."""

    def __init__(self) -> None:
        self.epoch = 1

    def __getattr__(self, method: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            if method == "ping" and arguments[0] < self.epoch:
                raise RayTaskError("ping", "traceback", OlderEpoch("this worker serves the controller of epoch 2"))
            return SPEC if method == "start" else WorkerProcess(1, 1.0, N1)

        call = SimpleNamespace(remote=answer)
        return SimpleNamespace(options=lambda **options: call)


SPEC = WorkerSpec(WorkerId("gpu-0"), 1, 64, 1.0, node=N1)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_controller_that_was_replaced_does_not_end_the_workers_of_its_successor(monkeypatch, is_replaced) -> None:
    """A machine was suspended, say, while another controller took over; then the run on it seems to hang."""
    killed, noticed = [], []
    monkeypatch.setattr(ray_fleet.ray, "get", lambda call, timeout: asyncio.run(call))
    monkeypatch.setattr(ray_fleet.ray, "kill", killed.append)
    handle = Handle()
    succession = Succession("modelpool", "mine", 1, 60.0, handle, {"": "now"}.get, lambda: noticed.append("replaced"))

    async def scene() -> None:
        fleet = RayFleet(
            lambda origin: handle,  # type: ignore[arg-type, return-value]
            lambda group: WorkerNeeds(0.0),
            SimpleNamespace(prepare=lambda node: None),  # type: ignore[arg-type]
            lambda: asyncio.sleep(0),  # type: ignore[arg-type, return-value]
            succession=succession,
        )
        await fleet.start(WorkerId("gpu-0"), 1)
        handle.epoch = 2 if is_replaced else 1
        fleet.end(WorkerId("gpu-0"), 1)
        await fleet.close()

    asyncio.run(scene())
    assert (killed, noticed) == (([], ["replaced"]) if is_replaced else ([handle], []))
