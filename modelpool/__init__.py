"""A pool of diffusion models over the GPUs of a Ray cluster: the public API of a driver script.

Names are imported lazily: importing this package imports neither ray nor torch.

    from modelpool import GenerateRequest, ModelPool

    with ModelPool.start("configs/laptop.toml") as pool:
        for image in pool.submit(GenerateRequest(model="shapes", prompt="a red circle", seed=s) for s in range(4)):
            print(image.path, image.worker, image.seconds)
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# In a checkout the packages are next to this folder, and it contains links to them. A checkout without links (some
# systems and archives drop them) finds them through this entry; an installed wheel has them in this folder.
if not (Path(__file__).parent / "pool" / "__init__.py").is_file():
    __path__.append(str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from modelpool.actors.client.client import DeadlineTooSoon, ModelPool, PartialLora, WorkersFailed
    from modelpool.actors.client.jobs import JobHandle, Jobs
    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.http.read_requests import request_like
    from modelpool.actors.outputs.results.outcomes import (
        AudioResult,
        ImageResult,
        JobFailed,
        JobFailure,
        PoolLost,
        VideoResult,
    )
    from modelpool.actors.outputs.results.previews import ImagePreview
    from modelpool.actors.request.control_fields import Control
    from modelpool.actors.request.image_fields import Hires, Region
    from modelpool.actors.request.requests import GenerateRequest, LoraChoice
    from modelpool.pool.inference.operations.operation import Size
    from modelpool.pool.inference.operations.own_nodes import CustomNode, node_setting
    from modelpool.pool.values.core.errors import UserError

__all__ = [
    "AudioResult",
    "Control",
    "CustomNode",
    "DeadlineTooSoon",
    "GenerateRequest",
    "Hires",
    "ImagePreview",
    "ImageResult",
    "JobFailed",
    "JobFailure",
    "JobHandle",
    "Jobs",
    "LoraChoice",
    "ModelPool",
    "PartialLora",
    "PoolConfig",
    "PoolLost",
    "Region",
    "Size",
    "UserError",
    "VideoResult",
    "WorkersFailed",
    "node_setting",
    "request_like",
]

_HOMES = {
    "CustomNode": "modelpool.pool.inference.operations.own_nodes",
    "node_setting": "modelpool.pool.inference.operations.own_nodes",
    "Size": "modelpool.pool.inference.operations.operation",
    "Control": "modelpool.actors.request.control_fields",
    "Hires": "modelpool.actors.request.image_fields",
    "Region": "modelpool.actors.request.image_fields",
    "GenerateRequest": "modelpool.actors.request.requests",
    "VideoResult": "modelpool.actors.outputs.results.outcomes",
    "ImagePreview": "modelpool.actors.outputs.results.previews",
    "ImageResult": "modelpool.actors.outputs.results.outcomes",
    "AudioResult": "modelpool.actors.outputs.results.outcomes",
    "JobFailed": "modelpool.actors.outputs.results.outcomes",
    "JobFailure": "modelpool.actors.outputs.results.outcomes",
    "JobHandle": "modelpool.actors.client.jobs",
    "Jobs": "modelpool.actors.client.jobs",
    "LoraChoice": "modelpool.actors.request.requests",
    "ModelPool": "modelpool.actors.client.client",
    "PoolConfig": "modelpool.actors.config.config",
    "PartialLora": "modelpool.actors.client.client",
    "DeadlineTooSoon": "modelpool.actors.client.client",
    "PoolLost": "modelpool.actors.outputs.results.outcomes",
    "UserError": "modelpool.pool.values.core.errors",
    "WorkersFailed": "modelpool.actors.client.client",
    "request_like": "modelpool.actors.http.read_requests",
}

#: deprecated names, with their replacements
_RENAMED = {"FilmResult": "VideoResult", "SoundResult": "AudioResult"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"modelpool.{name} is deprecated; use modelpool.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
