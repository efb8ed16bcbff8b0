"""Replaces objects inside a module for the duration of one run.

Knows attribute paths, not the objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelpool.pool.values.core.errors import unknown_name, unusable_field


def object_at(module: nn.Module, path: str) -> Any:
    """Return the object at `path` in `module`: attributes and indices joined by dots, "down_blocks.0.resnets". Raises
    UnknownName."""
    return patched_object_at(module, path, {})


def patched_object_at(module: nn.Module, path: str, patches: Mapping[str, Any]) -> Any:
    """Return what `object_at` would return while `patches` are applied. Raises UnknownName.

    Starts at the longest path of `patches` that `path` equals or passes through.
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
    """Replace the objects at the paths of `patches` inside the block; restore exactly the previous ones after it.

    Shorter paths first, whatever the order of `patches`: "norm.eps" is the attribute of the replacement at "norm".
    Replacement modules are used as they are: their weights must be on the device and in the dtype of the run. Raises
    UnknownName for a path that does not exist and UnusableField for what cannot be replaced: a parameter or buffer,
    which are patched as weights, a property, an entry of a tuple. Nothing is replaced then.
    """
    with ExitStack() as undo:
        for path in sorted(patches, key=lambda path: path.count(".")):
            owner, name = _owner_of(module, path)
            undo.callback(_restorer(owner, name))
            _set_attribute(owner, name, patches[path], path)
        yield


def _owner_of(module: nn.Module, path: str) -> tuple[Any, str]:
    found = object_at(module, path)
    if isinstance(found, Tensor):
        raise unusable_field("object patch", path, "an object other than a weight; weights have their own patches")
    above, _, name = path.rpartition(".")
    owner = object_at(module, above) if above else module
    is_entry = name.isdigit() and not isinstance(owner, nn.Module)
    # a property is computed by its class and cannot be restored
    computed = inspect.isdatadescriptor(inspect.getattr_static(type(owner), name, None))
    if is_entry or computed or not hasattr(owner, "__dict__"):
        kind = type(owner).__name__
        raise unusable_field("object patch", path, f"an attribute that can be replaced; {name!r} of {kind} cannot be")
    return owner, name


def _set_attribute(owner: Any, name: str, value: Any, path: str) -> None:
    if isinstance(owner, nn.Module) and not isinstance(value, nn.Module):
        owner._modules.pop(name, None)  # a module does not accept a plain object in place of a submodule
    try:
        setattr(owner, name, value)
    except Exception as error:  # classes may raise anything
        expected = f"an attribute that {type(owner).__name__} allows to be set ({error})"
        raise unusable_field("object patch", path, expected) from error


def _restorer(owner: Any, name: str) -> Callable[[], None]:
    """Return a function that restores the attribute `name` of `owner` to its present value, and nothing else."""
    is_module = isinstance(owner, nn.Module)
    # where torch stores attributes of a module, by their kind
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
