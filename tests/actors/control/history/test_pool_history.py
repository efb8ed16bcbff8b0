"""The history of a controller with a fleet in the test's hand: the costs are the costs of the pool's own accounts, and
each event is there once, with its reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.control.cluster_view import ClusterView, NodeEnd, NodeView
from modelpool.actors.control.history import history_writer, pool_history, run_ledger
from modelpool.actors.control.history.history_file import HistoryFile
from modelpool.actors.control.history.history_reader import NO_WORK, HistoryReader
from modelpool.actors.control.history.history_values import CostSums, EventKind
from modelpool.actors.control.history.pool_history import PoolHistory, spool_prefix
from modelpool.actors.control.history.spool import Spool
from modelpool.actors.control.operator_orders import OperatorOrder, Order
from modelpool.actors.control.past_jobs import memory_text
from modelpool.actors.control.status import PoolStatus
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import NodeId, RunErrorKind
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import RunTask
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from tests.actors.control.history.test_history_file import small_disk
from tests.actors.fake_fleet import Desk, settle
from tests.actors.fakes import FAIL

#: longest wait for the writer's thread
PATIENCE_SECONDS = 20.0


def request(seed: int, **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": f"circle {seed}", "seed": seed, "steps": 3, **fields})


async def until(found: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not found():
        assert time.monotonic() < end, "the writer does not come to its end"
        await asyncio.sleep(0.01)


class Place:
    """The history of one pool, with a clock in the test's hand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pool.history.sqlite"
        self.spools = folder / "spools"
        self.spools.mkdir(exist_ok=True)
        self.now = 1_800_000_000.0

    def history(self) -> PoolHistory:
        return PoolHistory(self.path, self.spools, wall_clock=lambda: self.now)

    def reader(self) -> HistoryReader:
        return HistoryReader(self.path)

    def total(self) -> CostSums:
        found = CostSums()
        for row in self.reader().costs(()):
            found.add(row.sums)
        return found

    def kinds(self) -> list[str]:
        return [each.event.kind for each in self.reader().events()]

    async def stored(self, desk: Desk) -> None:
        """Everything so far is in the file."""
        history = desk.controller._history
        writer = history._writer
        assert writer is not None
        await until(lambda: writer.is_idle)
        history.beat(desk.clock.now())
        await until(lambda: writer.is_idle)

    def kill(self, desk: Desk) -> None:
        """End the writer as a signal does: what it has not stored is in its spool only."""
        history = desk.controller._history
        writer = history._writer
        assert writer is not None
        writer._batches.put(None)
        writer._thread.join()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(history_writer, "RETRY_SECONDS", 0.02)
    return Place(tmp_path)


async def finish_all(desk: Desk, run_seconds: float = 2.0, load_seconds: float = 0.5) -> None:
    while desk.fleet.running:
        for sent in desk.fleet.running:
            desk.fleet.finish(sent, run_seconds, load_seconds)
        await settle()
    await desk.hear()


async def two_users(desk: Desk) -> None:
    await desk.submit(
        request(1, user="ann"),
        request(2, user="ann", loras=[("light", 0.8)]),
        request(3, user="bob", model="forms"),
        request(4, user="bob", prompt=f"{FAIL} 4"),
    )
    await finish_all(desk)


def test_the_costs_are_those_of_the_accounts_of_the_pool(place: Place) -> None:
    async def talk() -> PoolStatus:
        desk = await Desk(workers=2, history=place.history()).open()
        await two_users(desk)
        await place.stored(desk)
        status = await desk.controller.status()
        await desk.controller.close()
        return status

    status = asyncio.run(talk())
    rows = {row.values: row.sums for row in place.reader().costs(("user",))}
    assert {user: sums.charged_seconds for (user,), sums in rows.items()} == pytest.approx(status.seconds_by_user)
    total = place.total()
    assert total.runs + total.failed_runs == status.tasks_total > 0
    assert total.failed_runs == 1
    assert rows["bob",].failed_runs == 1
    assert rows["ann",].failed_runs == 0
    by_lora = {row.values: row.sums for row in place.reader().costs(("model", "lora"))}
    assert {values[0] for values in by_lora} == {"shapes", "forms"}
    assert by_lora["shapes", "light"].seconds > 0.0
    assert place.kinds()[0] == EventKind.POOL_STARTED
    assert place.kinds()[-1] == EventKind.POOL_ENDED
    assert not list(place.spools.iterdir()), "a pool that has ended in order leaves no spool"


