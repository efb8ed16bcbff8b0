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
JOBS, FEW_JOBS = 48, 4
STEPS = 8
ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "examples" / "shapes" / "models" / "shapes.safetensors"
#: settings of the pool that are compared, by name; the first is the default
SETTINGS = {"pool": "", "pool, decodes overlapping sampling": "overlap_decode = true"}
CONFIG = """
[pool]
device = "{device}"
workers = 1
{settings}

[models]
folders = ["{models}"]

[output]
folder = "{outputs}"
"""


def run(record: Record, setting: Setting) -> None:
    """Compare the pool with the engine, where Ray is installed: small images of the example, and SD1.5."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        record.skip("the whole part", f"not installed: {', '.join(missing)}")
        return
    compare(record, setting, SHAPES, Extent(64, 64, STEPS))
    side = 64 if setting.small else 512
    compare(record, setting, setting.model_file("sd15"), Extent(side, side, STEPS))


def compare(record: Record, setting: Setting, path: Path, extent: Extent) -> None:
    """Record the images per second of the engine alone and of the pool, for one model."""
    rate = 0.0
    with record.attempting(f"{path.stem}, engine alone", least_seconds=setting.least(20.0)):
        rate = engine_rate(setting, path, extent)
        record.add(f"{path.stem}, engine alone", rate, "images/s", note=f"{extent.width} px, {extent.steps} steps")
    for number, (name, settings) in enumerate(SETTINGS.items()):
        with record.attempting(f"{path.stem}, {name}", least_seconds=setting.least(30.0)):
            found = pool_rate(setting, path, extent, settings, setting.work / f"{path.stem}{number}")
            record.add(f"{path.stem}, {name}", found, "images/s", rate, f"at least {LEAST_SHARE} of the engine",
                       setting.met(found >= LEAST_SHARE * rate))  # fmt: skip


def engine_rate(setting: Setting, path: Path, extent: Extent) -> float:
    """Return the images per second of the engine: sample and decode, one after the other."""
    engine, count = open_engine(setting.device), FEW_JOBS if setting.small else JOBS
    try:
        jobs = EngineJobs(path, engine)
        texts = jobs.texts()
        jobs.decode(extent, jobs.sample(jobs.sample_work(extent), texts))
        started = time.perf_counter()
        for seed in range(count):
            jobs.decode(extent, jobs.sample(jobs.sample_work(extent, seed=seed), texts))
        return count / (time.perf_counter() - started)
    finally:
        engine.close()


def pool_rate(setting: Setting, path: Path, extent: Extent, settings: str, folder: Path) -> float:
    """Return the images per second of a pool on this machine, with a folder for its files."""
    from modelpool import GenerateRequest, ModelPool

    folder.mkdir()
    config, device = folder / "pool.toml", setting.device
    places = {"models": path.parent, "outputs": folder / "outputs"}
    config.write_text(CONFIG.format(device=device, settings=settings, **places))
    size = {"width": extent.width, "height": extent.height, "steps": extent.steps}
    count = FEW_JOBS if setting.small else JOBS
    requests = [GenerateRequest(model=path.stem, prompt="a red cat", seed=seed, **size) for seed in range(count)]
    with ModelPool.start(str(config)) as pool:
        list(pool.submit([request.model_copy(update={"seed": 1000 + request.seed}) for request in requests[:4]]))
        started = time.perf_counter()
        made = sum(1 for _ in pool.submit(requests))
        return made / (time.perf_counter() - started)
