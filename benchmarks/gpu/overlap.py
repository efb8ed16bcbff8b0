"""Parts "overlap ...": images of few steps one after the other, and with each decode overlapping the next sampling run.

As a worker of the pool does it: a thread waits for what the device still decodes, while the engine begins the next run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.gpu.engine_jobs import QUIET, EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.sampling import opened
from benchmarks.gpu.setting import Setting
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, PixelArray, Result
from modelpool.pool.values.specs.spec import RunCost
from tests.pool.input_names import inputs_of

STEPS = 8
IMAGES = 12


@dataclass(slots=True)
class Made:
    """Images, and how they were made.

    overlaps       decodes that were under way when the next run began
    planned_bytes  the largest plan of a run
    """

    seconds: float = 0.0
    pixels: list[PixelArray] = field(default_factory=list)
    overlaps: int = 0
    planned_bytes: int = 0


def run(record: Record, setting: Setting, model: str) -> None:
    """Compare both ways of one model."""
    path, extent, _ = opened(record, setting, model)
    extent, count = replace(extent, steps=2 if setting.small else STEPS), 3 if setting.small else IMAGES
    engine = open_engine(setting.device)
    try:
        jobs = EngineJobs(path, engine)
        texts = jobs.texts()
        with record.attempting("overlap", least_seconds=setting.least(10.0)):
            for overlap in (False, True):  # weights are loaded, kernels chosen, memory reserved
                make_images(jobs, extent, texts, 2, overlap)
            compare(record, setting, jobs, extent, texts, count)
    finally:
        engine.close()


def compare(
    record: Record, setting: Setting, jobs: EngineJobs, extent: Extent, texts: Sequence[Encoded], count: int
) -> None:
    """Record images per second of both ways, what differs in their pixels, and the memory of the second."""
    alone = make_images(jobs, extent, texts, count, overlap=False)
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    overlapped = make_images(jobs, extent, texts, count, overlap=True)
    rates = [count / max(1e-9, made.seconds) for made in (alone, overlapped)]
    what = f"{extent.width} x {extent.height}, {extent.steps} steps"
    record.add("images per second, one stage after the other", rates[0], "1/s", note=what)
    record.add("images per second, decodes overlapping sampling", rates[1], "1/s", rates[0], "never slower",
               setting.met(rates[1] >= rates[0]), f"{overlapped.overlaps} of {count} decodes overlapped")  # fmt: skip
    record.add("decodes that overlapped", overlapped.overlaps, "", count, "all but the last",
               setting.met(overlapped.overlaps >= count - 1))  # fmt: skip
    worst = max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(alone.pixels, overlapped.pixels, strict=True))
    record.add("largest difference of pixels", worst, "of 255", None, "none", worst == 0)
    if setting.device != "cuda":
        record.skip("peak reserved memory, overlapping", "only on CUDA")
        return
    reserved_bytes = torch.cuda.max_memory_reserved()
    share = reserved_bytes / max(1, overlapped.planned_bytes)
    record.add("peak reserved memory, overlapping", share, "of the plan", 1.0, "never above", share <= 1.0,
               f"planned {overlapped.planned_bytes / 1e9:.2f} GB")  # fmt: skip


def make_images(jobs: EngineJobs, extent: Extent, texts: Sequence[Encoded], count: int, overlap: bool) -> Made:
    """Make `count` images; with `overlap`, each is decoded during the sampling of the next one."""
    engine, made = jobs.engine, Made()
    samplings = [jobs.sample_work(extent, seed=seed) for seed in range(count)]
    decoding = jobs.decode_work(extent)
    sample_tasks, decode_task = [jobs.task(work) for work in samplings], jobs.task(decoding)
    vae = {use.component for use in decode_task.uses}
    waiting: list[Future[tuple[Result, RunCost]]] = []
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for task, work in zip(sample_tasks, samplings, strict=True):
            latent, cost = engine.run(task, work, inputs_of(work, *texts), QUIET)
            made.planned_bytes = max(made.planned_bytes, cost.planned_bytes)
            inputs = inputs_of(decoding, latent)
            if overlap:
                ending = engine.begin(decode_task, decoding, inputs, QUIET)
                made.overlaps += bool(vae & engine.vram.leased)
                waiting.append(threads.submit(ending))
            else:
                done: Future[tuple[Result, RunCost]] = Future()
                done.set_result(engine.run(decode_task, decoding, inputs, QUIET))
                waiting.append(done)
        results = [each.result() for each in waiting]
    made.seconds = time.perf_counter() - started
    for result, cost in results:
        assert isinstance(result, ImagePixels)
        made.pixels.append(result.pixels_HWC)
        made.planned_bytes = max(made.planned_bytes, cost.planned_bytes)
    return made