def test_a_killed_controller_loses_no_cost_and_none_is_counted_twice(place: Place) -> None:
    """The second batch is not stored when the controller is killed; then the next one is killed before it stores."""

    async def talk() -> float:
        desk = await Desk(workers=2, history=place.history()).open()
        await two_users(desk)
        await place.stored(desk)
        await desk.submit(request(11, user="ann"), submission="t")
        await finish_all(desk)
        seconds = sum((await desk.controller.status()).seconds_by_user.values())
        assert place.total().charged_seconds < seconds, "something must be in the spool only"
        place.kill(desk)
        return seconds

    seconds = asyncio.run(talk())
    before = place.total().charged_seconds

    async def again() -> float:
        desk = await Desk(workers=1, history=place.history(), epoch=1).open()
        await place.stored(desk)
        assert place.total().charged_seconds == pytest.approx(seconds) != pytest.approx(before)
        await desk.submit(request(12, user="eve"))
        await finish_all(desk)
        more = sum((await desk.controller.status()).seconds_by_user.values())
        place.kill(desk)
        return more

    more = asyncio.run(again())

    async def at_last() -> None:
        desk = await Desk(workers=1, history=place.history(), epoch=2).open()
        await place.stored(desk)
        await desk.controller.close()

    asyncio.run(at_last())
    assert place.total().charged_seconds == pytest.approx(seconds + more)
    started = [kind for kind in place.kinds() if kind in (EventKind.POOL_STARTED, EventKind.CONTROLLER_RESTARTED)]
    assert started == [EventKind.POOL_STARTED, EventKind.CONTROLLER_RESTARTED, EventKind.CONTROLLER_RESTARTED]
    assert place.kinds().count(EventKind.JOB_FAILED) == 1, "events are not lost and not doubled, either"


def test_a_lost_worker_is_an_event_and_its_run_is_counted_apart(place: Place) -> None:
    async def talk() -> tuple[float, ...]:
        desk = await Desk(workers=1, history=place.history()).open()
        await desk.submit(request(1, user="ann"))
        await desk.clock.advance(7.0)
        desk.fleet.kill(desk.fleet.running[0].worker_id)
        await settle()
        await pass_time(desk, place, 60.0)
        await finish_all(desk)
        await place.stored(desk)
        seconds = (await desk.controller.status()).seconds_by_user.values()
        await desk.controller.close()
        return tuple(seconds)

    (seconds,) = asyncio.run(talk())
    (row,) = place.reader().costs(("user",))
    assert (row.sums.lost_runs, row.sums.lost_seconds) == (1, 7.0)
    assert row.sums.charged_seconds == pytest.approx(seconds), "what was lost is charged to nobody"
    (lost,) = [each.event for each in place.reader().events(kinds=[EventKind.WORKER_LOST])]
    assert lost.worker == "gpu-0"
    assert "killed by the test" in lost.text


def test_failures_and_retries_of_tasks_are_counted_by_kind(place: Place) -> None:
    async def talk() -> None:
        desk = await Desk(workers=2, history=place.history()).open()
        await desk.submit(*(request(seed) for seed in range(6)))
        for _ in range(3):
            desk.fleet.fail(desk.fleet.running[0], RunErrorKind.INPUT_LOST)
            await settle()
        desk.fleet.fail(desk.fleet.running[0], RunErrorKind.BAD_INPUT)
        await settle()
        await finish_all(desk)
        await desk.controller.close()

    asyncio.run(talk())
    events = [each.event for each in place.reader().events()]
    retried = [event for event in events if event.kind == EventKind.TASK_RETRIED]
    assert sum(event.count for event in retried) == 2
    assert all("input_lost" in event.text and "runs again" in event.text for event in retried)
    failed = [event.text for event in events if event.kind == EventKind.TASK_FAILED]
    assert len(failed) == 2
    assert "input_lost" in failed[0]
    assert "bad_input" in failed[1]
    assert sum(event.count for event in events if event.kind == EventKind.JOB_FAILED) == 2


GROUP = NodeGroup("a100", gpu_type="", max_nodes=2, price_per_hour=3.6, start_seconds=1.0)


