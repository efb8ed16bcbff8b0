"""Kills, stops and drains members of gangs at random steps of runs on Ray workers, and checks that nothing is lost.

    python -m benchmarks.gang_chaos [--faults 50] [--seed 1] [--only ROW ...] [--steps 10] [--step-seconds 0.6]

Of 50 faults 30 are kills (SIGKILL), 10 stops (SIGSTOP; half of the processes continue after a while) and 10 drains (a
member's restart, or a drain of the machine that is withdrawn), of the leader or another member, in the order and at the
steps that the seed draws. They hit gangs of 2, 3 and 4 workers in turn, which divide texts of guidance, tokens, or
both, and gangs that hold weights for each other (simulated GPUs, 1.6 times too small for the model). The models are
tiny; a step waits `--step-seconds`, as one that waits for a GPU does. Three workers are a number that requests cannot
have; here they may.

After each fault: the job and one beside it have one output each, with the pixels of the undisturbed run, each listed
once in the manifest; every worker is idle again; no process is left in a process group after a run that did not end
well (after one that did, it is kept for the next run); and how
long after a kill or a stop the last of the other members had ended its run, in lengths of a step of the same run. A
drain is noticed when the run has stopped on the others. Prints a table; exits with 1 if something was broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos_model import listed_files
from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.client.opening import OpenedPool, start_pool
from modelpool.actors.control.operator_orders import OperatorOrder, Order
from modelpool.actors.control.pool_plan import PoolPlan, plan_pool
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.outputs.results.outcomes import ImageResult, JobFailure, VideoResult
from modelpool.pool.values.specs.gang import DEGREES, Gang
from modelpool.pool.values.specs.spec import JobId, Stage
from modelpool.pool.weights.plan.eviction_plan import needed_bytes

WORKERS = 4
#: of the weights of a model, for the room that a worker has for them
TIMES_TOO_LARGE = 1.6
#: faster than any host: the tier is used although gloo is slower than a copy here
PEER_BYTES_PER_SECOND = 1e15
#: a fault must be over by then
MOST_SECONDS = 240.0
POLL_SECONDS = 0.02
#: within so many steps the others have to notice
MOST_STEPS = 3.0
#: within so many the members of a gang must have ended a run for a drain
DRAIN_STEPS = 2.0
#: what a process that a signal has stopped continues after, in steps
CONTINUES_AFTER = (1.0, 12.0)
GIVEN_DEGREES = (*DEGREES[:2], 3, *DEGREES[2:])


@dataclass(frozen=True, slots=True)
class Row:
    """Gangs of one kind.

    family  of the tiny model
    gpus    members
    fields  of the request
    large   whether the model is too large for a worker, and members hold parts of it for each other
    """

    family: str
    gpus: int
    fields: Mapping[str, Any]
    large: bool = False


_GUIDED: Mapping[str, Any] = {"cfg": 3.0, "negative": "blurry", "width": 64, "height": 64}
_PLAIN: Mapping[str, Any] = {"cfg": 1.0, "width": 64, "height": 64}
ROWS = {
    "2: texts": Row("wan_t2v", 2, {**_GUIDED, "frames": 9}),
    "4: texts and tokens": Row("wan_t2v", 4, {**_GUIDED, "frames": 9}),
    "2: tokens": Row("flux_dev", 2, {"width": 64, "height": 64}),
    "3: tokens": Row("flux_dev", 3, {"width": 64, "height": 64}),
    "2: peer weights, texts": Row("qwen_image", 2, _GUIDED, large=True),
    "3: peer weights, tokens": Row("qwen_image", 3, _PLAIN, large=True),
    "4: peer weights, texts and tokens": Row("qwen_image", 4, _GUIDED, large=True),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    kind      "kill", "stop" (for ever), "pause" (a stop after which the process continues) or "drain"
    rank      of the member that it hits
    step      after which it does
    part      of a step that has passed then
    """

    kind: str
    rank: int
    step: int
    part: float
    seconds: float


