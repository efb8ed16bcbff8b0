"""Parts "sampling ...": images per second of one model on the engine and in diffusers' pipeline, in the same dtype.

The pipeline gets the texts that the engine encoded, and its modules are those that the file is opened as, so that
neither a tokenizer nor a download is needed. Both run the same steps and decode the latent. Then batches, half of the
weights resident, and switches of LoRAs. Weights are random (`benchmarks.full_size`): the figures do not depend on them.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_size import FULL_SIZE, write_lora, write_model
from benchmarks.gpu.engine_jobs import EngineJobs, Extent, lora_ref, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import median_seconds, synchronize, torch_device
from modelpool.pool.core.stage_params import Encoded
from modelpool.pool.loading.build_checkpoint import open_checkpoint
from modelpool.pool.saving.pipelines import pipeline_facts, scheduler_facts
from modelpool.pool.specs.spec import Role

TURNS = 3
BATCHES = (2, 4)
#: images per second relative to diffusers; half resident relative to fully resident; a LoRA switch, seconds
LEAST_RATE, MOST_HALF, MOST_SWITCH_SECONDS = 1.0, 1.1, 0.3
#: the plan may be this much above the measured peak at the median
PLAN_MARGIN = 0.05


def run(record: Record, setting: Setting, model: str) -> None:
    """Measure one model of `benchmarks.full_size`."""
    facts = FULL_SIZE[model]
    is_cuda = setting.device == "cuda"
    extent = Extent(facts.width, facts.height, facts.steps, facts.frames)
    if setting.small:
        extent = Extent(64, 64, 2, 5 if facts.frames else 0)
    started = time.perf_counter()
    path = write_model(model, setting.models, setting.small)
    record.add("writing the model", time.perf_counter() - started, "s", note=f"{path.stat().st_size / 1e9:.2f} GB")
    engine = open_engine(setting.device)
    texts: tuple[Encoded, ...] = ()
    rate = resident_seconds = 0.0
    try:
        jobs = EngineJobs(path, engine)
        record.add("dtype", note=f"{extent.width} x {extent.height}, {extent.steps} steps, "
                   f"computes in {engine.patcher(jobs.model, Role.DIFFUSION_MODEL).compute_dtype}")  # fmt: skip
        with record.attempting("engine", least_seconds=5.0):
            texts = jobs.texts()
            rate, resident_seconds = measure_engine(record, jobs, extent, texts, is_cuda)
        with record.attempting("batches", least_seconds=10.0 if is_cuda else 0.0):
            measure_batches(record, jobs, extent, texts, resident_seconds)
        with record.attempting("switch of LoRAs", least_seconds=5.0):
            measure_loras(record, jobs, extent, texts, path)
    finally:
        engine.close()
    gc.collect()
    if not texts or setting.device == "sim":
        record.skip("diffusers pipeline", "no texts were encoded" if not texts else "it needs a device of its own")
        return
    dtype = torch.float32 if not is_cuda else torch.float16 if model in ("sd15", "sdxl") else torch.bfloat16
    compiled_rate = 0.0
    with record.attempting("diffusers pipeline", least_seconds=10.0 if is_cuda else 0.0):
        compiled_rate = measure_pipeline(
            record, path, torch_device(setting.device), dtype, extent, texts, rate, compiles=is_cuda
        )
    gc.collect()
    synchronize(torch_device(setting.device))
    if is_cuda:
        torch.cuda.empty_cache()
    with record.attempting("half resident", least_seconds=10.0 if is_cuda else 0.0):
        measure_half_resident(record, setting, path, extent, texts, resident_seconds)
    if not compiled_rate:
        record.skip("engine compiled", "there is no figure of diffusers compiled")
        return
    with record.attempting("engine compiled", least_seconds=30.0):
        measure_compiled(record, setting, path, extent, texts, compiled_rate)


def measure_engine(
    record: Record, jobs: EngineJobs, extent: Extent, texts: Sequence[Encoded], is_cuda: bool
) -> tuple[float, float]:
    """Return images per second, and the seconds of a sampling run, with everything resident."""
    work = jobs.sample_work(extent)
    latent = jobs.sample(work, texts)
    record.add("load the diffusion model", jobs.costs[-1].load_seconds, "s")
    jobs.decode(extent, latent)
    sampled, decoded, excesses = [], [], []
    for turn in range(TURNS):
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        latent = jobs.sample(replace(work, seed=turn), texts)
        cost = jobs.costs[-1]
        sampled.append(cost.run_seconds)
        if is_cuda:
            reserved_bytes = torch.cuda.max_memory_reserved()
            excesses.append(reserved_bytes / max(1, cost.planned_bytes))
        jobs.decode(extent, latent)
        decoded.append(jobs.costs[-1].run_seconds)
    seconds, decode_seconds = statistics.median(sampled), statistics.median(decoded)
    rate = 1 / (seconds + decode_seconds)
    record.add("sampling one step", 1000 * seconds / extent.steps, "ms")
    record.add("decoding", 1000 * decode_seconds, "ms")
    record.add("images per second, resident", rate, "1/s")
    if excesses:
        median = statistics.median(excesses)
        is_met = max(excesses) <= 1.0 and median >= 1 - PLAN_MARGIN
        record.add("peak reserved memory", median, "of the plan", 1.0, "never above, within 5%", is_met,
                   f"planned {cost.planned_bytes / 1e9:.2f} GB, most {max(excesses):.3f}")  # fmt: skip
    return rate, seconds


def measure_batches(
    record: Record, jobs: EngineJobs, extent: Extent, texts: Sequence[Encoded], alone_seconds: float
) -> None:
    """Record the seconds of a batch for each image."""
    for count in BATCHES:
        works = [jobs.sample_work(extent, seed=seed) for seed in range(count)]
        jobs.sample_together(works, texts)
        seconds = jobs.sample_together(works, texts) / count
        record.add(f"sampling in a batch of {count}, per image", seconds, "s", alone_seconds, "never slower",
                   seconds <= alone_seconds)  # fmt: skip


def measure_loras(record: Record, jobs: EngineJobs, extent: Extent, texts: Sequence[Encoded], path: Path) -> None:
    """Record the time of switches between LoRAs, one and four at once."""
    folder = path.parent / "loras"
    folder.mkdir(exist_ok=True)
    refs = [lora_ref(write_lora(folder / f"l{n}.safetensors", path, seed=n), 0.5) for n in range(4)]
    short = replace(extent, steps=2)
    for name, loras in (
        ("no LoRA", ()),
        ("the first LoRA, cold", (refs[0],)),
        ("another LoRA", (refs[1],)),
        ("the first again", (refs[0],)),
        ("four LoRAs", tuple(refs)),
        ("none again", ()),
    ):
        jobs.sample(jobs.sample_work(short, loras), texts)
        cost = jobs.costs[-1]
        seconds, note = cost.load_seconds, f"{cost.uploaded_bytes / 1e6:.0f} MB uploaded"
        record.add(f"switch to {name}", seconds, "s", None, f"under {MOST_SWITCH_SECONDS} s",
                   seconds <= MOST_SWITCH_SECONDS, note)  # fmt: skip


def diffusers_pipeline(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Return diffusers' pipeline with the diffusion model and the VAE of the file, without text encoders."""
    import diffusers

    checkpoint = open_checkpoint(path)
    facts, scheduler = pipeline_facts(checkpoint.family), scheduler_facts(checkpoint.family)
    kind = getattr(diffusers, facts.name)
    parts: dict[str, Any] = {name: None for name in inspect.signature(kind.__init__).parameters if name != "self"}
    switches = {name: False for name in ("requires_safety_checker",) if name in parts}
    defaults = ("add_watermarker", "force_zeros_for_empty_prompt", "boundary_ratio", "expand_timesteps", "is_distilled")
    parts = {name: value for name, value in parts.items() if name not in (*defaults, *switches)} | switches
    for role in (Role.DIFFUSION_MODEL, Role.VAE):
        parts[facts.folders[role]] = checkpoint.build(role).module.to(device, dtype)
    vae, latent = parts[facts.folders[Role.VAE]], checkpoint.latent
    # no tensor determines these; and the pipeline decodes in the same dtype as the engine, not in float32
    known = {"scaling_factor": latent.scaling_factor, "shift_factor": latent.shift, "force_upcast": False}
    vae.register_to_config(**{name: value for name, value in known.items() if name in vae.config})
    parts["scheduler"] = getattr(diffusers, scheduler.name)(**scheduler.settings)
    pipeline = kind(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def measure_pipeline(
    record: Record,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    extent: Extent,
    texts: Sequence[Encoded],
    rate: float,
    compiles: bool,
) -> float:
    """Record the images per second of the pipeline, and those of the engine relative to it. Return those of the
    compiled pipeline; 0 if it was not measured."""
    pipeline = diffusers_pipeline(path, device, dtype)
    call = call_of(pipeline, extent, texts, device, dtype)
    call()
    seconds = median_seconds(device, call, TURNS)
    record.add("images per second, diffusers eager", 1 / seconds, "1/s", note=str(dtype))
    record.add("engine relative to diffusers eager", rate * seconds, "", 1.0, f"at least {LEAST_RATE}",
               rate * seconds >= LEAST_RATE)  # fmt: skip
    if not compiles:
        record.skip("diffusers compiled", "only on CUDA")
        return 0.0
    if record.seconds_left < 60:
        record.skip("diffusers compiled", "out of time")
        return 0.0
    model = getattr(pipeline, "transformer", None) or pipeline.unet
    model.compile_repeated_blocks(fullgraph=True)
    started = time.perf_counter()
    call()
    record.add("diffusers compiled, first image", time.perf_counter() - started, "s")
    seconds = median_seconds(device, call, TURNS)
    record.add("images per second, diffusers compiled", 1 / seconds, "1/s")
    record.add("engine (eager) relative to diffusers compiled", rate * seconds, "", 1.0)
    return 1 / seconds


def measure_compiled(
    record: Record, setting: Setting, path: Path, extent: Extent, texts: Sequence[Encoded], compiled_rate: float
) -> None:
    """Record the images per second of an engine that compiles, relative to the compiled pipeline."""
    engine = open_engine(setting.device, compiles=True)
    try:
        jobs = EngineJobs(path, engine)
        work = jobs.sample_work(extent)
        started = time.perf_counter()
        jobs.decode(extent, jobs.sample(work, texts))
        record.add("engine compiled, first image", time.perf_counter() - started, "s")
        seconds = []
        for turn in range(TURNS):
            jobs.decode(extent, jobs.sample(replace(work, seed=turn), texts))
            seconds.append(sum(cost.run_seconds for cost in jobs.costs[-2:]))
        relative = 1 / statistics.median(seconds) / compiled_rate
        refused = {} if engine._tools.compiler is None else engine._tools.compiler.refused
        why = "; ".join(f"{kind.__name__} runs uncompiled: {reason}" for kind, reason in refused.items())
        record.add("engine compiled relative to diffusers compiled", relative, "", 1.0, f"at least {LEAST_RATE}",
                   relative >= LEAST_RATE and not why, why)  # fmt: skip
    finally:
        engine.close()


def call_of(pipeline: Any, extent: Extent, texts: Sequence[Encoded], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a function that makes one image from encoded texts."""
    accepted = inspect.signature(pipeline.__call__).parameters
    arguments: dict[str, Any] = {
        "width": extent.width,
        "height": extent.height,
        "num_inference_steps": extent.steps,
        "output_type": "np",
    }
    arguments |= {"num_frames": extent.frames} if extent.frames else {}
    for prefix, text in zip(("", "negative_"), texts, strict=False):
        arguments[f"{prefix}prompt_embeds"] = torch.from_numpy(text.context_LD)[None].to(device, dtype)
        if text.pooled_V is not None and f"{prefix}pooled_prompt_embeds" in accepted:
            arguments[f"{prefix}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V)[None].to(device, dtype)
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    return lambda: pipeline(**arguments)


def measure_half_resident(
    record: Record, setting: Setting, path: Path, extent: Extent, texts: Sequence[Encoded], resident_seconds: float
) -> None:
    """Record the time of sampling while half of the weights stream."""
    probe = open_engine(setting.device)
    try:
        jobs = EngineJobs(path, probe)
        budget_bytes = jobs.budget_for(jobs.sample_work(extent), 0.5)
    finally:
        probe.close()
    engine = open_engine(setting.device, budget_bytes)
    try:
        jobs = EngineJobs(path, engine)
        work = jobs.sample_work(extent)
        seconds = []
        for _ in range(2):
            jobs.sample(work, texts)
            seconds.append(jobs.costs[-1].run_seconds)
        cost = jobs.costs[-1]
        record.add("sampling with half of the weights resident", seconds[-1], "s", resident_seconds,
                   f"at most {MOST_HALF} of resident", seconds[-1] <= MOST_HALF * resident_seconds,
                   f"{cost.streamed_bytes / 1e9:.2f} GB streamed, first run {seconds[0]:.2f} s")  # fmt: skip
    finally:
        engine.close()
