"""Part "pool": many small jobs through the pool with Ray, against its own engine alone."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

from benchmarks.gpu.engine_jobs import EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting

#: packages that the pool needs and the engine does not
NEEDED = ("ray", "pydantic", "typer", "rich")
#: images per second of the pool relative to the engine
LEAST_SHARE = 0.95
JOBS = 48
STEPS = 8
CONFIG = """
[pool]
device = "{device}"
workers = 1

[models]
folders = ["{models}"]

[output]
folder = "{outputs}"
"""


def run(record: Record, setting: Setting) -> None:
    """Compare the pool with the engine, where Ray is installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        record.skip("the whole part", f"not installed: {', '.join(missing)}")
        return
    if setting.device != "cuda":
        record.skip("the whole part", "the tests of the pool cover other devices")
        return
    path = setting.model_file("sd15")
    with record.attempting("engine alone", least_seconds=20.0):
        rate = engine_rate(setting, path)
        record.add("engine alone", rate, "images/s")
    with record.attempting("pool", least_seconds=30.0):
        found = pool_rate(setting, path)
        record.add(
            "pool", found, "images/s", rate, f"at least {LEAST_SHARE} of the engine", found >= LEAST_SHARE * rate
        )


def engine_rate(setting: Setting, path: Path) -> float:
    """Return the images per second of the engine: encode, sample and decode, one after the other."""
    engine = open_engine(setting.device)
    try:
        jobs, extent = EngineJobs(path, engine), Extent(512, 512, STEPS)
        texts = jobs.texts()
        jobs.decode(extent, jobs.sample(jobs.sample_work(extent), texts))
        started = time.perf_counter()
        for seed in range(JOBS):
            jobs.decode(extent, jobs.sample(jobs.sample_work(extent, seed=seed), texts))
        return JOBS / (time.perf_counter() - started)
    finally:
        engine.close()


def pool_rate(setting: Setting, path: Path) -> float:
    """Return the images per second of a pool on this machine."""
    from modelpool import GenerateRequest, ModelPool

    config = setting.work / "pool.toml"
    outputs = setting.work / "outputs"
    config.write_text(CONFIG.format(models=path.parent, outputs=outputs, device=setting.device))
    requests = [
        GenerateRequest(model=path.stem, prompt="a red cat", seed=seed, width=512, height=512, steps=STEPS)
        for seed in range(JOBS)
    ]
    with ModelPool.start(str(config)) as pool:
        list(pool.submit(requests[:4]))
        started = time.perf_counter()
        count = sum(1 for _ in pool.submit(requests))
        return count / (time.perf_counter() - started)
