"""The systems that `benchmarks.against_ray` compares. Each opens a separate Ray on loopback, runs passes over one
trace, and closes it. All loads and runs are those of `benchmarks.ray_trace`.

A worker does one thing at a time in all of them, except that the pool preloads weights during runs, as its real engine
does: at the link's bandwidth and within the free memory. The option `overlap` lets Serve's replicas load one model
while they run another, and the row's title states it. They then hold more models than fit, since running models can be
evicted.
The other systems use settings that help them: the handle of each model is created once, and no proxy listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.ray_trace import (
    MODEL_BYTES,
    MODELS,
    OUTSTANDING,
    ROOM_MODELS,
    STEPS,
    WAITS,
    Answer,
    LeastRecentlyUsed,
    Pass,
    Request,
    Waits,
    load,
    loads_of,
    measured,
    run,
)
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeParams,
    LoraRef,
    ModelRef,
    PreloadRequest,
    Result,
    RunHooks,
    RunState,
    StageParams,
)
from modelpool.pool.values.core.stopping import ASK_EVERY_SECONDS
from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role, RunCost, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, plan
from modelpool.pool.weights.plan.preload_plan import RunningLease, plan_preload
from modelpool.scheduler.simulator.machines import OverlappedPreload
from tests.actors.fakes import Facts, FakeCatalog, FakeEngine, fake_plan, sha

MIB = 1 << 20
#: activations and scratch of a run, in addition to the weights
WORKING_BYTES = 2 * MIB
CAPACITY_BYTES = ROOM_MODELS * MODEL_BYTES + WORKING_BYTES
#: forward passes of a run: streamed weights are transferred once in each
PASSES = 20

Ask = Callable[[Request], tuple[str, float]]


def component(model: str) -> ComponentSpec:
    """Return the only component of a model."""
    return ComponentSpec(ComponentKey(f"{model}/all@0"), Role.TEXT_ENCODER, MODEL_BYTES, MODEL_BYTES)


class TraceCatalog(FakeCatalog):
    """The models of the trace. The estimate of each run is the mean of all, since real times are unknown in advance."""

    def __init__(self, waits: Waits = WAITS) -> None:
        self._waits = waits

    def find_model(self, name: str) -> ModelRef:
        """Return a reference for any name."""
        return ModelRef(name, f"/models/{name}", sha(name))

    def components(self, model: ModelRef) -> dict[Role, ComponentSpec]:
        """Return the only component."""
        return {Role.TEXT_ENCODER: component(model.name)}

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """Return a use of the complete component in every pass."""
        return ComponentUse(component(model.name).key, MIB, passes=PASSES)

    def activation_bytes(self, model: ModelRef, work: StageParams, context_tokens: Sequence[int] = ()) -> int:
        """Return the rest of the memory that is kept free."""
        return WORKING_BYTES - MIB

    def run_seconds(self, model: ModelRef, work: StageParams) -> float:
        """Return the mean of the trace."""
        return self._waits.step_seconds * sum(STEPS) / len(STEPS)


class TraceEngine(FakeEngine):
    """Only waits: for the transfers of the pool's residency plan, and for the run. Results contain the load count."""

    def __init__(self, waits: Waits = WAITS) -> None:
        super().__init__()
        self._link_bytes_per_second = waits.link_bytes_per_second
        self._residency = Residency(CAPACITY_BYTES)
        self._specs = {spec.key: spec for spec in (component(f"model-{number:02}") for number in range(MODELS))}
        self._moved_bytes = 0

    def introduce(self) -> Facts:
        """Return its capacity and bandwidth."""
        return Facts(CAPACITY_BYTES, self._link_bytes_per_second, "waiting")

    def run(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: tuple[Result, ...],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
        resume: RunState | None = None,
    ) -> tuple[Result, RunCost]:
        """Wait for the load and the run. No run here stops before its end, so none resumes."""
        assert isinstance(work, EncodeParams)
        moves = plan(self._residency, task.uses, self._specs, task.activation_bytes, hints=EvictionHints(needed_next))
        self._residency = moves.after
        load_seconds = moves.upload_bytes / self._link_bytes_per_second
        run_seconds = float(work.text.split()[1]) + moves.streamed_bytes / self._link_bytes_per_second
        time.sleep(load_seconds)
        held = RunningLease(frozenset(use.component for use in task.uses), WORKING_BYTES)
        ahead_bytes = 0 if moves.streamed_bytes else self._run_overlapped(run_seconds, held, hooks)
        if moves.streamed_bytes:
            run(run_seconds)
        self._moved_bytes += moves.upload_bytes + moves.streamed_bytes + ahead_bytes
        cost = RunCost(
            load_seconds=load_seconds,
            run_seconds=run_seconds,
            uploaded_bytes=moves.upload_bytes,
            streamed_bytes=moves.streamed_bytes,
            resident=moves.all_resident,
            ahead_bytes=ahead_bytes,
        )
        return Encoded(np.array([[self._moved_bytes / MODEL_BYTES]], np.float32)), cost

    def _run_overlapped(self, seconds: float, held: RunningLease, hooks: RunHooks) -> int:
        """Run while the link preloads the weights that the worker was sent: one after the other, from the time of the
        message to the end of the run at most. Returns the preloaded bytes."""
        end, current, preloads = time.perf_counter() + seconds, None, list[OverlappedPreload]()
        while (now := time.perf_counter()) < end:
            if hooks.preload_request() is not current:
                current = hooks.preload_request()
                preloads = self._preloads(current, held, now)
            run(min(ASK_EVERY_SECONDS, end - now))
        came_bytes = 0
        for one in preloads:
            self._residency = one.plan.after(self._residency, one.uploaded_bytes(end))
            came_bytes += one.uploaded_bytes(end)
        return came_bytes

    def _preloads(self, request: PreloadRequest | None, held: RunningLease, at: float) -> list[OverlappedPreload]:
        there, found = self._residency, list[OverlappedPreload]()
        if request is None:
            return found
        held, hints = (
            RunningLease(held.components.union(request.kept), held.run_bytes),
            EvictionHints(request.needed_next),
        )
        for task, _ in request.tasks:
            moves = plan_preload(there, held, task.uses, self._specs, task.activation_bytes, hints)
            if moves.upload_bytes:
                found.append(OverlappedPreload(moves, at, 0.0, self._link_bytes_per_second))
                at, there = found[-1].ends_at, moves.after(there)
                held = RunningLease(held.components.union(use.component for use in task.uses), held.run_bytes)
        return found


