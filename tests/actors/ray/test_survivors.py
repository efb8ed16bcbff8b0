"""Which workers of an earlier controller are taken over, and which are ended. Without a Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError, RayTaskError

from modelpool.actors.control.losses import Death, Loss
from modelpool.actors.control.succession import WorkerOrigin, successor
from modelpool.actors.ray import ray_fleet, survivors
from modelpool.actors.ray.actor_options import WorkerNeeds
from modelpool.actors.ray.ray_fleet import RayFleet
from modelpool.actors.ray.ray_nodes import ActorReport
from modelpool.actors.ray.survivors import Succession, end_left_workers, take_over
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_process import WorkerProcess
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, WorkerId, WorkerSpec

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

    def __init__(self, name: str = "", epoch: int = 1, replaced_at: str = "") -> None:
        """`replaced_at` is the first call that finds it with the controller of epoch 2."""
        self.name, self.epoch, self.replaced_at = name, epoch, replaced_at

    def __getattr__(self, method: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            if method == self.replaced_at:
                self.epoch = 2
            if method in ("ping", "start") and arguments[0] < self.epoch:
                raise RayTaskError(method, "traceback", OlderEpoch("this worker serves the controller of epoch 2"))
            return SPEC if method == "start" else WorkerProcess(1, 1.0, N1)

        call = SimpleNamespace(remote=answer)
        return SimpleNamespace(options=lambda **options: call)


SPEC = WorkerSpec(WorkerId("gpu-0"), 1, 64, 1.0, node=N1)


@pytest.mark.parametrize("replaced_at", ["", "ping", "start", "run"])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_controller_that_was_replaced_does_not_end_the_workers_of_its_successor(
    monkeypatch, replaced_at, is_silent
) -> None:
    """A machine was suspended, say, while another controller took over: in the middle of a start of a worker, or
    afterwards; then the run on it seems to hang."""
    killed, noticed, processes = [], [], []
    monkeypatch.setattr(ray_fleet.ray, "get", lambda call, timeout: asyncio.run(call))
    monkeypatch.setattr(ray_fleet.ray, "kill", killed.append)
    handle = Handle(replaced_at=replaced_at)

    async def scene() -> None:
        fleet = fleet_of(handle, processes, lambda: noticed.append("replaced"))
        started = fleet.start(WorkerId("gpu-0"), 1)
        if replaced_at in ("ping", "start"):
            with pytest.raises(OlderEpoch):
                await started
        else:
            await started
            handle.epoch = 2 if replaced_at else 1
        if is_silent:
            await fleet.why_silent(WorkerId("gpu-0"), 1, 60.0)
        fleet.end(WorkerId("gpu-0"), 1)
        await fleet.close()
        await asyncio.gather(*fleet._tasks)

    asyncio.run(scene())
    if replaced_at:
        assert (killed, processes) == ([], []), "it belongs to the controller of epoch 2"
        assert noticed
    else:
        assert (killed, noticed, len(processes)) == ([handle], [], int(is_silent))


def test_a_process_that_hangs_is_killed_although_ray_cannot_end_the_worker(monkeypatch) -> None:
    def without_control_service(handle: Any) -> None:
        raise RaySystemError("the control service does not answer")

    async def scene() -> list[WorkerProcess]:
        processes: list[WorkerProcess] = []
        fleet = fleet_of(Handle(), processes, lambda: None)
        await fleet.start(WorkerId("gpu-0"), 1)
        await fleet.why_silent(WorkerId("gpu-0"), 1, 60.0)
        fleet.end(WorkerId("gpu-0"), 1)
        await asyncio.gather(*fleet._tasks)
        return processes

    monkeypatch.setattr(ray_fleet.ray, "get", lambda call, timeout: asyncio.run(call))
    monkeypatch.setattr(ray_fleet.ray, "kill", without_control_service)
    assert asyncio.run(scene()) == [WorkerProcess(1, 1.0, N1)]


def fleet_of(handle: Handle, killed: list[WorkerProcess], on_replaced: Callable[[], None]) -> RayFleet:
    """The fleet of the controller of epoch 1, with one worker."""
    return RayFleet(
        lambda origin: handle,  # type: ignore[arg-type, return-value]
        lambda group: WorkerNeeds(0.0),
        Examiner(killed),  # type: ignore[arg-type]
        lambda: asyncio.sleep(0),  # type: ignore[arg-type, return-value]
        succession=Succession("modelpool", "mine", 1, 60.0, handle, {"": "now"}.get, on_replaced),
    )


class Examiner:
    """Notes which processes it kills."""

    def __init__(self, killed: list[WorkerProcess]) -> None:
        self.killed = killed

    def prepare(self, node: NodeId) -> None: ...

    async def silence_cause(self, process: WorkerProcess, seconds: float, neighbour: Any) -> Loss:
        return Loss("silent")

    async def kill(self, process: WorkerProcess, neighbour: Any) -> None:
        self.killed.append(process)


def test_a_pool_that_was_taken_over_keeps_its_workers_when_the_daemon_before_ends(monkeypatch) -> None:
    """Another daemon has the name: the workers that it started, and those that it has taken over, are its own."""
    killed = []
    adopted, started, own = Handle("adopted", 2), Handle("started", 2), Handle("own")
    monkeypatch.setattr(survivors, "left_workers", lambda namespace, pool: [adopted, started, own])
    monkeypatch.setattr(survivors.ray, "get", lambda call, timeout: asyncio.run(call))
    monkeypatch.setattr(survivors.ray, "kill", lambda handle: killed.append(handle.name))
    end_left_workers("modelpool", "mine", 1)
    assert killed == ["own"]
    end_left_workers("modelpool", "mine", 2)
    assert sorted(killed) == ["adopted", "own", "own", "started"]
