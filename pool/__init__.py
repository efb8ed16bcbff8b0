"""One GPU, one process: weights, patches, residency and the stages that run on them.

Knows torch. Does not know Ray, the scheduler or other GPUs. Importing this package imports nothing else,
so that its torch-free modules (`spec`, `errors`, `residency`) stay torch-free. The names below come when asked for:

    from pool import load_checkpoint  # explicit control of one checkpoint, see docs/explicit_control.md
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pool.errors import DoesNotFit, ModelClosed, UserError
    from pool.explicit_component import ExplicitComponent
    from pool.explicit_control import LoadedModel, load_checkpoint
    from pool.interrupt import Interrupt
    from pool.out_of_memory import OutOfHostMemory, RanOutOfMemory
    from pool.work import Stopped

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
    "DoesNotFit": "pool.errors",
    "ExplicitComponent": "pool.explicit_component",
    "Interrupt": "pool.interrupt",
    "LoadedModel": "pool.explicit_control",
    "ModelClosed": "pool.errors",
    "OutOfHostMemory": "pool.out_of_memory",
    "RanOutOfMemory": "pool.out_of_memory",
    "Stopped": "pool.work",
    "UserError": "pool.errors",
    "load_checkpoint": "pool.explicit_control",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