def scaled(group: NodeGroup = GROUP, **limits) -> SchedulerConfig:
    return SchedulerConfig(groups=(group,), autoscaling=AutoscalingConfig(**limits))


async def pass_time(desk: Desk, place: Place, seconds: float) -> None:
    """Both clocks go on."""
    while seconds > 0:
        step = min(10.0, seconds)
        place.now += step
        await desk.clock.advance(step)
        await desk.hear()
        seconds -= step


def test_the_money_of_all_rows_is_what_the_pool_has_spent(place: Place) -> None:
    """Also through a killed controller: the next one is given the account, with the time in between."""

    async def talk() -> tuple[float, str]:
        desk = await Desk(workers=0, config=scaled(replace(GROUP, min_nodes=1)), history=place.history()).open()
        await desk.submit(request(1, user="ann"), request(2, user="bob"))
        await pass_time(desk, place, 100.0)
        await finish_all(desk, run_seconds=20.0)
        await pass_time(desk, place, 30.0)
        await place.stored(desk)
        memory = memory_text(desk.state, desk.clock.now())
        scaler = desk.state.autoscaler
        assert scaler is not None
        place.kill(desk)
        return scaler.spent_until(desk.clock.now()), memory

    spent, memory = asyncio.run(talk())
    total = place.total()
    assert total.cost + total.failed_cost == pytest.approx(spent)
    assert spent > 0.0
    by_user = {row.values[0]: row.cost for row in place.reader().costs(("user",))}
    assert by_user.keys() == {"ann", "bob", NO_WORK}
    assert by_user["ann"] == pytest.approx(total_seconds(place, "ann") * 3.6 / 3600.0)

    async def again() -> float:
        desk = await Desk(
            workers=0, config=scaled(replace(GROUP, min_nodes=1)), history=place.history(), epoch=1
        ).open()
        await pass_time(desk, place, 5.0)
        await place.stored(desk)
        await desk.controller.remember(memory, 50.0, 1)
        await pass_time(desk, place, 10.0)
        await place.stored(desk)
        scaler = desk.state.autoscaler
        assert scaler is not None
        spent_again = scaler.spent_until(desk.clock.now())
        await desk.controller.close()
        return spent_again

    spent_again = asyncio.run(again())
    assert spent_again > spent, "the time without a controller costs money"
    total = place.total()
    assert total.cost + total.failed_cost == pytest.approx(spent_again)

    async def next_pool() -> float:
        """`modelpool down` and `up`: the account begins at 0."""
        desk = await Desk(workers=0, config=scaled(replace(GROUP, min_nodes=1)), history=place.history()).open()
        await desk.controller.remember("", 0.0, 0)
        await desk.submit(request(9, user="ann"))
        await pass_time(desk, place, 100.0)
        await place.stored(desk)
        scaler = desk.state.autoscaler
        assert scaler is not None
        now = scaler.spent_until(desk.clock.now())
        await desk.controller.close()
        return now

    third = asyncio.run(next_pool())
    total = place.total()
    assert total.cost + total.failed_cost == pytest.approx(spent_again + third)


def total_seconds(place: Place, user: str) -> float:
    return next(row.sums.charged_seconds for row in place.reader().costs(("user",)) if row.values == (user,))


def test_decisions_of_autoscaling_and_limits_are_events(place: Place) -> None:
    async def talk() -> None:
        desk = await Desk(workers=0, config=scaled(max_cost=0.5), history=place.history()).open()
        await desk.submit(*(request(seed) for seed in range(40)))
        for _ in range(40):
            await pass_time(desk, place, 10.0)
            for sent in desk.fleet.running:
                desk.fleet.finish(sent, 10.0)
            await settle()
        await desk.controller.close()

    asyncio.run(talk())
    events = [each.event for each in place.reader().events()]
    requested = [event for event in events if event.kind == EventKind.NODES_REQUESTED]
    assert len(requested) >= 2
    assert all(event.group == "a100" and event.text.startswith("requested ") for event in requested)
    given_up = [event for event in events if event.kind == EventKind.NODES_GIVEN_UP]
    assert any("max_cost is reached" in event.text for event in given_up)
    limits = {event.text for event in events if event.kind == EventKind.LIMIT_REACHED}
    full = "group a100 has max_nodes, 2, while tasks wait"
    assert full in limits
    assert sum(event.text == full for event in events) == 1, "though tasks come and go"
    assert "max_cost is reached" in limits