def main() -> None:
    """Inject the faults, row by row; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=(), choices=list(ROWS), help="rows; by default all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.6)
    wanted = parser.parse_args()
    began = time.monotonic()
    tally = series(wanted.faults, wanted.seed, wanted.only or list(ROWS), wanted.steps, wanted.step_seconds)
    print_table(tally, wanted.seed, time.monotonic() - began)
    sys.exit(bool(tally.broken))


@dataclass(slots=True)
class Tally:
    """What happened: by row and kind of fault, the noticed times in seconds and in steps; and what was broken."""

    noticed: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)
    continued: list[float] = field(default_factory=list)
    forming: dict[str, list[float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def draw_faults(count: int, seed: int, rows: Sequence[str], steps: int) -> dict[str, list[Fault]]:
    """Return the faults of each row: three kills for one stop and one drain, in turn over the rows."""
    rng = random.Random(seed)
    kinds = ["kill", "stop", "kill", "drain", "kill", "kill", "pause", "kill", "drain", "kill"]
    found: dict[str, list[Fault]] = {name: [] for name in rows}
    shuffled = [kinds[place % len(kinds)] for place in range(count)]
    rng.shuffle(shuffled)
    for place, kind in enumerate(shuffled):
        row = rows[place % len(rows)]
        is_leader = rng.random() < 0.4
        rank = 0 if is_leader else rng.randrange(1, ROWS[row].gpus)
        found[row].append(Fault(kind, rank, rng.randrange(1, steps - 2), rng.random(), rng.uniform(*CONTINUES_AFTER)))
    return found


def series(count: int, seed: int, rows: Sequence[str], steps: int, step_seconds: float) -> Tally:
    """Inject `count` faults, and return what happened."""
    tally = Tally()
    faults = draw_faults(count, seed, rows, steps)
    by_pool: dict[tuple[str, bool], list[str]] = {}
    for name in rows:
        if faults[name]:
            by_pool.setdefault((ROWS[name].family, ROWS[name].large), []).append(name)
    for (family, large), names in by_pool.items():
        with tempfile.TemporaryDirectory() as folder, gang_pool(Path(folder), family, large, step_seconds) as pool:
            for name in names:
                Trials(pool, name, Path(folder), steps, tally).run(faults[name])
    return tally


# ---- the pool --------------------------------------------------------------------------------------------------------


@contextmanager
def gang_pool(folder: Path, family: str, large: bool, step_seconds: float) -> Iterator[ModelPool]:
    """A pool of real workers on the CPU, or on simulated GPUs that are too small, with a tiny model and slow steps."""
    models, events = folder / "models", folder / "events"
    models.mkdir()
    events.mkdir()
    budget_bytes = write_model(models, family, large)
    device = "sim" if large else "cpu"
    config = PoolConfig().override(device=device, workers=WORKERS, name=f"gang-chaos-{os.getpid()}", models=[models])
    opened = start_pool(config, partial(_plan, device, budget_bytes, events, step_seconds))
    with opened_pool(opened) as pool:
        pool.wait_ready(MOST_SECONDS)
        yield pool


@contextmanager
def opened_pool(opened: OpenedPool) -> Iterator[ModelPool]:
    """The pool, which ends with the block."""
    pool = ModelPool(opened.connection, opened.close, None, opened.address, node_writers=opened.node_writers)
    try:
        yield pool
    finally:
        pool.close()


def write_model(folder: Path, family: str, large: bool) -> int | None:
    """Write a tiny model; return the memory of a GPU that is too small for it, or None for all."""
    from tests.pool.families.tiny_relatives import ALL_FAMILIES
    from tests.pool.families.tiny_shown import TinyFamilyModel

    model = TinyFamilyModel(folder, ALL_FAMILIES[family])
    try:
        if not large:
            return None
        row = next(row for row in ROWS.values() if row.family == family and row.large)
        _, cut = build_graph(_request({**row.fields, "gpus": 2}, 2, 0), JobId("job"), model.catalog)
        (sample,) = [task for task in cut.job.tasks if task.stage is Stage.SAMPLE]
        (weight_bytes,) = [each.weight_bytes for each in cut.components if each.key == sample.uses[0].component]
        least = max(needed_bytes(task.uses, task.activation_bytes) for task in cut.job.tasks)
        own = needed_bytes(sample.uses, sample.activation_bytes) + int(weight_bytes / TIMES_TOO_LARGE)
        return max(least, own)
    finally:
        model.close()


def _plan(
    device: str,
    budget_bytes: int | None,
    events: Path,
    step_seconds: float,
    config: PoolConfig,
    gpu_count: int,
    can_grow: bool,
) -> PoolPlan:
    plan = plan_pool(config, gpu_count, can_grow)
    return replace(
        plan,
        open_engine=partial(ObservedEngine, device, budget_bytes, events, step_seconds),
        open_catalog=partial(open_catalog_of_three, plan.open_catalog),
    )


def open_catalog_of_three(open_catalog: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Open a catalog, in whose process three workers may share a run."""
    allow_three()
    return open_catalog(*arguments, **named)


