"""The requests that `benchmarks.against_ray` sends to every system, the cost of a load and a run, and the figures that
are computed from measurements. Knows no system and no Ray.

A load and a run are waits of fixed length: the same in every system, and independent of the load on the two cores of a
small machine. A model is a number of bytes; loading it waits for the time that the link would take.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MODELS = 12
#: models that fit on one worker
ROOM_MODELS = 3
MODEL_BYTES = 2 << 30
LOAD_SECONDS = 0.2
STEP_SECONDS = 0.02
#: drawn uniformly for each request
STEPS = (1, 1, 2, 4)
#: outstanding requests of all clients, for systems that take single requests
OUTSTANDING = 64


@dataclass(frozen=True, slots=True)
class Waits:
    """What a load and a step take, in every system."""

    load_seconds: float = LOAD_SECONDS
    step_seconds: float = STEP_SECONDS

    @property
    def link_bytes_per_second(self) -> float:
        """The bandwidth at which a model takes so long to load."""
        return MODEL_BYTES / self.load_seconds


WAITS = Waits()


@dataclass(frozen=True, slots=True)
class Request:
    """One run of one model."""

    number: int
    model: str
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request: its worker, the number of loads of that worker so far, and the times of request and
    response on the driver's clock."""

    worker: str
    loads: float
    asked_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class Pass:
    """The figures of one pass over the trace. Latencies are None if requests are not sent one by one."""

    loads: float
    wall_seconds: float
    requests_per_second: float
    p50_seconds: float | None
    p99_seconds: float | None

    def as_json(self) -> dict[str, float | None]:
        """Return the figures for a line of JSON."""
        return asdict(self)


def trace(requests: int, seed: int = 7, step_seconds: float = STEP_SECONDS) -> tuple[Request, ...]:
    """Return requests with models drawn independently by Zipf's law (exponent 1)."""
    rng = random.Random(seed)
    names = [f"model-{number:02}" for number in range(MODELS)]
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    drawn = rng.choices(names, weights, k=requests)
    return tuple(Request(i, model, rng.choice(STEPS) * step_seconds) for i, model in enumerate(drawn))


def load(seconds: float) -> None:
    """Wait for the time of loading one model to a worker, in any system."""
    time.sleep(seconds)


def run(seconds: float) -> None:
    """Wait for the time of running a model, in any system."""
    time.sleep(seconds)


class LeastRecentlyUsed:
    """An LRU cache of models, limited by number: as a user would write it for an actor."""

    def __init__(self, room_models: int = ROOM_MODELS, load_seconds: float = LOAD_SECONDS) -> None:
        self._room_models = room_models
        self._load_seconds = load_seconds
        self._models: OrderedDict[str, None] = OrderedDict()
        self.loads = 0

    def need(self, model: str) -> None:
        """Load `model` if it is missing, and evict the least recently used model if necessary."""
        if model in self._models:
            self._models.move_to_end(model)
            return
        if len(self._models) >= self._room_models:
            self._models.popitem(last=False)
        load(self._load_seconds)
        self.loads += 1
        self._models[model] = None


def loads_of(answers: Sequence[Answer], before: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Return the loads of all workers in one pass, and each worker's total so far; `before` is the previous total.

    The last load of a worker precedes the response to its request, so the largest reported number is its total."""
    now = dict(before)
    for answer in answers:
        now[answer.worker] = max(now.get(answer.worker, 0.0), answer.loads)
    return sum(now.values()) - sum(before.values()), now


def measured(answers: Sequence[Answer], loads: float, one_by_one: bool = True) -> Pass:
    """Return the figures of a pass, computed from its answers."""
    wall_seconds = max(a.answered_at for a in answers) - min(a.asked_at for a in answers)
    latencies = sorted(a.answered_at - a.asked_at for a in answers)
    p99 = statistics.quantiles(latencies, n=100)[98]
    told = (statistics.median(latencies), p99) if one_by_one else (None, None)
    return Pass(loads, wall_seconds, len(answers) / wall_seconds, *told)
