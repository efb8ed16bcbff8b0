"""Part "transfers": bandwidth of the link, loading SDXL from the page cache, and private host memory.

The comparison is diffusers' `from_single_file(...).to(device)` of the same file, with a configuration written here.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_jobs import EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.weights_loading import anonymous_bytes
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.specs.spec import Role

MIB = 1 << 20
TURNS = 5
#: of the bandwidth of the link that loading should reach; of diffusers' time that it may take; private memory
LEAST_SHARE, MOST_TIME, MOST_PRIVATE = 0.85, 0.5, 0.05


def run(record: Record, setting: Setting) -> None:
    """Measure the link, then loading."""
    device = torch_device(setting.device)
    link = 0.0
    with record.attempting("link"):
        link = measure_rates(record, device, (4 if setting.small else 512) * MIB)
    path = measured_file(record, setting, "sdxl")
    with record.attempting("pages of a file", least_seconds=5.0):
        measure_pinned_pages(record, device, path, link)
    with record.attempting("load", least_seconds=5.0):
        load_with_engine(record, setting, path, link)
    with record.attempting("load with diffusers", least_seconds=5.0):
        load_with_diffusers(record, setting, path)


def run_loading(record: Record, setting: Setting, model: str) -> None:
    """Load another model, until its first step, and compare with diffusers."""
    device = torch_device(setting.device)
    link = 0.0
    with record.attempting("link"):
        link = pinned_rate(device, (4 if setting.small else 512) * MIB)
        record.add("copy from pinned memory", link / 1e9, "GB/s")
    path = measured_file(record, setting, model)
    with record.attempting("load", least_seconds=setting.least(15.0)):
        load_with_engine(record, setting, path, link)
    with record.attempting("load with diffusers", least_seconds=setting.least(20.0)):
        load_with_diffusers(record, setting, path)


def measured_file(record: Record, setting: Setting, model: str) -> Path:
    """Return the file of a model, and record the seconds until it was written; 0 if an earlier part did it."""
    started = time.perf_counter()
    path = setting.model_file(model)
    record.add("writing the model", time.perf_counter() - started, "s", note=f"{path.stat().st_size / 1e9:.2f} GB")
    return path


def torch_device(kind: str) -> torch.device:
    """Return the first torch device of a kind."""
    if kind == "sim":
        open_engine("sim").close()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], object], turns: int = TURNS) -> float:
    """Return the median seconds of `work`, until the device has finished it."""
    seconds = []
    for _ in range(turns):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def pinned_rate(device: torch.device, size_bytes: int) -> float:
    """Return the bytes per second of a copy from pinned memory: the bandwidth of the link."""
    pinned = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return size_bytes / median_seconds(device, lambda: target.copy_(pinned, non_blocking=True))


def measure_rates(record: Record, device: torch.device, size_bytes: int) -> float:
    """Record the speed of copies from pinned and from pageable memory, by the loader, and by an uploader; returns that
    from pinned memory."""
    is_cuda = device.type == "cuda"
    pageable = torch.zeros(size_bytes, dtype=torch.uint8)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    link = pinned_rate(device, size_bytes)
    record.add("copy from pinned memory", link / 1e9, "GB/s")
    rate = size_bytes / median_seconds(device, lambda: target.copy_(pageable))
    record.add("copy from pageable memory", rate / 1e9, "GB/s", link / 1e9)
    parts = [part.clone() for part in pageable.chunk(16)]
    with TransferPipeline.open(device) as pipeline:
        rate = size_bytes / median_seconds(device, lambda: [pipeline.bring(part) for part in parts])
        is_met = rate >= LEAST_SHARE * link if is_cuda else None
        record.add("loader, 16 tensors", rate / 1e9, "GB/s", link / 1e9, f"at least {LEAST_SHARE} of it", is_met)
        uploader = pipeline.uploader()
        rate = size_bytes / median_seconds(device, lambda: [uploader.upload(part) for part in parts])
        record.add("streaming, 16 tensors", rate / 1e9, "GB/s", link / 1e9, f"at least {LEAST_SHARE} of it",
                   rate >= LEAST_SHARE * link if is_cuda else None)  # fmt: skip
        small = [part[: 64 << 10] for part in pageable.chunk(256)]
        small_bytes = sum(part.nbytes for part in small)
        for turn in ("first", "second"):
            rate = small_bytes / median_seconds(device, lambda: [uploader.upload(part) for part in small], 1)
            record.add(f"streaming, 256 tensors of at most 64 KiB, {turn} pass", rate / 1e9, "GB/s", link / 1e9)
        uploader.close()
        record.add("pinned memory", note=pipeline.why_unpinned or "as requested")
    return link


def measure_pinned_pages(record: Record, device: torch.device, path: Path, link: float) -> None:
    """Record what pinning the pages of a file in place would take and bring. Weights are in private mappings, whose
    pages the kernel would copy, so they are not pinned; this tells whether shared mappings are worth it."""
    file = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    with TransferPipeline.open(device) as pipeline:
        started = time.perf_counter()
        if not pipeline.pin(file):
            record.skip("copy from pages of a file", pipeline.why_unpinned or "only on CUDA")
            return
        record.add(
            "pinning the pages of a file", time.perf_counter() - started, "s", note=f"{file.nbytes / 1e9:.2f} GB"
        )
        rate = file.nbytes / median_seconds(device, lambda: pipeline.bring(file), 2)
        record.add("copy from pages of a file", rate / 1e9, "GB/s", link / 1e9)


def load_with_engine(record: Record, setting: Setting, path: Path, link: float) -> None:
    """Load the diffusion model, cold and again, and run one step."""
    engine, device = open_engine(setting.device), torch_device(setting.device)
    try:
        jobs = EngineJobs(path, engine)
        side = 64 if setting.small else 512
        work = jobs.sample_work(Extent(side, side, 1))
        texts = jobs.texts()
        before_bytes = anonymous_bytes()
        for turn in ("first", "second"):
            engine.vram.unload_all()
            synchronize(device)
            started = time.perf_counter()
            loaded_bytes = engine.load_weights(jobs.model, (Role.DIFFUSION_MODEL,))
            synchronize(device)  # copies may still be under way
            seconds = time.perf_counter() - started
            rate = loaded_bytes / seconds
            record.add(
                f"loading the diffusion model, {turn} time", rate / 1e9, "GB/s", link / 1e9,
                f"at least {LEAST_SHARE} of it", setting.met(rate >= LEAST_SHARE * link) if turn == "second" else None,
                f"{loaded_bytes / 1e9:.2f} GB in {seconds:.3f} s",
            )  # fmt: skip
            record.add(f"the first step after it, {turn} time", jobs.sample_seconds(work, texts), "s")
        private = max(0, anonymous_bytes() - before_bytes) / path.stat().st_size
        record.add("private host memory while loaded", private, "of the file", None, f"at most {MOST_PRIVATE}",
                   setting.met(private <= MOST_PRIVATE))  # fmt: skip
    finally:
        engine.close()


def load_with_diffusers(record: Record, setting: Setting, path: Path) -> None:
    """Load the diffusion model as diffusers does, and as this project does, from the start of the process's work."""
    if setting.small and path.stem.startswith("flux"):
        record.skip("open the file and load it", "diffusers reads Flux in its published width only")
        return
    device, config = torch_device(setting.device), setting.work / "config"
    module: Any = open_checkpoint(path).build(Role.DIFFUSION_MODEL).module
    module.save_config(config)
    kind: Any = type(module)  # diffusers is not typed
    dtype = next(weight.dtype for weight in module.parameters() if weight.dim() >= 2)
    del module

    def theirs() -> object:
        return kind.from_single_file(str(path), config=str(config), torch_dtype=dtype).to(device)

    def ours() -> object:
        module = open_checkpoint(path).build(Role.DIFFUSION_MODEL).module
        return [pipeline.bring(weight) for weight in module.state_dict().values()]

    baseline = median_seconds(device, theirs, 1)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with TransferPipeline.open(device) as pipeline:
        seconds = median_seconds(device, ours, 1)
    record.add("open the file and load it", seconds, "s", baseline, f"at most {MOST_TIME} of from_single_file",
               setting.met(seconds <= MOST_TIME * baseline))  # fmt: skip
