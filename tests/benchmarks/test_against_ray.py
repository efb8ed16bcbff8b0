"""What the systems of `benchmarks.against_ray` are compared by is the same for all and counted rightly. Without Ray."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

from benchmarks import ray_systems, ray_trace
from benchmarks.against_ray import RACED, systems
from benchmarks.ray_systems import CAPACITY_BYTES, MIB, System, TraceCatalog, TraceEngine, answers_of, passes
from benchmarks.ray_trace import LOAD_SECONDS, MODELS, ROOM_MODELS, Answer, LeastRecentlyUsed, Request, loads_of, trace
from modelpool.pool.values.core.stage_params import BatchMember, EncodeParams, RunHooks
from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse, Role, Stage, TaskId, TaskSpec

HOOKS = RunHooks(lambda step, steps: None, lambda: False)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that somebody wanted to sleep; nobody does, but the clock goes on by them and by nothing else."""
    found: list[float] = []
    monkeypatch.setattr(ray_trace.time, "sleep", found.append)
    monkeypatch.setattr(ray_trace.time, "perf_counter", lambda: sum(found))
    return found


def test_the_trace_is_one_for_all_and_skewed() -> None:
    first = trace(2000)
    assert first == trace(2000)
    assert first[:300] == trace(2000)[:300]
    asked = [count for _, count in collections.Counter(request.model for request in first).most_common()]
    assert len(asked) == MODELS
    assert (
        8 < asked[0] / asked[-1] < 16
    )  # Zipf's law: the first of twelve is asked for twelve times as often as the last


def test_every_race_can_be_made() -> None:
    known = systems(300)
    assert set(RACED) <= set(known)
    assert {System(**arguments).kind for arguments in known.values()} == {"modelpool", "serve", "data"}


def test_loads_of_a_pass_are_those_since_the_pass_before() -> None:
    def answer(worker: str, loads: float) -> Answer:
        return Answer(worker, loads, 0.0, 1.0)

    cold, known = loads_of([answer("a", 1), answer("b", 1), answer("a", 4), answer("a", 3)], {})
    assert (cold, known) == (5, {"a": 4, "b": 1})
    warm, known = loads_of([answer("b", 3), answer("c", 2)], known)
    assert (warm, known) == (4, {"a": 4, "b": 3, "c": 2})


def test_a_worker_with_what_it_used_last_loads_what_is_not_there(waited: list[float]) -> None:
    held = LeastRecentlyUsed(2)
    for model in ("a", "b", "a", "c", "a", "b"):
        held.need(model)
    assert held.loads == 4  # b leaves for c, and c leaves for b
    assert waited == [LOAD_SECONDS] * 4


class Pool:
    """Requests through one engine as the pool cuts them, without a pool."""

    def __init__(self) -> None:
        self._engine = TraceEngine()
        self._catalog = TraceCatalog()
        self._numbers = itertools.count()

    def ask(self, request: Request) -> tuple[str, float]:
        model = self._catalog.find_model(request.model)
        work = EncodeParams(model, (), f"{next(self._numbers)} {request.run_seconds}")
        (role,) = self._catalog.components(model)
        use: ComponentUse = self._catalog.use(model, role, ())
        task = TaskSpec(TaskId("t"), Stage.ENCODE, (use,), self._catalog.activation_bytes(model, work), 1.0)
        result, cost = self._engine.run(task, work, {}, HOOKS)
        assert cost.run_seconds == request.run_seconds, "nothing streams: there is room for three models"
        assert np.isclose(cost.load_seconds, 0.0 if cost.resident else LOAD_SECONDS)
        assert self._engine.residency().used_bytes <= CAPACITY_BYTES
        return "gpu-0", float(result.context_LD[0, 0])

    @property
    def held(self) -> set[ComponentKey]:
        return {entry.component for entry in self._engine.residency().entries}


def test_our_engine_holds_as_many_models_and_waits_as_long_for_one(waited: list[float]) -> None:
    pool, requests = Pool(), [Request(n, f"model-{n:02}", 0.02) for n in range(ROOM_MODELS)]
    told = [pool.ask(request) for request in requests * 2]
    assert [loads for _, loads in told] == [1, 2, 3, 3, 3, 3]
    assert len(pool.held) == ROOM_MODELS
    pool.ask(Request(9, "model-09", 0.04))
    assert len(pool.held) == ROOM_MODELS
    assert sum(waited) == pytest.approx(4 * LOAD_SECONDS + 6 * 0.02 + 0.04)


def test_what_our_engine_runs_together_takes_as_long_as_one_after_the_other(waited: list[float]) -> None:
    catalog, engine = TraceCatalog(), TraceEngine()
    model = catalog.find_model("model-00")
    use = catalog.use(model, Role.TEXT_ENCODER, ())
    members = [
        BatchMember(TaskSpec(TaskId(text), Stage.ENCODE, (use,), MIB, 1.0), EncodeParams(model, (), text), {}, HOOKS)
        for text in ("0 0.02", "1 0.08")
    ]
    (_, first), (_, second) = engine.run_batch(members)
    assert [first.batched, second.batched] == [2, 2]
    assert sum(waited) == pytest.approx(LOAD_SECONDS + 0.02 + 0.08)


def test_every_request_is_asked_once_a_pass_by_any_number_of_clients() -> None:
    requests, asked = trace(50), []

    def ask(request: Request) -> tuple[str, float]:
        asked.append(request.number)
        return "one", 3.0

    cold, warm = passes(ask, requests, outstanding=8)
    assert collections.Counter(asked) == dict.fromkeys(range(50), 2)
    assert (cold.loads, warm.loads) == (3.0, 0.0)


def test_a_request_that_fails_ends_the_race() -> None:
    def ask(request: Request) -> tuple[str, float]:
        raise RuntimeError(f"request {request.number}")

    with pytest.raises(RuntimeError, match="request"):
        answers_of(ask, trace(20), 4)


def test_the_others_wait_in_the_same_functions() -> None:
    """Nobody has a load or a run of its own."""
    assert ray_systems.load is ray_trace.load
    assert ray_systems.run is ray_trace.run
