"""Errors of runs that workers share. Torch-free."""

from __future__ import annotations

from modelpool.pool.values.core.results import RunState


class GangBroken(Exception):
    """Another member of a gang was lost, or left, or did not answer in time: the run may be tried again.

    suspects  ranks of the members that this one suspects, lowest first
    state     of the run after its last complete step, equal on all members; None before the first one
    """

    def __init__(self, message: str, suspects: tuple[int, ...] = (), state: RunState | None = None) -> None:
        super().__init__(message)
        self.suspects = suspects
        self.state = state


class GangsDiffer(Exception):
    """Members of a gang have different weights, or were asked for different runs. The message names them."""
