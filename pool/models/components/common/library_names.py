"""Names of diffusers and transformers that only some of the supported versions have.

A name that the installed version lacks becomes a class that raises when it is constructed: models that do not need it
work, and one that does is refused with the version to install.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import Any

from torch import nn

from modelpool.pool.values.core.errors import NeedsNewerLibrary


def of_library(module_name: str, name: str, *older: str) -> Any:
    """Return the class or function `name` of a module of a library, or of the module of an `older` version; a stand-in
    that raises NeedsNewerLibrary when it is constructed or called, if none has it."""
    for each in (module_name, *older):
        with contextlib.suppress(AttributeError, ImportError):
            return getattr(importlib.import_module(each), name)
    return _stand_in(module_name, name)


def is_stand_in(found: Any) -> bool:
    """Whether the installed library lacks what `of_library` returned, or a base of it."""
    return isinstance(found, type) and any("_lacking" in vars(base) for base in found.__mro__)


def image_processor(name: str) -> Any:
    """Return the image processor of transformers that computes with numpy and Pillow: versions since 5.4 call it
    `name`Pil, and give the plain name to the one that needs torchvision."""
    import transformers

    if hasattr(transformers, f"{name}Pil"):
        return getattr(transformers, f"{name}Pil")
    return of_library("transformers", name)


def _stand_in(module_name: str, name: str) -> type[nn.Module]:
    library = module_name.partition(".")[0]

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        installed = importlib.import_module(library).__version__
        raise NeedsNewerLibrary(
            f"{name}: {library} {installed} does not have it; install a newer one (pip install -U {library})"
        )

    # callers add arguments of their own to the class arguments
    refuse.__signature__ = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)])  # type: ignore[attr-defined]
    return type(name, (nn.Module,), {"__init__": refuse, "__doc__": f"What {library} lacks.", "_lacking": name})
