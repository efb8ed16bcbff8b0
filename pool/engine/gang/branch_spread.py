"""Predictions for the texts of guidance on several groups of members: each group makes some, and all get all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelpool.pool.engine.gang.gang_group import GangGroup


def spread_over_branches(
    group: GangGroup, calls: Sequence[Callable[[], Tensor]], like: Tensor, in_step: bool = False
) -> list[Tensor]:
    """Return the results of `calls`, which have the shape and dtype of `like`, in order; the groups take turns in
    calling them, each text always the same group: caches remember what it predicted. One tensor goes each way for each
    turn. `in_step`: each makes as many calls as the others, with which it exchanges weights; a result too many is not
    used."""
    count, own = group.layout.branches, group.layout.branch_of(group.gang.rank)
    found: list[Tensor] = []
    for begin in range(0, len(calls), count):
        if in_step or begin + own < len(calls):
            made = calls[min(begin + own, len(calls) - 1)]()
        else:
            made = torch.zeros_like(like)
        found += group.among_branches(made)
    return found[: len(calls)]
