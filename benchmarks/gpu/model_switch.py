"""Part "switch": two models in host memory take turns on a device that has room for one."""

from __future__ import annotations

from benchmarks.full_size import FULL_SIZE, write_model
from benchmarks.gpu.engine_jobs import EngineJobs, Extent, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import MIB, pinned_rate, torch_device
from modelpool.pool.specs.spec import Role

MODELS = ("sdxl", "flux")
TURNS = 3
#: of the time that the bytes take on the link
MOST_TIME = 1.2


def run(record: Record, setting: Setting) -> None:
    """Switch between SDXL and Flux."""
    paths = [write_model(name, setting.models, setting.small) for name in MODELS]
    side = 64 if setting.small else 512
    extent = Extent(side, side, 1)
    # not the rate that the engine measures, which is that of its own copies
    link = pinned_rate(torch_device(setting.device), (4 if setting.small else 512) * MIB)
    probe = open_engine(setting.device)
    try:
        each = [EngineJobs(path, probe) for path in paths]
        budget_bytes = max(jobs.budget_for(jobs.sample_work(extent), 1.05) for jobs in each)
    finally:
        probe.close()
    engine = open_engine(setting.device, budget_bytes)
    try:
        each = [EngineJobs(path, engine) for path in paths]
        texts = [jobs.texts() for jobs in each]
        for turn in range(TURNS):
            for name, jobs, text in zip(MODELS, each, texts, strict=True):
                with record.attempting(name, least_seconds=2.0):
                    jobs.sample(jobs.sample_work(extent), text)
                    cost = jobs.costs[-1]
                    bound = cost.uploaded_bytes / link
                    is_met = cost.load_seconds <= MOST_TIME * bound if setting.device == "cuda" and turn else None
                    weight_bytes = jobs.catalog.components(jobs.model)[Role.DIFFUSION_MODEL].weight_bytes
                    record.add(
                        f"turn {turn + 1}, {FULL_SIZE[name].title}", cost.load_seconds, "s", bound,
                        f"at most {MOST_TIME} of the link's time", is_met,
                        f"{cost.uploaded_bytes / 1e9:.2f} of {weight_bytes / 1e9:.2f} GB",
                    )  # fmt: skip
    finally:
        engine.close()