@contextlib.contextmanager
def modelpool(workers: int, options: Mapping[str, float], waits: Waits) -> Iterator[Ask]:
    """Open the pool; requests go through its client, each as one task of one stage. Options: keys of the scheduler's
    configuration."""
    from modelpool.actors.client.client import ModelPool
    from modelpool.actors.client.opening import start_pool
    from modelpool.actors.config.config import PoolConfig

    setting: dict[str, Any] = dict(options)

    def make_plan(config: PoolConfig, gpu_count: int, can_grow: bool) -> Any:
        idle = fake_plan(config, gpu_count, can_grow)
        engine, catalog = partial(TraceEngine, waits), partial(TraceCatalog, waits)
        scheduler = replace(idle.scheduler, **setting)
        return replace(idle, budget_bytes=CAPACITY_BYTES, open_engine=engine, open_catalog=catalog, scheduler=scheduler)

    opened = start_pool(PoolConfig().override(workers=workers, name="race"), make_plan, preload=())
    with ModelPool(opened.connection, opened.close, None, opened.address) as pool:
        pool.wait_ready(300)
        tags = iter(range(1 << 60))

        def ask(request: Request) -> tuple[str, float]:
            # the tag makes requests of different passes distinct: equal work would run once
            stage = pool.encode(f"{next(tags)} {request.run_seconds}", model=request.model)
            loads = stage.result().context_LD[0, 0]
            return stage._job.tasks[0].worker, float(loads)

        yield ask


@contextlib.contextmanager
def serve(workers: int, options: Mapping[str, float], waits: Waits) -> Iterator[Ask]:
    """Open a multiplexed deployment of Ray Serve. Options: models (per replica), ongoing (concurrent requests per
    replica), overlap (1: loads overlap runs)."""
    with _ray(workers + 2):
        from ray import serve as ray_serve

        models, ongoing = int(options.get("models", ROOM_MODELS)), int(options.get("ongoing", 5))
        overlap = bool(options.get("overlap"))
        ray_serve.start(proxy_location="Disabled")

        @ray_serve.deployment(num_replicas=workers, max_ongoing_requests=ongoing, ray_actor_options={"num_cpus": 0})
        class Multiplexed:
            def __init__(self) -> None:
                self._loads = 0
                self._gpu = asyncio.Lock()
                self._name = ray_serve.get_replica_context().replica_tag

            @ray_serve.multiplexed(max_num_models_per_replica=models)
            async def model(self, model_id: str) -> str:
                async with contextlib.nullcontext() if overlap else self._gpu:
                    await asyncio.to_thread(load, waits.load_seconds)
                self._loads += 1
                return model_id

            async def __call__(self, run_seconds: float) -> tuple[str, float]:
                await self.model(ray_serve.get_multiplexed_model_id())
                async with self._gpu:
                    await asyncio.to_thread(run, run_seconds)
                return self._name, float(self._loads)

        handle = ray_serve.run(Multiplexed.bind(), route_prefix=None)
        handles = {f"model-{n:02}": handle.options(multiplexed_model_id=f"model-{n:02}") for n in range(MODELS)}
        yield lambda request: handles[request.model].remote(request.run_seconds).result()
        ray_serve.shutdown()


