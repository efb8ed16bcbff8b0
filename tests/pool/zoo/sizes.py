"""The zoo at more than one size: inputs of a larger batch, and of wider images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.pool.zoo.case import Case, Inputs

#: families that take no wider input: their positions are given for one size, or the image's size is in the module
ONE_SIZE = frozenset({"auraflow", "hunyuandit", "hidream", "clip_vision"})


def sizes_of(family: str, case: Case) -> dict[str, Inputs]:
    """The inputs of `case` as they are, for twice as many at once, and twice as wide where they are of space."""
    found = {"as built": case.inputs, "batch": twice_as_many(case.inputs)}
    if family not in ONE_SIZE and any(_is_of_space(name, value) for name, value in case.inputs.items()):
        found["wide"] = twice_as_wide(case.inputs)
    return found


def twice_as_many(inputs: Inputs) -> Inputs:
    """Each member of the batch, twice."""
    first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    listed = [value for value in inputs.values() if type(value) is list]
    batch = len(listed[0]) if listed else first.shape[0]

    def twice(value: Any) -> Any:
        if type(value) is list:
            return value * 2
        return pytree.tree_map_only(Tensor, lambda t: _repeated(t, batch), value)

    return {name: twice(value) for name, value in inputs.items()}


def twice_as_wide(inputs: Inputs) -> Inputs:
    """Everything of space twice along its last dimension."""
    return {n: torch.cat([v, v], dim=-1) if _is_of_space(n, v) else v for n, v in inputs.items()}


def _repeated(tensor: Tensor, batch: int) -> Tensor:
    for dim in range(min(tensor.ndim, 2)):
        if tensor.shape[dim] == batch:
            return torch.cat([tensor, tensor], dim=dim)
    return tensor


def _is_of_space(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 4 and not name.startswith("encoder_")
