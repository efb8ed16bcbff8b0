"""Objects inside a module, replaced for the time of one run.

Knows attribute paths, not what is behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pool.errors import unknown_name, unusable_field


def object_at(module: nn.Module, path: str) -> Any:
    """What is at `path` in `module`: attributes and indices joined by dots, "down_blocks.0.resnets". Raises
    UnknownName."""
    found: Any = module
    for name in path.split("."):
        try:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        except (AttributeError, IndexError, TypeError, KeyError) as error:
            known = [n for n, _ in module.named_modules() if n]
            raise unknown_name(f"object in {type(module).__name__}", path, known) from error
    return found


@contextmanager
def objects_replaced(module: nn.Module, patches: Mapping[str, Any]) -> Iterator[None]:
    """The objects at the paths of `patches` are the given ones inside the block, exactly the former ones after it.

    Modules that are put in are used as they are: their weights must be where, and in the dtype that, the run computes.
    Raises UnknownName for a path that leads nowhere and UnusableField for a parameter or buffer, which are patched as
    weights; nothing is replaced then.
    """
    places = [_place(module, path) for path in patches]
    with ExitStack() as undo:
        for (owner, name), value in zip(places, patches.values(), strict=True):
            undo.callback(_restorer(owner, name))
            if isinstance(owner, nn.Module) and not isinstance(value, nn.Module):
                owner._modules.pop(name, None)  # a module refuses a plain object in the place of a module
            setattr(owner, name, value)
        yield


def _place(module: nn.Module, path: str) -> tuple[Any, str]:
    if isinstance(object_at(module, path), Tensor):
        raise unusable_field("object patch", path, "an object that is no weight; weights have patches of their own")
    owner, _, name = path.rpartition(".")
    return (object_at(module, owner) if owner else module), name


def _restorer(owner: Any, name: str) -> Callable[[], None]:
    """Puts the attribute `name` of `owner` back as it is now, and touches no other."""
    tables = [owner._modules, owner.__dict__] if isinstance(owner, nn.Module) else [owner.__dict__]
    holder = next((table for table in tables if name in table), None)
    former, order = (None, ()) if holder is None else (holder[name], tuple(holder))

    def restore() -> None:
        for table in tables:
            table.pop(name, None)
        if holder is not None:
            holder[name] = former
            if holder is not owner.__dict__:  # the order of modules is the order of a sequence
                for key in (k for k in order if k in holder):
                    holder[key] = holder.pop(key)

    return restore
