"""Parts "sampling ...", "compiled ..." and "more ...": one model on the engine and in diffusers' pipeline.

The pipeline gets the texts that the engine encoded, and its modules are those that the file is opened as, so that
neither a tokenizer nor a download is needed. Both run the same steps and decode the latent to bytes on the host, in the
same dtype, timed by the wall clock. Weights are random (`benchmarks.full_size`): the figures do not depend on them.

- "sampling": both uncompiled, the device memory of a run, and switches of LoRAs.
- "compiled": both with compiled blocks.
- "more": batches, half of the weights resident, and other settings of the engine.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.full_size import FULL_SIZE, write_lora
from benchmarks.gpu.engine_jobs import EngineJobs, Extent, lora_ref, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import measured_file, median_seconds, synchronize, torch_device
from modelpool.pool.engine.engine import Engine
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.pipelines import pipeline_facts, scheduler_facts
from modelpool.pool.values.core.stage_params import Encoded, LoraRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.layer_choice import Products
from modelpool.pool.weights.patcher.weight_form import MemoryFormat

TURNS = 3
BATCHES = (2, 4)
#: images per second relative to diffusers, and with both compiled; half resident relative to fully resident
LEAST_RATE, LEAST_COMPILED_RATE, MOST_HALF = 1.0, 1 / 1.02, 1.1
#: compiling cannot be interrupted: it is not begun with less time, on any device
COMPILE_SECONDS = 45.0
#: of the plan, at the median, that the measured peak should be
LEAST_OF_PLAN = 0.95
#: models for which the names in the LoRAs of `write_lora` are those of published files, so that diffusers reads them
LORA_MODELS = ("sdxl", "flux")
#: of the engine that are off by default, by name; the first is the default
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default settings": {},
    "convolution weights with channels last": {"memory_format": MemoryFormat.CHANNELS_LAST},
    "attention kernels by measurement": {"measures_attention": True},
    "CUDA graphs": {"cuda_graphs": True},
    "CUDA graphs of compiled blocks": {"cuda_graphs": True, "compiles": True},
    "a LoRA at run time": {"loras_at_run_time": True},
}
Texts = Sequence[Encoded]


def run(record: Record, setting: Setting, model: str) -> None:
    """Compare one model of `benchmarks.full_size` with diffusers, uncompiled."""
    path, extent, dtype = opened(record, setting, model)
    engine = open_engine(setting.device)
    try:
        jobs = EngineJobs(path, engine)
        record.add("dtype", note=f"{extent.width} x {extent.height}, {extent.steps} steps, "
                   f"computes in {engine.patcher(jobs.model, Role.DIFFUSION_MODEL).compute_dtype}")  # fmt: skip
        texts = jobs.texts()
        with record.attempting("engine", least_seconds=5.0):
            rate = measure_engine(record, jobs, extent, texts)
    finally:
        engine.close()
    _empty(setting)
    if model.endswith("fp8"):
        with record.attempting("products", least_seconds=setting.least(10.0)):
            measure_products(record, setting, path, extent, texts, rate)
    if setting.device == "sim":
        record.skip("engine relative to diffusers eager", "diffusers needs a device of its own")
    else:
        with record.attempting("diffusers pipeline", least_seconds=setting.least(10.0)):
            measure_pipeline(record, setting, path, dtype, extent, texts, rate)
        _empty(setting)
    engine = open_engine(setting.device)
    try:
        jobs = EngineJobs(path, engine)
        with record.attempting("memory of a run", least_seconds=setting.least(5.0)):
            measure_memory(record, setting, jobs, extent, texts)
        with record.attempting("switch of LoRAs", least_seconds=setting.least(5.0)):
            measure_loras(record, setting, jobs, extent, texts, path)
    finally:
        engine.close()
    _empty(setting)
    if setting.device != "sim" and model in LORA_MODELS:
        with record.attempting("LoRAs in diffusers", least_seconds=setting.least(10.0)):
            measure_pipeline_loras(record, setting, path, dtype)


def run_compiled(record: Record, setting: Setting, model: str) -> None:
    """Compare one model with diffusers, both with compiled blocks."""
    if setting.device == "sim":
        record.skip("engine compiled relative to diffusers compiled", "nothing is compiled on the simulated device")
        return
    path, extent, dtype = opened(record, setting, model)
    texts = _texts(setting, path)
    rate = 0.0
    with record.attempting("diffusers compiled", least_seconds=COMPILE_SECONDS * setting.slowness):
        rate = measure_compiled_pipeline(record, setting, path, dtype, extent, texts)
    _empty(setting)
    with record.attempting("engine compiled", least_seconds=COMPILE_SECONDS * setting.slowness):
        measure_compiled(record, setting, path, extent, texts, rate)


def run_more(record: Record, setting: Setting, model: str) -> None:
    """Measure batches, partly resident weights and other settings of one model."""
    path, extent, dtype = opened(record, setting, model)
    engine = open_engine(setting.device)
    try:
        jobs = EngineJobs(path, engine)
        texts = jobs.texts()
        with record.attempting("batches", least_seconds=setting.least(10.0)):
            resident_seconds = measure_batches(record, setting, jobs, extent, texts)
    finally:
        engine.close()
    _empty(setting)
    with record.attempting("half resident", least_seconds=setting.least(10.0)):
        measure_half_resident(record, setting, path, dtype, extent, texts, resident_seconds)
    _empty(setting)
    measure_settings(record, setting, path, extent, texts, resident_seconds)


def measure_settings(
    record: Record, setting: Setting, path: Path, extent: Extent, texts: Texts, default_seconds: float
) -> None:
    """Record the seconds of a sampling run with each setting that is off by default, how far its latent differs, and,
    with LoRAs applied at run time, those of a switch."""
    expected: np.ndarray[Any, np.dtype[np.float32]] | None = None
    for name, chosen in SETTINGS.items():
        if chosen.get("compiles") and setting.device != "cuda":
            record.skip(f"sampling, {name}", "only on CUDA")
            continue
        with record.attempting(name, least_seconds=setting.least(5 * default_seconds + 5)):
            engine = open_engine(setting.device, **chosen)
            try:
                jobs = EngineJobs(path, engine)
                loras: tuple[LoraRef, ...] = ()
                if chosen.get("loras_at_run_time"):
                    loras = tuple(_loras(setting, path, 2)[:1])
                work = jobs.sample_work(extent, loras)
                jobs.sample(work, texts)
                jobs.sample(work, texts)  # kernels are chosen, graphs are captured at the second use
                seconds = statistics.median(jobs.sample_seconds(work, texts) for _ in range(TURNS))
                latent = jobs.sample(work, texts).samples_CHW.astype(np.float32)
                expected = latent if expected is None else expected
                if chosen.get("cuda_graphs"):
                    record_captures(record, engine, name)
                note = ""
                if loras:
                    switched = jobs.sample_work(extent, tuple(_loras(setting, path, 2)[1:]))
                    first = jobs.sample_seconds(switched, texts)
                    note = f"a switch takes {max(0.0, first - jobs.sample_seconds(switched, texts)):.3f} s"
                else:
                    difference = np.sqrt(np.mean((latent - expected) ** 2)) / np.sqrt(np.mean(expected**2))
                    note = f"the latent differs by {float(difference):.2g} of its size"
                record.add(f"sampling, {name}", seconds, "s", default_seconds, "", None, note)
            finally:
                engine.close()
        _empty(setting)


def record_captures(record: Record, engine: Engine, name: str) -> None:
    """Record how many calls were captured, and why the device refused one."""
    store = engine._tools.graphs
    if store is None:
        record.skip(f"captures, {name}", "only on CUDA")
        return
    record.add(f"captures, {name}", len(store), "graphs", None, "at least one, without a refusal",
               len(store) > 0 and not store.refusal, store.refusal)  # fmt: skip


def measure_engine(record: Record, jobs: EngineJobs, extent: Extent, texts: Texts) -> float:
    """Return images per second with everything resident."""
    work = jobs.sample_work(extent)
    latent = jobs.sample(work, texts)
    record.add("load the diffusion model", jobs.costs[-1].load_seconds, "s")
    jobs.decode(extent, latent)
    whole, sampled, decoded = [], [], []
    for turn in range(TURNS):
        whole.append(jobs.image_seconds(extent, texts, turn))
        sampled.append(jobs.costs[-2].run_seconds)
        decoded.append(jobs.costs[-1].run_seconds)
    record.add("sampling one step", 1000 * statistics.median(sampled) / extent.steps, "ms")
    record.add("decoding", 1000 * statistics.median(decoded), "ms")
    # a GPU computes so small an image faster than the host launches its kernels, of which there are as many
    tiny = replace(extent, width=64, height=64, frames=min(extent.frames, 5))
    jobs.sample(jobs.sample_work(tiny), texts)
    jobs.sample(jobs.sample_work(tiny, seed=1), texts)
    record.add("launching one step", 1000 * jobs.costs[-1].run_seconds / tiny.steps, "ms", note="64 x 64 pixels")
    rate = 1 / statistics.median(whole)
    record.add("images per second, resident", rate, "1/s")
    return rate


def measure_memory(record: Record, setting: Setting, jobs: EngineJobs, extent: Extent, texts: Texts) -> None:
    """Record the memory that torch reserved for a run, relative to what its plan allowed."""
    if setting.device != "cuda":
        record.skip("peak reserved memory", "only on CUDA")
        return
    latent = jobs.sample(jobs.sample_work(extent), texts)
    for name, work in (
        ("encoding texts", jobs.texts),
        ("sampling", lambda: jobs.sample(jobs.sample_work(extent, seed=1), texts)),
        ("decoding", lambda: jobs.decode(extent, latent)),
    ):
        work()  # everything is resident, and kernels are chosen
        synchronize(torch_device(setting.device))
        torch.cuda.empty_cache()  # what other runs left is not of this one
        torch.cuda.reset_peak_memory_stats()
        work()
        cost, reserved_bytes = jobs.costs[-1], torch.cuda.max_memory_reserved()
        share = reserved_bytes / max(1, cost.planned_bytes)
        record.add(f"peak reserved memory, {name}", share, "of the plan", 1.0,
                   f"never above, at least {LEAST_OF_PLAN} at the median", share <= 1.0,
                   f"planned {cost.planned_bytes / 1e9:.2f} GB, allocated {cost.peak_bytes / 1e9:.2f} GB")  # fmt: skip


def measure_batches(record: Record, setting: Setting, jobs: EngineJobs, extent: Extent, texts: Texts) -> float:
    """Record the seconds of a batch for each image; returns those of one image alone."""
    jobs.sample(jobs.sample_work(extent), texts)
    alone = statistics.median(jobs.sample_seconds(jobs.sample_work(extent, seed=turn), texts) for turn in range(TURNS))
    record.add("sampling alone", alone, "s")
    for count in BATCHES:
        with record.attempting(f"batch of {count}", least_seconds=setting.least(3 * alone * count)):
            works = [jobs.sample_work(extent, seed=seed) for seed in range(count)]
            jobs.sample_together(works, texts)
            started = time.perf_counter()
            jobs.sample_together(works, texts)
            seconds = (time.perf_counter() - started) / count
            record.add(f"sampling in a batch of {count}, per image", seconds, "s", alone, "never slower",
                       setting.met(seconds <= alone))  # fmt: skip
    return alone


def measure_loras(record: Record, setting: Setting, jobs: EngineJobs, extent: Extent, texts: Texts, path: Path) -> None:
    """Record how much longer a run takes that switches LoRAs than the same run after it, with one and four at once: no
    longer than a step of the run, except for a LoRA that is read from its file."""
    refs = _loras(setting, path, 4)
    short = replace(extent, steps=2)
    for name, loras in (
        ("no LoRA", ()),
        ("the first LoRA, cold", (refs[0],)),
        ("another LoRA", (refs[1],)),
        ("the first again", (refs[0],)),
        ("four LoRAs", tuple(refs)),
        ("none again", ()),
    ):
        work = jobs.sample_work(short, loras)
        with_switch = jobs.sample_seconds(work, texts)
        cost = jobs.costs[-1]
        without = jobs.sample_seconds(work, texts)
        seconds, step = max(0.0, with_switch - without), without / short.steps
        goal, is_met = ("", None) if name.endswith("cold") else ("under one step", setting.met(seconds <= step))
        record.add(
            f"switch to {name}", seconds, "s", step, goal, is_met, f"{cost.uploaded_bytes / 1e6:.0f} MB uploaded"
        )


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
    record: Record, setting: Setting, path: Path, dtype: torch.dtype, extent: Extent, texts: Texts, rate: float
) -> None:
    """Record the images per second of the pipeline, and those of the engine relative to it."""
    device = torch_device(setting.device)
    call = call_of(diffusers_pipeline(path, device, dtype), extent, texts, device, dtype)
    call()
    seconds = median_seconds(device, call, TURNS)
    record.add("images per second, diffusers eager", 1 / seconds, "1/s", note=str(dtype))
    record.add("engine relative to diffusers eager", rate * seconds, "", 1.0, f"at least {LEAST_RATE}",
               setting.met(rate * seconds >= LEAST_RATE))  # fmt: skip


def measure_pipeline_loras(record: Record, setting: Setting, path: Path, dtype: torch.dtype) -> None:
    """Record how long the pipeline takes to replace a LoRA in place, and to unload one and load another."""
    if importlib.util.find_spec("peft") is None:
        record.skip("LoRAs in diffusers", "peft is not installed")
        return
    device = torch_device(setting.device)
    pipeline = diffusers_pipeline(path, device, dtype)
    files = sorted((setting.work / "loras").glob("*.safetensors"))
    load = lambda file, **how: pipeline.load_lora_weights(str(file), adapter_name="one", **how)  # noqa: E731
    load(files[0])
    for name, work in (
        ("diffusers hotswap of a LoRA", lambda: load(files[1], hotswap=True)),
        ("diffusers unload and load of a LoRA", lambda: (pipeline.unload_lora_weights(), load(files[2]))),
    ):
        with record.attempting(name):
            record.add(name, median_seconds(device, work, 1), "s")


def measure_compiled_pipeline(
    record: Record, setting: Setting, path: Path, dtype: torch.dtype, extent: Extent, texts: Texts
) -> float:
    """Return the images per second of the pipeline with compiled blocks."""
    device = torch_device(setting.device)
    pipeline = diffusers_pipeline(path, device, dtype)
    model = getattr(pipeline, "transformer", None) or pipeline.unet
    model.compile_repeated_blocks(fullgraph=True)
    call = call_of(pipeline, extent, texts, device, dtype)
    started = time.perf_counter()
    call()
    record.add("diffusers compiled, first image", time.perf_counter() - started, "s")
    rate = 1 / median_seconds(device, call, TURNS)
    record.add("images per second, diffusers compiled", rate, "1/s", note=str(dtype))
    return rate


def measure_compiled(
    record: Record, setting: Setting, path: Path, extent: Extent, texts: Texts, compiled_rate: float
) -> None:
    """Record the images per second of an engine that compiles, relative to the compiled pipeline (0: not measured)."""
    engine = open_engine(setting.device, compiles=True)
    try:
        jobs = EngineJobs(path, engine)
        started = time.perf_counter()
        jobs.image_seconds(extent, texts, 7)
        record.add("engine compiled, first image", time.perf_counter() - started, "s")
        rate = 1 / statistics.median(jobs.image_seconds(extent, texts, turn) for turn in range(TURNS))
        why = why_uncompiled(engine)
        record.add("images per second, engine compiled", rate, "1/s", note=why)
        if compiled_rate:
            relative = rate / compiled_rate
            record.add("engine compiled relative to diffusers compiled", relative, "", 1.0,
                       f"at least {LEAST_COMPILED_RATE:.3f}", setting.met(relative >= LEAST_COMPILED_RATE and not why),
                       why)  # fmt: skip
        folder = setting.work / "loras"
        folder.mkdir(exist_ok=True)
        lora = lora_ref(write_lora(folder / "switched.safetensors", path, seed=9), 0.5)
        work = jobs.sample_work(extent, (lora,))
        first, again = jobs.sample_seconds(work, texts), jobs.sample_seconds(work, texts)
        step = again / extent.steps
        record.add("a switch of LoRAs with compiled blocks", max(0.0, first - again), "s", step,
                   "under one step: nothing is compiled again", setting.met(first - again <= step))  # fmt: skip
    finally:
        engine.close()


def why_uncompiled(engine: Engine) -> str:
    """Return why blocks of an engine that compiles run uncompiled; empty if they were compiled."""
    compiler = engine._tools.compiler
    if compiler is None:
        return "the engine does not compile"
    reasons = [f"{kind.__name__} runs uncompiled: {reason}" for kind, reason in compiler.refused.items()]
    return "; ".join(reasons) or ("" if compiler._compiled else "no block was compiled: weights are not in this dtype")


def call_of(
    pipeline: Any, extent: Extent, texts: Texts, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """Return a function that makes one image from encoded texts, as bytes on the host."""
    accepted = inspect.signature(pipeline.__call__).parameters
    arguments: dict[str, Any] = {
        "width": extent.width,
        "height": extent.height,
        "num_inference_steps": extent.steps,
        "output_type": "pt",
    }
    arguments |= {"num_frames": extent.frames} if extent.frames else {}
    for prefix, text in zip(("", "negative_"), texts, strict=False):
        arguments[f"{prefix}prompt_embeds"] = torch.from_numpy(text.context_LD)[None].to(device, dtype)
        if text.pooled_V is not None and f"{prefix}pooled_prompt_embeds" in accepted:
            arguments[f"{prefix}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V)[None].to(device, dtype)
    arguments = {name: value for name, value in arguments.items() if name in accepted}

    def call() -> object:
        made = pipeline(**arguments)
        pixels = made.frames if extent.frames else made.images
        return (pixels * 255).round().to(torch.uint8).cpu()

    return call


def measure_half_resident(
    record: Record,
    setting: Setting,
    path: Path,
    dtype: torch.dtype,
    extent: Extent,
    texts: Texts,
    resident_seconds: float,
) -> None:
    """Record the time of sampling while half of the weights stream, and that of diffusers with group offloading."""
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
        seconds = [jobs.sample_seconds(work, texts) for _ in range(2)]
        cost = jobs.costs[-1]
        record.add("sampling with half of the weights resident", seconds[-1], "s", resident_seconds,
                   f"at most {MOST_HALF} of resident", setting.met(seconds[-1] <= MOST_HALF * resident_seconds),
                   f"{cost.streamed_bytes / 1e9:.2f} GB streamed, first run {seconds[0]:.2f} s")  # fmt: skip
    finally:
        engine.close()
    if setting.device != "cuda":
        record.skip("group offloading of diffusers", "only on CUDA")
        return
    _empty(setting)
    with record.attempting("group offloading of diffusers", least_seconds=setting.least(15.0)):
        device = torch_device(setting.device)
        pipeline = diffusers_pipeline(path, torch.device("cpu"), dtype)
        model = getattr(pipeline, "transformer", None) or pipeline.unet
        model.enable_group_offload(device, torch.device("cpu"), offload_type="leaf_level", use_stream=True)
        pipeline.vae.to(device)
        call = call_of(pipeline, extent, texts, device, dtype)
        call()
        theirs = median_seconds(device, call, 1)
        record.add("half resident, relative to group offloading with streams, with its decoding", seconds[-1], "s",
                   theirs, "faster", setting.met(seconds[-1] < theirs))  # fmt: skip


def measure_products(record: Record, setting: Setting, path: Path, extent: Extent, texts: Texts, rate: float) -> None:
    """Record the images per second with products of quantized inputs, relative to exact ones, and how far the latents
    differ."""
    latents = []
    for products in (Products.EXACT, Products.AUTO):
        engine = open_engine(setting.device, products=products)
        try:
            jobs = EngineJobs(path, engine)
            latents.append(jobs.sample(jobs.sample_work(extent), texts).samples_CHW.astype(np.float32))
            if products is Products.AUTO:
                jobs.image_seconds(extent, texts, 0)
                found = 1 / statistics.median(jobs.image_seconds(extent, texts, turn) for turn in range(TURNS))
        finally:
            engine.close()
        _empty(setting)
    difference = float(np.sqrt(np.mean((latents[1] - latents[0]) ** 2)) / np.sqrt(np.mean(latents[0] ** 2)))
    record.add('images per second, products = "auto"', found, "1/s", rate, "never slower", setting.met(found >= rate),
               f"latents differ by {difference:.3f} of their size")  # fmt: skip


def opened(record: Record, setting: Setting, model: str) -> tuple[Path, Extent, torch.dtype]:
    """Return the file of a model, what a run of it makes, and the dtype of diffusers' pipeline."""
    facts = FULL_SIZE[model]
    extent = Extent(facts.width, facts.height, facts.steps, facts.frames)
    if setting.small:
        extent = Extent(64, 64, 2, 5 if facts.frames else 0)
    is_half = model in ("sd15", "sdxl")
    dtype = torch.float32 if setting.device != "cuda" else torch.float16 if is_half else torch.bfloat16
    return measured_file(record, setting, model), extent, dtype


def _loras(setting: Setting, path: Path, count: int) -> list[LoraRef]:
    """Return LoRAs for a model; each file is written once."""
    folder = setting.work / "loras"
    folder.mkdir(exist_ok=True)
    files = [folder / f"l{number}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        if not file.exists():
            write_lora(file, path, seed=number)
    return [lora_ref(file, 0.5) for file in files]


def _texts(setting: Setting, path: Path) -> tuple[Encoded, ...]:
    engine = open_engine(setting.device)
    try:
        return EngineJobs(path, engine).texts()
    finally:
        engine.close()
        _empty(setting)


def _empty(setting: Setting) -> None:
    """Free what the last measurement left on the device."""
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
