"""One GPU in one process: weights, patches, residency and the stages that run on them.

Knows torch, but not Ray, the scheduler or other GPUs. Importing this package imports nothing else, so that its
torch-free modules (`core`, `plan`) stay torch-free. The names below are imported on first use:

    from modelpool.pool import load_checkpoint  # see docs/guides/explicit_control.md
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "modelpool.pool":
    raise ImportError(f"import modelpool.pool, not {__name__}: a process must not hold two copies of one module")

if TYPE_CHECKING:
    from modelpool.pool.engine.explicit_component import ExplicitComponent
    from modelpool.pool.engine.explicit_control import LoadedModel, load_checkpoint
    from modelpool.pool.values.core.errors import DoesNotFit, ModelClosed, UserError
    from modelpool.pool.values.core.interrupt import Interrupt
    from modelpool.pool.values.core.stage_params import Stopped
    from modelpool.pool.weights.patcher.out_of_memory import OutOfHostMemory, RanOutOfMemory

__all__ = [
    "DoesNotFit",
    "ExplicitComponent",
    "Interrupt",
    "LoadedModel",
    "ModelClosed",
    "OutOfHostMemory",
    "RanOutOfMemory",
    "Stopped",
    "UserError",
    "load_checkpoint",
]

_HOMES = {
    "DoesNotFit": "modelpool.pool.values.core.errors",
    "ExplicitComponent": "modelpool.pool.engine.explicit_component",
    "Interrupt": "modelpool.pool.values.core.interrupt",
    "LoadedModel": "modelpool.pool.engine.explicit_control",
    "ModelClosed": "modelpool.pool.values.core.errors",
    "OutOfHostMemory": "modelpool.pool.weights.patcher.out_of_memory",
    "RanOutOfMemory": "modelpool.pool.weights.patcher.out_of_memory",
    "Stopped": "modelpool.pool.values.core.stage_params",
    "UserError": "modelpool.pool.values.core.errors",
    "load_checkpoint": "modelpool.pool.engine.explicit_control",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
