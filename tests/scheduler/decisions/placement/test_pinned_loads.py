"""Pinned sets are loaded on idle workers, outside of runs."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey, RunError, RunErrorKind, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.core.snapshot import take_snapshot
from modelpool.scheduler.decisions.placement.pinned_loads import RETRY_SECONDS, SETTLED_SECONDS
from modelpool.scheduler.model.messages import Command, LoadWeights, PruneComponents
from tests.scheduler.world import DRAW, PAINT, TEXT, VAE, Shell, alone, encode, image, sample

MODEL = (TEXT, PAINT, VAE)


def loads(commands: list[Command]) -> list[LoadWeights]:
    return [command for command in commands if isinstance(command, LoadWeights)]


def places(commands: list[Command]) -> list[str]:
    return [load.worker_id for load in loads(commands)]


def test_a_pinned_set_is_loaded_on_as_many_idle_workers_as_required() -> None:
    shell = Shell()
    shell.workers(a=64, b=64, c=64)
    sent = shell.pin(MODEL, 2)
    assert places(sent) == ["a", "b"]
    assert loads(sent)[0].components == MODEL
    why = loads(sent)[0].why
    assert why is not None
    assert why.words == "loads weights that are pinned to 2 workers and on 0: 13 B in 3.2 s"
    (pin,) = take_snapshot(shell.state).pins
    assert (pin.holders, pin.loading, pin.obstacle) == ((), ("a", "b"), "")
    assert not loads(shell.loaded("a"))
    assert not loads(shell.loaded("b"))
    (pin,) = take_snapshot(shell.state).pins
    assert (pin.holders, pin.loading, pin.obstacle) == (("a", "b"), (), "")
    assert {key for key, entry in shell.state.worker_table.workers[WorkerId("b")].entries.items()} == set(MODEL)


def test_a_worker_that_has_the_set_from_runs_needs_no_load() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.submit(image("first"))
    for _ in range(3):
        shell.finish("a")
    assert not loads(shell.pin(MODEL, 1))


def test_a_lost_worker_is_replaced_by_a_load_elsewhere() -> None:
    shell = Shell()
    shell.workers(a=64, b=64)
    shell.pin(MODEL, 1)
    shell.loaded("a")
    assert places(shell.lose("a")) == ["b"]
    assert not loads(shell.come_up("a"))  # it is being loaded on b
    assert places(shell.lose("b")) == ["a"]


def test_a_drained_machine_counts_no_longer() -> None:
    shell = Shell()
    shell.want("a", "b")
    shell.come_up("a", node="n1")
    shell.come_up("b", node="n2")
    shell.pin(MODEL, 1)
    shell.loaded("a")
    assert places(shell.drain("n1", 100.0)) == ["b"]


def test_a_run_ends_a_load_and_the_worker_loads_again_afterwards() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.pin(MODEL, 1)
    assert shell.submit(alone("other", encode("cat")))
    assert shell.on("a") is not None
    partial = Residency(64, (Resident(PAINT, 5),))
    assert not loads(shell.loaded("a", partial))  # its residency is from before the run
    assert shell.state.worker_table.workers[WorkerId("a")].entries.keys() == {TEXT}
    assert places(shell.finish("a")) == ["a"]


def test_an_answer_that_arrives_after_a_run_is_not_believed() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.pin(MODEL, 1)
    shell.submit(alone("other", encode("cat")))
    assert not loads(shell.finish("a"))  # the load is not answered yet
    assert places(shell.loaded("a", Residency(64))) == ["a"]
    assert shell.state.worker_table.workers[WorkerId("a")].entries.keys() == {TEXT}


def test_sets_spread_over_workers_and_do_not_evict_each_other() -> None:
    shell = Shell()
    shell.workers(a=64, b=64)
    shell.pin((PAINT,), 1)
    shell.loaded("a")
    assert places(shell.pin((DRAW,), 1)) == ["b"]
    shell.loaded("b")
    narrow = Shell()
    narrow.workers(a=14)
    narrow.pin((PAINT,), 1)
    narrow.loaded("a")
    assert not loads(narrow.pin((DRAW,), 1))
    assert take_snapshot(narrow.state).pins[1].obstacle == (
        "no other idle worker has room next to pinned weights, or its machine lacks a file"
    )


def test_other_weights_are_evicted_only_after_a_while() -> None:
    shell = Shell()
    shell.workers(a=20)
    shell.submit(alone("first", sample(model=DRAW)))
    shell.finish("a")
    assert not loads(shell.pin((PAINT,), 1))
    assert take_snapshot(shell.state).pins[0].obstacle == "idle workers hold other weights, which may be needed soon"
    assert shell.tick_due is not None
    idle_since = shell.state.worker_table.workers[WorkerId("a")].idle_since
    assert shell.tick_due <= idle_since + SETTLED_SECONDS
    while shell.at < idle_since + SETTLED_SECONDS:
        sent = shell.tick_comes()
    assert places(sent) == ["a"]


def test_a_failed_load_is_tried_again_later_and_its_file_is_known_to_be_missing() -> None:
    shell = Shell()
    shell.want("a", "b")
    shell.come_up("a", node="n1")
    shell.come_up("b", node="n2")
    shell.pin(MODEL, 1)
    missing = RunError(RunErrorKind.FILE_UNAVAILABLE, "/models/paint: no such file", components=(PAINT,))
    assert places(shell.loaded("a", Residency(64), missing)) == ["b"]
    full = RunError(RunErrorKind.OUT_OF_VRAM, "another program")
    assert not loads(shell.loaded("b", Residency(64), full))
    assert take_snapshot(shell.state).pins[0].obstacle == "loading it failed, and is tried again"
    first_failed_at = shell.at - 1.0
    sent: list[Command] = []
    while not loads(sent):
        sent = shell.tick_comes()
    assert shell.at == first_failed_at + RETRY_SECONDS
    assert places(sent) == ["a"]


def test_obstacles_are_named() -> None:
    shell = Shell()
    shell.pin(MODEL, 1)
    assert take_snapshot(shell.state).pins[0].obstacle == "no worker is up"
    shell.workers(a=8)
    assert take_snapshot(shell.state).pins[0].obstacle == "it is larger than the memory of any other worker"
    shell.workers(a=8, b=64)
    shell.loaded("b")
    shell.pin(MODEL, 3)
    shell.pin((ComponentKey("unknown"),), 1)
    assert [pin.obstacle for pin in take_snapshot(shell.state).pins] == [
        "it is larger than the memory of any other worker", "the sizes of its files are not known",
    ]  # fmt: skip
    shell.workers(b=64)
    assert take_snapshot(shell.state).pins[0].obstacle == "all workers that stay have it"
    shell.pin(MODEL, 0)
    shell.pin((DRAW,), 2)
    shell.loaded("b")
    shell.workers(b=64, c=64)
    shell.loaded("c")
    assert take_snapshot(shell.state).pins[-1].obstacle == ""


def test_a_busy_worker_is_waited_for() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.submit(alone("first", sample(model=DRAW)))
    assert not loads(shell.pin(MODEL, 1))
    assert take_snapshot(shell.state).pins[0].obstacle == "no other worker is idle"
    assert places(shell.finish("a")) == ["a"]


def test_sizes_of_pinned_components_are_not_forgotten() -> None:
    shell = Shell()
    shell.pin(MODEL, 1)
    shell.feed(PruneComponents(shell.tick()))
    assert shell.state.costs.components.keys() == set(MODEL)
    shell.workers(a=64)
    assert shell.loading.keys() == {"a"}


def test_unpinned_sets_are_loaded_no_more() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.pin(MODEL, 1)
    shell.pin(MODEL, 0)
    shell.loaded("a", Residency(64))
    assert not shell.loading
    assert take_snapshot(shell.state).pins == ()