class Nodes:
    """A cluster in the test's hand."""

    def __init__(self, *names: str) -> None:
        self.view = ClusterView(nodes=tuple(NodeView(NodeId(f"id-{name}"), name) for name in names))

    async def poll(self) -> ClusterView:
        return self.view

    async def recent(self, max_age_seconds: float) -> ClusterView:
        return self.view

    async def workers_by_pool(self) -> dict[str, int]:
        return {}

    async def drain(self, node_id: NodeId, deadline: float, reason: str) -> str:
        return ""


def test_nodes_that_join_leave_and_are_drained_are_events_with_names(place: Place) -> None:
    async def talk() -> None:
        nodes = Nodes("one", "two")
        desk = Desk(workers=1, history=place.history(), nodes=nodes)
        desk.fleet.node = NodeId("id-one")
        await desk.open()
        await desk.clock.advance(2.0)
        three = NodeView(NodeId("id-three"), "three")
        gone = NodeView(NodeId("id-two"), "two", end=NodeEnd.PREEMPTED, end_reason="spot")
        nodes.view = ClusterView(nodes=(nodes.view.nodes[0], gone, three))
        await desk.clock.advance(4.0)
        await desk.controller.node_notice(NodeId("id-one"), time.time() + 100.0, "maintenance")
        await settle()
        await desk.controller.close()

    asyncio.run(talk())
    said = {each.event.kind: each.event for each in place.reader().events()}
    assert said[EventKind.NODES_PRESENT].text == "2 nodes: one, two"
    assert said[EventKind.NODE_JOINED].node == "three"
    assert said[EventKind.NODE_LEFT].text == "node two has left: preempted: spot"
    assert said[EventKind.NODE_DRAINING].node == "one"
    assert "maintenance" in said[EventKind.NODE_DRAINING].text
    assert said[EventKind.WORKER_UP].node == "one"
    found = place.reader().events(node="two")
    assert [each.event.kind for each in found] == [EventKind.NODE_LEFT]


def test_orders_of_operators_are_events(place: Place) -> None:
    async def talk() -> None:
        nodes = Nodes("one", "two")
        desk = Desk(workers=1, history=place.history(), nodes=nodes)
        desk.fleet.node = NodeId("id-one")
        await desk.open()
        await desk.clock.advance(2.0)
        for order, named in (
            (Order.CORDON, "one"),
            (Order.UNCORDON, "one"),
            (Order.RESTART, "gpu-0"),
            (Order.DRAIN, "two"),
        ):
            await desk.controller.operate(OperatorOrder(order, named, 60.0, is_forced=True))
            await settle()
        await desk.controller.close()

    asyncio.run(talk())
    events = [each.event for each in place.reader().events()]
    ordered = {event.kind: (event.node, event.worker, event.text) for event in events}
    assert ordered[EventKind.CORDONED][0] == ordered[EventKind.UNCORDONED][0] == "one"
    assert ordered[EventKind.RESTART_ORDERED][1] == "gpu-0"
    assert ordered[EventKind.DRAIN_ORDERED] == (
        "two",
        "",
        "node two is drained by the operator: its workers end within 60 s",
    )


def test_outputs_on_hold_and_stuck_submissions_are_events_once(place: Place) -> None:
    async def talk() -> None:
        desk = await Desk(workers=1, history=place.history()).open()
        for _ in range(3):
            await desk.controller.jobs_troubled(("submission a: /disk is full",))
        await desk.controller.jobs_troubled(())
        desk.fleet.starts_by_itself = False
        desk.fleet.kill(next(iter(desk.fleet.workers))[0])
        await settle()
        await desk.submit(request(1), submission="night.3.1")
        await pass_time(desk, place, 2000.0)
        await desk.controller.close()

    asyncio.run(talk())
    events = [each.event for each in place.reader().events()]
    assert [event.text for event in events if event.kind == EventKind.JOBS_ON_HOLD] == [
        "detached jobs wait: submission a: /disk is full"
    ]
    assert [event.kind for event in events].count(EventKind.JOBS_CONTINUE) == 1
    (stuck,) = [event for event in events if event.kind == EventKind.SUBMISSION_STUCK]
    assert stuck.text.startswith("submission night: no run has begun or ended for 1")