def allow_three() -> None:
    """Let requests of this process have three GPUs."""
    from modelpool.actors.graph.common import task_collector
    from modelpool.actors.request import gpu_fields

    for module in (gpu_fields, task_collector):
        vars(module)["DEGREES"] = GIVEN_DEGREES


class ObservedEngine:
    """An engine whose gang runs wait in each step, and write to a file when they begin, step and end."""

    def __init__(self, device: str, budget_bytes: int | None, events: Path, step_seconds: float) -> None:
        from modelpool.pool.engine.engine import Engine, EngineSettings

        settings = EngineSettings(device, budget_bytes=budget_bytes, peer_bytes_per_second=PEER_BYTES_PER_SECOND)
        self._engine = Engine.open(settings)
        self._step_seconds = step_seconds
        self._file = os.open(events / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, task: Any, work: Any, inputs: Any, hooks: Any, *more: Any, **named: Any) -> Any:
        """As the engine; each step of a gang waits."""
        gang: Gang | None = named.get("gang", more[3] if len(more) > 3 else None)
        if gang is None:
            return self._engine.run(task, work, inputs, hooks, *more, **named)
        waits = [False]

        def should_stop() -> bool:
            if waits[0]:
                waits[0] = False
                time.sleep(self._step_seconds)
            return bool(hooks.should_stop())

        def should_pause() -> bool:  # asked once after each step
            waits[0] = True
            self._tell("step", gang)
            return bool(hooks.should_pause())

        self._tell("begin", gang)
        error, result = "", None
        try:
            slow = replace(hooks, should_stop=should_stop, should_pause=should_pause)
            result = self._engine.run(task, work, inputs, slow, *more, **named)
            return result
        except BaseException as failed:
            error = f"{type(failed).__name__}: {failed}"[:300]
            raise
        finally:
            kind = "" if result is None else type(result[0]).__name__
            cost = None if result is None else result[1]
            self._tell("end", gang, error=error, result=kind, grouped=_in_group(self._engine),
                       meeting=0.0 if cost is None else cost.meeting_seconds,
                       exchanged=0 if cost is None else cost.exchanged_bytes)  # fmt: skip

    def _tell(self, what: str, gang: Gang, **more: Any) -> None:
        line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "gang": gang.gang_id, "rank": gang.rank,
                "worker": gang.members[gang.rank], **more}  # fmt: skip
        os.write(self._file, (json.dumps(line) + "\n").encode())


def _in_group(engine: Any) -> bool:
    """Whether this process is in a process group of torch."""
    torch = sys.modules.get("torch.distributed")
    return torch is not None and bool(torch.is_initialized())


# ---- faults ----------------------------------------------------------------------------------------------------------


