"""A pool of diffusion models over the GPUs of a Ray cluster: what a driver script needs.

Everything comes when asked for; importing this module imports neither ray nor torch.

    from modelpool import GenerateRequest, ModelPool

    with ModelPool.start("configs/laptop.toml") as pool:
        jobs = pool.submit(GenerateRequest(model="shapes", prompt="a red circle", seed=s) for s in range(4))
        for image in jobs.images():
            print(image.path, image.worker, image.seconds)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.client import DeadlineTooSoon, ModelPool, PartialLora, WorkersFailed
    from actors.config import PoolConfig
    from actors.control_fields import Control
    from actors.jobs import Jobs
    from actors.outcomes import FilmResult, ImageResult, JobFailed, JobFailure, PoolLost, SoundResult
    from actors.picture_fields import Hires, Region
    from actors.requests import GenerateRequest, LoraChoice
    from pool.errors import UserError

__all__ = [
    "Control",
    "DeadlineTooSoon",
    "FilmResult",
    "GenerateRequest",
    "Hires",
    "ImageResult",
    "JobFailed",
    "JobFailure",
    "Jobs",
    "LoraChoice",
    "ModelPool",
    "PartialLora",
    "PoolConfig",
    "PoolLost",
    "Region",
    "SoundResult",
    "UserError",
    "WorkersFailed",
]

_HOMES = {
    "Control": "actors.control_fields",
    "Hires": "actors.picture_fields",
    "Region": "actors.picture_fields",
    "GenerateRequest": "actors.requests",
    "FilmResult": "actors.outcomes",
    "ImageResult": "actors.outcomes",
    "SoundResult": "actors.outcomes",
    "JobFailed": "actors.outcomes",
    "JobFailure": "actors.outcomes",
    "Jobs": "actors.jobs",
    "LoraChoice": "actors.requests",
    "ModelPool": "actors.client",
    "PoolConfig": "actors.config",
    "PartialLora": "actors.client",
    "DeadlineTooSoon": "actors.client",
    "PoolLost": "actors.outcomes",
    "UserError": "pool.errors",
    "WorkersFailed": "actors.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