def test_a_broken_file_never_stops_the_pool_and_is_named_and_logged_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.path.write_bytes(b"this is no database, but it is long enough to be one" * 100)

    async def talk() -> tuple[str, str, float]:
        desk = await Desk(workers=1, history=place.history()).open()
        history = desk.controller._history
        await until(lambda: history.trouble)
        await two_users(desk)
        while_broken = (await desk.controller.status()).history_trouble
        await desk.clock.advance(30.0)
        place.path.rename(place.path.with_suffix(".broken"))
        await until(lambda: not history.trouble)
        await place.stored(desk)
        status = await desk.controller.status()
        await desk.controller.close()
        return while_broken, status.history_trouble, sum(status.seconds_by_user.values())

    while_broken, after, seconds = asyncio.run(talk())
    assert str(place.path) in while_broken
    assert "not a database" in while_broken
    assert not after
    assert place.total().charged_seconds == pytest.approx(seconds), "what was counted meanwhile is there"
    said = [record for record in caplog.records if "history of the pool is not written" in record.getMessage()]
    assert len(said) == 1


def test_a_bug_of_the_writer_is_told_also_before_the_file_is_open(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: HistoryFile, batch: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(HistoryFile, "write", fails)

    async def talk() -> str:
        desk = await Desk(workers=1, history=place.history()).open()
        await until(lambda: desk.controller._history.trouble)
        await two_users(desk)
        trouble = (await desk.controller.status()).history_trouble
        await desk.controller.close()
        return trouble

    assert "the history is no longer written (RuntimeError: a bug)" in asyncio.run(talk())
    assert "the history of the pool is no longer written" in caplog.text


def test_a_bug_of_the_history_fails_no_job_and_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of whoever is told of an event breaks the scheduler, and all jobs with it."""

    async def talk(fails: str) -> str:
        desk = await Desk(workers=1, history=place.history()).open()
        history = desk.controller._history
        monkeypatch.setattr(history, fails, lambda *about: 1 / 0)
        history._command_handlers |= {RunTask: history._run_sent}
        await two_users(desk)
        await desk.clock.advance(5.0)
        trouble = (await desk.controller.status()).history_trouble
        assert not desk.controller._queue.broken, fails
        ended = [task for task in desk.controller._upkeep if task.done()]
        assert not any(task.exception() for task in ended), fails
        await desk.controller.close()
        return trouble

    for fails in ("_run_sent", "_follow_groups"):
        caplog.clear()
        assert asyncio.run(talk(fails)) == "the history is not complete (ZeroDivisionError: division by zero)", fails
        assert caplog.text.count("the history of the pool is not complete") == 1, fails


def test_records_of_another_version_that_a_killed_controller_has_left_are_told(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    history = place.history()
    Spool(spool_prefix(place.path, place.spools), history=place.path).append('["d", "of a later version"]')

    async def talk() -> None:
        desk = await Desk(workers=1, history=history).open()
        await place.stored(desk)
        await desk.controller.close()

    asyncio.run(talk())
    assert "1 record is not counted: another version of modelpool wrote it" in caplog.text
    assert place.kinds() == ["pool_started", "worker_up", "pool_ended"]


def test_a_full_disk_never_stops_the_pool_and_nothing_is_missing_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs of 2 MiB; writes meanwhile are summed up in memory."""
    monkeypatch.setattr(history_writer, "RETRY_SECONDS", 0.02)
    with small_disk(tmp_path / "disk"):
        place = Place(tmp_path / "disk")
        place.spools = tmp_path

        async def talk() -> float:
            desk = await Desk(workers=2, history=place.history()).open()
            history = desk.controller._history
            await two_users(desk)
            await place.stored(desk)
            with suppress(OSError), (place.path.parent / "fill").open("wb", buffering=0) as fill:
                while True:
                    fill.write(bytes(4096))
            for number in range(300):  # more than the write-ahead log has room for
                if history.trouble:
                    break
                await desk.submit(request(100 + number, user=f"user {number} {'x' * 80}"), submission=f"t{number}")
                await finish_all(desk)
                await asyncio.sleep(0.01)
                history.beat(desk.clock.now())
            await until(lambda: history.trouble)
            assert "full" in (await desk.controller.status()).history_trouble
            await desk.submit(*(request(seed, user="eve") for seed in range(900, 905)), submission="meanwhile")
            await finish_all(desk)
            (place.path.parent / "fill").unlink()
            await until(lambda: not history.trouble)
            await place.stored(desk)
            seconds = sum((await desk.controller.status()).seconds_by_user.values())
            await desk.controller.close()
            return seconds

        seconds = asyncio.run(talk())
        assert place.total().charged_seconds == pytest.approx(seconds)
        assert EventKind.HISTORY_RESUMED in place.kinds()


def test_submissions_of_one_job_each_leave_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ledger, "MOST_FOLLOWED", 8)

    async def talk() -> None:
        desk = await Desk(workers=1).open()
        for number in range(40):
            await desk.submit(request(number), submission=f"s{number}")
            await finish_all(desk)
        ledger = desk.controller._history._ledger
        assert len(ledger.progress) <= 9
        assert not any(runs.runs for runs in ledger._workers.values())
        await desk.controller.close()

    asyncio.run(talk())