class Events:
    """What the engines have written, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.all: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all events so far, in order of time."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                found = file.read()
            whole = found[: found.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.all += [json.loads(line) for line in whole.splitlines()]
        self.all.sort(key=lambda event: event["at"])
        return self.all


class Trials:
    """The faults of one row, one after the other, in one pool."""

    def __init__(self, pool: ModelPool, name: str, folder: Path, steps: int, tally: Tally) -> None:
        self._pool, self._name, self._folder, self._steps, self._tally = pool, name, folder, steps, tally
        self._row = ROWS[name]
        self._events = Events(folder / "events")
        self._outputs = 0

    def run(self, faults: Sequence[Fault]) -> None:
        """Make the outputs undisturbed, then with each fault."""
        allow_three()
        expected = self._pixels(*self._submitted())
        undisturbed = self._pixels(*self._submitted())
        if undisturbed != expected:
            self._say("two undisturbed runs have other pixels")
        if self._row.large and not any(event.get("exchanged") for event in self._events.read()):
            self._say("no weights were exchanged")
        for number, fault in enumerate(faults, start=1):
            began = time.monotonic()
            before = len(self._tally.broken)
            try:
                self._trial(fault, expected)
            except TimeoutError as late:
                self._say(f"{fault}: {late}")
            word = "broken" if len(self._tally.broken) > before else "well"
            print(f"{self._name}: {number}/{len(faults)} {fault.kind} of rank {fault.rank} at step {fault.step}: "
                  f"{word}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
            for line in self._tally.broken[before:]:
                print(f"    {line}", flush=True)
        self._tally.forming[self._name] = [
            event["meeting"] for event in self._events.read() if event["what"] == "end" and event["meeting"]
        ]

    def _trial(self, fault: Fault, expected: Sequence[bytes]) -> None:
        seen = len(self._events.read())
        jobs, output = self._submitted()
        (gang, target) = self._reached(seen, fault)
        steps = [e["at"] for e in self._events.read() if e["gang"] == gang and e["rank"] == 0 and e["what"] == "step"]
        step_seconds = statistics.median([after - before for before, after in itertools.pairwise(steps)])
        time.sleep(fault.part * step_seconds)
        nodes = {each.id: each.node_name for each in self._pool.status().workers} if fault.kind == "drain" else {}
        hit_at = time.monotonic()
        undo = self._inject(fault, target["pid"], target["worker"], nodes, step_seconds)
        try:
            if self._pixels(jobs, output) != expected:
                self._say(f"{fault}: other pixels")
        finally:
            undo()
        self._tally.continued.append(time.monotonic() - hit_at)
        ranks = [rank for rank in range(self._row.gpus) if rank != fault.rank]
        ends = {
            e["rank"]: e["at"] - hit_at
            for e in self._events.read()
            if e["gang"] == gang and e["what"] == "end" and e["rank"] in ranks
        }
        if len(ends) < len(ranks):
            self._say(f"{fault}: only members {sorted(ends)} have ended the run")
        else:
            seconds = max(ends.values())
            in_steps = seconds / step_seconds
            self._tally.noticed.setdefault((self._name, fault.kind), []).append((seconds, in_steps))
            if in_steps >= MOST_STEPS:
                self._say(f"{fault}: noticed after {in_steps:.1f} steps ({seconds:.2f} s, of {step_seconds:.2f} s)")
        self._settled(fault)

    def _reached(self, seen: int, fault: Fault) -> tuple[str, dict[str, Any]]:
        """Wait until a new gang has done the steps; return its id, and the last event of the member to hit."""
        until = time.monotonic() + MOST_SECONDS
        while time.monotonic() < until:
            new = self._events.read()[seen:]
            gangs = {event["gang"]: None for event in new}
            for gang in gangs:
                own = [e for e in new if e["gang"] == gang and e["rank"] == fault.rank]
                if sum(e["what"] == "step" for e in own) >= fault.step + 1 and own[-1]["what"] != "end":
                    return gang, own[-1]
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"no gang has done {fault.step} steps within {MOST_SECONDS:.0f} s")

    def _inject(
        self, fault: Fault, pid: int, worker: str, nodes: Mapping[str, str], step_seconds: float
    ) -> Callable[[], None]:
        """Inject a fault; return what ends it."""
        if fault.kind == "drain":
            operator, node = self._pool.operator, nodes[worker]
            limit_seconds = DRAIN_STEPS * step_seconds  # with more, the run would come to its end
            if fault.seconds < statistics.mean(CONTINUES_AFTER):
                operator.order(OperatorOrder(Order.RESTART, worker, limit_seconds, is_forced=True))
                return lambda: None
            operator.order(OperatorOrder(Order.DRAIN, node, limit_seconds, is_forced=True))
            timer = threading.Timer(
                MOST_STEPS * step_seconds,
                lambda: operator.order(OperatorOrder(Order.UNCORDON, node, is_forced=True)),
            )
            timer.start()
            return timer.join
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.kind != "pause":
            return lambda: None
        timer = threading.Timer(fault.seconds * step_seconds, _continue, (pid,))
        timer.start()
        return timer.join

    def _settled(self, fault: Fault) -> None:
        """Wait until all workers are idle; no process of a worker may be in a group then."""
        until = time.monotonic() + MOST_SECONDS
        while any(worker.state != "idle" for worker in self._pool.status().workers):
            if time.monotonic() > until:
                states = [(worker.id, worker.state, worker.trouble) for worker in self._pool.status().workers]
                raise TimeoutError(f"workers are not idle within {MOST_SECONDS:.0f} s: {states}")
            time.sleep(10 * POLL_SECONDS)
        pids = {memory.pid for memory in self._pool.memory().values()}
        if len(pids) != WORKERS:
            self._say(f"{fault}: {len(pids)} workers answer")
        last = {event["pid"]: event for event in self._events.read() if event["pid"] in pids}
        for event in last.values():
            if event["what"] != "end" or (event["error"] and event["grouped"]):
                self._say(f"{fault}: {event['worker']} is left in a group: {event}")

    def _submitted(self) -> tuple[Any, Path]:
        """Submit a job for a gang, and one beside it."""
        self._outputs += 1
        output = self._folder / f"{self._name.partition(':')[0]} {self._row.family} {self._outputs}"
        wanted = [
            _request({**self._row.fields, "gpus": gpus}, self._steps if seed == 1 else 2, seed)
            for seed, gpus in ((1, self._row.gpus), (2, 1))
        ]
        return self._pool.submit(wanted, output=output), output

    def _pixels(self, jobs: Any, output: Path) -> list[bytes]:
        """Wait for the outputs of a submission; return their pixels. Says what is lost or double."""
        jobs.wait(MOST_SECONDS)
        found: dict[int, bytes] = {}
        for result in jobs.results():
            if isinstance(result, JobFailure):
                self._say(f"job {result.index} is lost: {result.message}")
                continue
            assert isinstance(result, ImageResult | VideoResult)
            if result.index in found:
                self._say(f"job {result.index} has two outputs")
            made = result.frames if isinstance(result, VideoResult) else result.pixels
            found[result.index] = b"".join(frame.tobytes() for frame in made)
        listed = listed_files(output)
        if len(listed) != len(found) or len(set(listed)) != len(listed):
            self._say(f"{len(found)} outputs, listed are {listed}")
        return [found[index] for index in sorted(found)]

    def _say(self, problem: str) -> None:
        self._tally.broken.append(f"{self._name}: {problem}")


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _request(fields: Mapping[str, Any], steps: int, seed: int) -> GenerateRequest:
    return GenerateRequest(model="tiny", prompt="a photo of a red cube", seed=seed, steps=steps, **fields)


def print_table(tally: Tally, seed: int, seconds: float) -> None:
    """Print the results as Markdown, with the machine."""
    print(f"\nMachine: {platform.machine()}, {os.cpu_count()} cores; seed {seed}; {seconds / 60:.0f} minutes\n")
    print("| gang | fault | number | noticed after, median s | at most s | at most steps |\n|---|---|---|---|---|---|")
    for (row, kind), found in sorted(tally.noticed.items()):
        times, steps = [seconds for seconds, _ in found], [in_steps for _, in_steps in found]
        print(f"| {row} | {kind} | {len(found)} | {statistics.median(times):.2f} | {max(times):.2f} "
              f"| {max(steps):.1f} |")  # fmt: skip
    total = sum(map(len, tally.noticed.values()))
    if tally.continued:
        print(f"\n{total} faults; the job was complete after {statistics.median(tally.continued):.0f} s (median), at "
              f"most {max(tally.continued):.0f} s. Broken: {len(tally.broken)}")  # fmt: skip
    for line in tally.broken:
        print(f"- {line}")


if __name__ == "__main__":
    main()
