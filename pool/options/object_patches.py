"""Objects inside a module, replaced for the time of one run.

Knows attribute paths, not what is behind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelpool.pool.core.errors import unknown_name, unusable_field


def object_at(module: nn.Module, path: str) -> Any:
    """What is at `path` in `module`: attributes and indices joined by dots, "down_blocks.0.resnets". Raises
    UnknownName."""
    return patched_object_at(module, path, {})


def patched_object_at(module: nn.Module, path: str, patches: Mapping[str, Any]) -> Any:
    """What `object_at` would find while `patches` are in. Raises UnknownName.

    The walk starts at the longest path of `patches` that `path` is or goes through.
    """
    found: Any = module
    names = path.split(".")
    begin = next((n for n in range(len(names), 0, -1) if ".".join(names[:n]) in patches), 0)
    if begin:
        found = patches[".".join(names[:begin])]
    for name in names[begin:]:
        try:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        except (AttributeError, IndexError, TypeError, KeyError) as error:
            known = [n for n, _ in module.named_modules() if n]
            raise unknown_name(f"object in {type(module).__name__}", path, known) from error
    return found


@contextmanager
def objects_replaced(module: nn.Module, patches: Mapping[str, Any]) -> Iterator[None]:
    """The objects at the paths of `patches` are the given ones inside the block, exactly the former ones after it.

    Shorter paths first, whatever the order of `patches`: "norm.eps" is the attribute of what is put in at "norm".
    Modules that are put in are used as they are: their weights must be where, and in the dtype that, the run computes.
    Raises UnknownName for a path that leads nowhere and UnusableField for what cannot be replaced: a parameter or
    buffer, which are patched as weights, a property, an entry of a tuple. Nothing is replaced then.
    """
    with ExitStack() as undo:
        for path in sorted(patches, key=lambda path: path.count(".")):
            owner, name = _place(module, path)
            undo.callback(_restorer(owner, name))
            _put(owner, name, patches[path], path)
        yield


def _place(module: nn.Module, path: str) -> tuple[Any, str]:
    found = object_at(module, path)
    if isinstance(found, Tensor):
        raise unusable_field("object patch", path, "an object that is no weight; weights have patches of their own")
    above, _, name = path.rpartition(".")
    owner = object_at(module, above) if above else module
    is_entry = name.isdigit() and not isinstance(owner, nn.Module)
    # a property is computed by its class: there is nothing to put back
    computed = inspect.isdatadescriptor(inspect.getattr_static(type(owner), name, None))
    if is_entry or computed or not hasattr(owner, "__dict__"):
        kind = type(owner).__name__
        raise unusable_field("object patch", path, f"an attribute that can be replaced; {name!r} of {kind} cannot be")
    return owner, name


def _put(owner: Any, name: str, value: Any, path: str) -> None:
    if isinstance(owner, nn.Module) and not isinstance(value, nn.Module):
        owner._modules.pop(name, None)  # a module refuses a plain object in the place of a module
    try:
        setattr(owner, name, value)
    except Exception as error:  # classes may refuse with whatever they like
        expected = f"one that {type(owner).__name__} lets be set ({error})"
        raise unusable_field("object patch", path, expected) from error


def _restorer(owner: Any, name: str) -> Callable[[], None]:
    """Puts the attribute `name` of `owner` back as it is now, and touches no other."""
    is_module = isinstance(owner, nn.Module)
    # where torch keeps what is set on a module, by what it is
    tables = [owner._modules, owner._parameters, owner._buffers, owner.__dict__] if is_module else [owner.__dict__]
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
