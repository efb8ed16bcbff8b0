"""Golden workflows over real Ray and real engines on the CPU: the bytes are the bytes of single steps on one worker and
on three, with workers killed in the middle; what was finished is not computed again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool import ModelPool, PoolConfig
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.pool_plan import plan_pool
from tests.actors.golden_steps import Steps, pixels_of, write_models
from tests.actors.golden_workflows import GOLDENS, IMAGES, LATENTS, TIMED, Golden

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "configs" / "laptop.toml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PoolConfig:
    folder = tmp_path_factory.mktemp("golden") / "models"
    write_models(folder)
    return PoolConfig.load(CONFIG).override(device="cpu", models=[folder], loras=[folder / "loras"])


@pytest.fixture(scope="module")
def steps(config: PoolConfig) -> Iterator[Steps]:
    plan = plan_pool(config.override(workers=1), gpu_count=0, can_grow=False)
    engine: Any = plan.open_engine()
    with closing(engine):
        yield Steps(engine, plan.open_catalog())


def made_by(pool: ModelPool, goldens: Mapping[str, Golden], kills_at: tuple[int, ...] = ()) -> tuple[Any, int]:
    """The outputs of workflows by name, each once, and the number of tasks that were computed; after so many outputs a
    worker is killed."""
    names, found, computed = list(goldens), dict[str, np.ndarray](), 0
    for place, result in enumerate(pool.submit([one.request for one in goldens.values()], output=False).results()):
        if place in kills_at:
            victim = next(iter(pool._connection.call(Controller.memory_reports).values()))
            os.kill(victim.pid, signal.SIGKILL)
        name = names[result.index]
        assert hasattr(result, "recipe"), f"{name}: {result}"
        assert name not in found, "each output once"
        found[name] = pixels_of(result)
        computed += sum(not task.shared for task in result.tasks)
    return found, computed


def require_golden(
    config: PoolConfig, steps: Steps, goldens: Mapping[str, Golden], kills: Mapping[int, tuple[int, ...]]
) -> None:
    """`kills` are the places at which workers are killed, by the number of workers."""
    expected = {name: pixels_of(golden.by_hand(steps)) for name, golden in goldens.items()}
    counts = []
    for workers, kills_at in kills.items():
        with ModelPool.start(config, workers=workers, name=f"golden-{workers}") as pool:
            found, computed = made_by(pool, goldens, kills_at)
            wrong = [name for name, pixels in expected.items() if not np.array_equal(found.get(name), pixels)]
            assert not wrong, (workers, wrong)
            end = time.monotonic() + 120
            while pool.status().restarts < len(kills_at) and time.monotonic() < end:  # others may have made the rest
                time.sleep(0.1)
            pool.wait_ready(200)
            assert pool.status().restarts == len(kills_at)
            again, repeated = made_by(pool, goldens)
            assert all(np.array_equal(again[name], pixels) for name, pixels in expected.items())
            assert repeated == 0, "a second run computes nothing again"
            counts.append(computed)
    assert len(set(counts)) == 1, f"what a worker had finished is computed once, although it was killed: {counts}"


def test_golden_workflows_have_the_bytes_of_their_steps_although_a_worker_is_killed(
    config: PoolConfig, steps: Steps
) -> None:
    goldens = {**LATENTS, **dict(list(IMAGES.items())[:4]), "audio": TIMED["audio"]}
    require_golden(config, steps, goldens, {3: (1,)})


@pytest.mark.nightly(usually="tests/actors/test_workflow_ray.py")
def test_all_golden_workflows_have_the_bytes_of_their_steps_although_workers_are_killed(
    config: PoolConfig, steps: Steps
) -> None:
    require_golden(config, steps, GOLDENS, {1: (5,), 3: (2, 20, 40)})
