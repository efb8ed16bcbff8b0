"""Callbacks: functions that are called at events of a patcher.

Stores the callbacks; `pool.weights.patcher.model_patcher` calls them. Names are ComfyUI's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias


class CallbackPoint(Enum):
    """The event. Every callback gets the patcher first, then the arguments listed.

    ON_CLONE         a clone was created: (patcher, clone)
    ON_LOAD          a residency target was realized with something resident: (patcher, report)
    ON_DETACH        the last byte left the device: (patcher, report)
    ON_PRE_RUN       a run begins: (patcher)
    ON_CLEANUP       a run ended, successfully or not: (patcher)
    ON_APPLY_HOOKS   weight hooks changed the patch set of a run: (patcher, patch set)
    ON_INJECT_MODEL  all injections are applied: (patcher)
    ON_EJECT_MODEL   all injections are removed: (patcher)
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
    """The callbacks of each event, in the order in which they were added.

    entries  (key, callback) pairs of each event; keys need not be unique
    """

    entries: Mapping[CallbackPoint, tuple[tuple[str, Callback], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def with_callback(self, point: CallbackPoint, callback: Callback, key: str = "") -> Callbacks:
        """Return these with `callback` added after the others of `point`."""
        return Callbacks(MappingProxyType({**self.entries, point: (*self.entries.get(point, ()), (key, callback))}))

    def without(self, point: CallbackPoint, key: str) -> Callbacks:
        """Return these without the ones added to `point` under `key`."""
        left = tuple(e for e in self.entries.get(point, ()) if e[0] != key)
        joined = {**self.entries, point: left}
        return Callbacks(MappingProxyType({p: e for p, e in joined.items() if e}))

    def call(self, point: CallbackPoint, *args: Any) -> None:
        """Call all callbacks of `point`. An exception of one propagates, and later ones are not called."""
        for _, callback in self.entries.get(point, ()):
            callback(*args)