@contextlib.contextmanager
def data(
    workers: int, options: Mapping[str, float], waits: Waits
) -> Iterator[Callable[[Sequence[Request]], list[Answer]]]:
    """Open Ray Data with a pool of actors, each with an LRU cache of models. Options: batch (rows per call)."""
    with _ray(workers + 2):
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False

        class Models:
            def __init__(self) -> None:
                self._held = LeastRecentlyUsed(load_seconds=waits.load_seconds)
                self._name = ray.get_runtime_context().get_actor_id()

            def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                loads = []
                for model, run_seconds in zip(rows["model"], rows["run_seconds"], strict=True):
                    self._held.need(str(model))
                    run(float(run_seconds))
                    loads.append(float(self._held.loads))
                return {"worker": np.array([self._name] * len(loads)), "loads": np.array(loads)}

        def ask_all(requests: Sequence[Request]) -> list[Answer]:
            rows = [{"model": request.model, "run_seconds": request.run_seconds} for request in requests]
            pipeline = ray.data.from_items(rows, override_num_blocks=4 * workers).map_batches(
                Models,
                compute=ray.data.ActorPoolStrategy(size=workers),
                batch_size=int(options.get("batch", 4)),
                num_cpus=1,
            )
            asked_at = time.perf_counter()
            return [Answer(row["worker"], row["loads"], asked_at, time.perf_counter()) for row in pipeline.iter_rows()]

        yield ask_all


@contextlib.contextmanager
def _ray(cpus: int) -> Iterator[None]:
    """Start a Ray for this process, as the pool does."""
    from modelpool.actors.ray.ray_session import open_session

    session = open_session(None, "race", cpus)
    try:
        yield
    finally:
        session.close()


def passes(ask: Ask, requests: Sequence[Request], outstanding: int = OUTSTANDING, count: int = 2) -> Iterator[Pass]:
    """Run `count` passes: the first cold, the others warm. `outstanding` clients each send one request at a time."""
    before: dict[str, float] = {}
    for _ in range(count):
        answers = answers_of(ask, requests, outstanding)
        loads, before = loads_of(answers, before)
        yield measured(answers, loads)


def answers_of(ask: Ask, requests: Sequence[Request], outstanding: int) -> list[Answer]:
    """Send all requests in order, `outstanding` at a time. Raises the first exception of a request."""
    waiting, answers, raised = iter(requests), [], []
    guard = threading.Lock()

    def client() -> None:
        while not raised:
            with guard:
                request = next(waiting, None)
            if request is None:
                return
            asked_at = time.perf_counter()
            try:
                worker, loads = ask(request)
            except Exception as error:
                raised.append(error)
                return
            answers.append(Answer(worker, loads, asked_at, time.perf_counter()))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(outstanding)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return answers


@dataclass(frozen=True, slots=True)
class System:
    """One row of the table: a system, its options, and whether the requests are sorted by model."""

    kind: str
    words: str
    options: Mapping[str, float]
    environment: Mapping[str, str]
    outstanding: int = OUTSTANDING
    by_model: bool = False


def one_race(system: System, workers: int, requests: Sequence[Request], waits: Waits = WAITS) -> list[Pass]:
    """Open the system, run its passes, and close it. Its workers wait for loads as `waits` says."""
    ordered = sorted(requests, key=lambda r: r.model) if system.by_model else list(requests)
    if system.kind == "data":
        with data(workers, system.options, waits) as ask_all:
            answers = ask_all(ordered)
            return [measured(answers, loads_of(answers, {})[0], one_by_one=False)]
    with {"modelpool": modelpool, "serve": serve}[system.kind](workers, system.options, waits) as ask:
        return list(passes(ask, ordered, min(system.outstanding, len(ordered))))
