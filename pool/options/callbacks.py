"""Callbacks: functions that are told when something happened to a patcher.

Knows who wants to hear of what; `pool.patcher.model_patcher` calls. Names are those that ComfyUI's users know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias


class CallbackPoint(Enum):
    """What happened. Every callback gets the patcher first; what else it gets follows.

    ON_CLONE         a clone was made: (patcher, clone)
    ON_LOAD          a target was realized with something resident: (patcher, report)
    ON_DETACH        the last byte left the device: (patcher, report)
    ON_PRE_RUN       a run begins: (patcher)
    ON_CLEANUP       a run ended, well or not: (patcher)
    ON_APPLY_HOOKS   weight hooks changed the patch set of a run: (patcher, patch set)
    ON_INJECT_MODEL  all injections are in: (patcher)
    ON_EJECT_MODEL   all injections are out: (patcher)
    """

    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_PRE_RUN = "on_pre_run"
    ON_CLEANUP = "on_cleanup"
    ON_APPLY_HOOKS = "on_apply_hooks"
    ON_INJECT_MODEL = "on_inject_model"
    ON_EJECT_MODEL = "on_eject_model"


Callback: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Who is told of what, in the order of their adding.

    entries  (key, callback) pairs of each point; keys need not differ
    """

    entries: Mapping[CallbackPoint, tuple[tuple[str, Callback], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def with_callback(self, point: CallbackPoint, callback: Callback, key: str = "") -> Callbacks:
        """These, and `callback` after the ones of `point` that are there."""
        return Callbacks(MappingProxyType({**self.entries, point: (*self.entries.get(point, ()), (key, callback))}))

    def without(self, point: CallbackPoint, key: str) -> Callbacks:
        """These but for the ones that were added to `point` under `key`."""
        left = tuple(e for e in self.entries.get(point, ()) if e[0] != key)
        joined = {**self.entries, point: left}
        return Callbacks(MappingProxyType({p: e for p, e in joined.items() if e}))

    def call(self, point: CallbackPoint, *args: Any) -> None:
        """Tell everyone who wants to hear of `point`. What a callback raises comes out, and later ones are not told."""
        for _, callback in self.entries.get(point, ()):
            callback(*args)
