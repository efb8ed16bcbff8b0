"""Modules that were built without values get them.

Does what `nn.Module.load_state_dict(assign=True)` does for modules whose keys and shapes are known to fit, in less than
a third of its time: torch looks through all of the values again for each level of the tree. Calls no hooks of loading,
and a module that is in two places has one name, the first. Knows torch's modules; no class of anybody else, and no
file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def fill(module: nn.Module, values: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Make `values` the parameters, without gradients, and the buffers of `module` that they are named for. Nothing is
    copied: what `module` had there is dropped.

    Returns the names that it has no place for. Those that `values` lacks stay as they are (`assert_filled`). Asserts
    that the shapes are those of what is replaced.
    """
    left = dict(values)
    for path, part in module.named_modules():
        prefix = path + "." if path else ""
        for key, parameter in part._parameters.items():
            if parameter is not None and (value := _taken(left, prefix + key, parameter)) is not None:
                part._parameters[key] = nn.Parameter(value, requires_grad=False)
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                value = _taken(left, prefix + key, buffer)
                part._buffers[key] = buffer if value is None else value
    return tuple(left)


def _taken(left: dict[str, Tensor], name: str, own: Tensor) -> Tensor | None:
    """The value `name`, taken from `left`, for what a module has as `own`."""
    value = left.pop(name, None)
    assert value is None or value.shape == own.shape, f"{name}: found {tuple(value.shape)} for {tuple(own.shape)}"
    return value


def assert_filled(module: nn.Module) -> None:
    """Assert that nothing of a module that was built without values is without them: no parameter and no buffer is on
    the meta device."""
    left = [
        f"{path}.{key}".removeprefix(".")
        for path, part in module.named_modules()
        for held in (part._parameters, part._buffers)
        for key, value in held.items()
        if value is not None and value.is_meta
    ]
    assert not left, f"{type(module).__name__} has values that nothing fills: {left}"
