"""Part "switch": two models in host memory take turns on a device that has room for one, then on one that has room for
both, where the next model is announced during a run."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.full_size import FULL_SIZE
from benchmarks.gpu.engine_jobs import QUIET, EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import MIB, pinned_rate, torch_device
from modelpool.pool.values.core.stage_params import Encoded, PreloadRequest
from modelpool.pool.values.specs.spec import Role

MODELS = ("sdxl", "flux")
TURNS = 3
#: of the time that the bytes take on the link
MOST_TIME = 1.2
#: an announced load may make the run during which it happens this much longer, and leave this much of itself
MOST_SLOWDOWN, MOST_LEFT = 1.1, 0.1


def run(record: Record, setting: Setting) -> None:
    """Switch between SDXL and Flux."""
    paths = [setting.model_file(name) for name in MODELS]
    side = 64 if setting.small else 512
    extent = Extent(side, side, 1)
    # not the rate that the engine measures, which is that of its own copies
    link = pinned_rate(torch_device(setting.device), (4 if setting.small else 512) * MIB)
    probe = open_engine(setting.device)
    try:
        each = [EngineJobs(path, probe) for path in paths]
        budget_bytes = max(jobs.budget_for(jobs.sample_work(extent), 1.05) for jobs in each)
        texts = [jobs.texts() for jobs in each]
    finally:
        probe.close()
    engine = open_engine(setting.device, budget_bytes)
    try:
        each = [EngineJobs(path, engine) for path in paths]
        for turn in range(TURNS):
            for name, jobs, text in zip(MODELS, each, texts, strict=True):
                with record.attempting(name, least_seconds=2.0):
                    measure_switch(record, setting, name, jobs, text, extent, turn, link)
    finally:
        engine.close()
    with record.attempting("announced", least_seconds=setting.least(10.0)):
        measure_announced(record, setting, extent, texts)


def measure_switch(
    record: Record,
    setting: Setting,
    name: str,
    jobs: EngineJobs,
    texts: tuple[Encoded, ...],
    extent: Extent,
    turn: int,
    link: float,
) -> None:
    """Record how much longer a run takes that loads its model than the same run after it."""
    work = jobs.sample_work(extent)
    with_load = jobs.sample_seconds(work, texts)
    cost = jobs.costs[-1]
    seconds = max(0.0, with_load - jobs.sample_seconds(work, texts))
    bound = cost.uploaded_bytes / link
    weight_bytes = jobs.catalog.components(jobs.model)[Role.DIFFUSION_MODEL].weight_bytes
    record.add(
        f"turn {turn + 1}, {FULL_SIZE[name].title}", seconds, "s", bound, f"at most {MOST_TIME} of the link's time",
        setting.met(seconds <= MOST_TIME * bound) if turn else None,
        f"{cost.uploaded_bytes / 1e9:.2f} of {weight_bytes / 1e9:.2f} GB",
    )  # fmt: skip


def measure_announced(record: Record, setting: Setting, extent: Extent, texts: list[tuple[Encoded, ...]]) -> None:
    """Record what is left of a load, and how much longer the run takes during which it happens."""
    engine = open_engine(setting.device)
    try:
        first, second = (EngineJobs(setting.model_file(name), engine) for name in MODELS)
        work = first.sample_work(replace(extent, steps=4 if setting.small else 30))
        later = second.sample_work(extent)
        for jobs, params, text in ((first, work, texts[0]), (second, later, texts[1])):
            jobs.sample(params, text)  # opens the files, and chooses kernels
        alone = statistics.median(first.sample_seconds(work, texts[0]) for _ in range(TURNS))
        resident = second.sample_seconds(later, texts[1])
        for key in {use.component for use in second.task(later).uses}:
            engine.vram.unload(key)
        loaded = max(1e-9, second.sample_seconds(later, texts[1]) - resident)
        for key in {use.component for use in second.task(later).uses}:
            engine.vram.unload(key)
        request = PreloadRequest(((second.task(later), later),))
        together = first.sample_seconds(work, texts[0], replace(QUIET, preload_request=lambda: request))
        ahead_bytes = first.costs[-1].ahead_bytes
        left = max(0.0, second.sample_seconds(later, texts[1]) - resident)
        note = f"{ahead_bytes / 1e9:.2f} GB during the run"
        record.add(f"load of {FULL_SIZE[MODELS[1]].title} that is left after a run that knew of it", left, "s", loaded,
                   f"at most {MOST_LEFT} of the load", setting.met(left <= MOST_LEFT * loaded), note)  # fmt: skip
        record.add(f"{FULL_SIZE[MODELS[0]].title} during that load", together, "s", alone,
                   f"at most {MOST_SLOWDOWN} of the run alone",
                   setting.met(together <= MOST_SLOWDOWN * alone))  # fmt: skip
    finally:
        engine.close()