def test_what_waits_for_a_disk_in_memory_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_history, "MOST_WAITING", 3)
    place.path.mkdir()  # it cannot be opened

    async def talk() -> float:
        desk = await Desk(workers=1, history=place.history()).open()
        history = desk.controller._history
        await until(lambda: history.trouble)
        await desk.submit(*(request(seed, user=f"user {seed}") for seed in range(9)))
        await finish_all(desk)
        for number in range(9):
            await desk.controller.jobs_troubled((f"submission {number}: full",))
        assert len(history._batch.costs) == 4
        assert len(history._batch.events) == 3
        place.path.rmdir()
        await until(lambda: not history.trouble)
        await place.stored(desk)
        seconds = sum((await desk.controller.status()).seconds_by_user.values())
        await desk.controller.close()
        return seconds

    seconds = asyncio.run(talk())
    assert place.total().charged_seconds == pytest.approx(seconds), "costs are in a row of others, and complete"
    users = {row.values[0] for row in place.reader().costs(("user",))}
    assert pool_history.OTHERS in users
    assert len(users) == 4
    resumed = [each.event.text for each in place.reader().events(kinds=[EventKind.HISTORY_RESUMED])]
    assert any("events had no room in memory" in text for text in resumed)


def test_a_clock_that_is_set_back_changes_no_sum(place: Place) -> None:
    """Hours are added to again, later events come after earlier ones, and the rows of the wrong hours stay."""

    async def talk() -> float:
        desk = await Desk(workers=1, history=place.history()).open()
        for seed, step in ((1, -7200.0), (2, 3600.0 * 24 * 365 * 5), (3, -3600.0 * 24 * 365 * 6)):
            await desk.submit(request(seed, user="ann"), submission=f"s{seed}")
            await finish_all(desk)
            await place.stored(desk)
            place.now += step
        seconds = (await desk.controller.status()).seconds_by_user["ann"]
        await desk.controller.close()
        return seconds

    seconds = asyncio.run(talk())
    assert place.total().charged_seconds == pytest.approx(seconds)
    assert place.kinds()[-1] == EventKind.POOL_ENDED
    assert len(place.reader().costs(("hour",))) == 3


def test_a_pool_without_a_journal_keeps_nothing_and_counts_what_metrics_need() -> None:
    async def talk() -> None:
        desk = await Desk(workers=1).open()
        desk.fleet.starts_by_itself = False
        await desk.submit(request(1), request(2))
        await desk.pass_time(70.0)
        names = {family.name: family.samples for family in await desk.controller.metrics()}
        assert names["modelpool_oldest_waiting_seconds"][0].value == 70.0
        assert "modelpool_journal_disk_bytes" not in names
        assert not desk.controller._history._batch
        await desk.controller.close()

    asyncio.run(talk())


def test_the_next_controller_waits_until_the_last_one_has_released_the_file(place: Place) -> None:
    held = HistoryFile(place.path)

    async def talk() -> None:
        desk = await Desk(workers=1, history=place.history()).open()
        await two_users(desk)
        assert not desk.controller._history.trouble
        held.close()
        await place.stored(desk)
        await desk.controller.close()

    asyncio.run(talk())
    assert place.total().runs > 0
