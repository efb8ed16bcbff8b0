"""Injections: pairs of functions that modify a model and undo it.

Knows the order and what to undo when one fails; no models. `pool.weights.patcher.model_patcher` decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Injection:
    """One pair. Both get the patcher; `eject` must undo what `inject` did, also when `inject` raised half-way."""

    inject: Callable[[Any], None]
    eject: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Injections:
    """All pairs of a patcher, in the order in which they were added.

    entries  the pairs of each key
    """

    entries: Mapping[str, tuple[Injection, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def with_injections(self, key: str, *pairs: Injection) -> Injections:
        """Return these with `pairs` under `key`, replacing the previous ones."""
        return Injections(MappingProxyType({**self.entries, key: pairs}))

    def without(self, key: str) -> Injections:
        """Return the injections without the pairs of `key`."""
        return Injections(MappingProxyType({k: v for k, v in self.entries.items() if k != key}))

    @property
    def pairs(self) -> tuple[Injection, ...]:
        """All pairs, in order."""
        return tuple(pair for pairs in self.entries.values() for pair in pairs)

    def inject(self, patcher: Any) -> None:
        """Call `inject` of all pairs, in order. When one raises, eject it and the ones before it, last first."""
        done: list[Injection] = []
        try:
            for pair in self.pairs:
                done.append(pair)
                pair.inject(patcher)
        except BaseException:
            _eject(done, patcher)
            raise

    def eject(self, patcher: Any) -> None:
        """Call `eject` of all pairs, last first, even if one raises; then raise the first error."""
        _eject(self.pairs, patcher)


class InjectionState:
    """The injections of one run and whether they are applied. Each is ejected exactly once per inject."""

    def __init__(self, injections: Injections, patcher: object, is_injected: bool = False) -> None:
        self._injections, self._patcher = injections, patcher
        self.is_injected = is_injected

    def inject(self) -> None:
        """Inject all. When one raises, all are ejected."""
        assert not self.is_injected, "injections are applied already"
        self._injections.inject(self._patcher)
        self.is_injected = True

    def eject(self) -> None:
        """Eject all, also when one raises."""
        assert self.is_injected, "injections are not applied"
        self.is_injected = False
        self._injections.eject(self._patcher)

    def belongs_to(self, patcher: object) -> bool:
        """Whether this is a run of `patcher`."""
        return self._patcher is patcher

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `active_injections` return this inside the block."""
        token = _ACTIVE.set((*_ACTIVE.get(), self))
        try:
            yield
        finally:
            _ACTIVE.reset(token)


_ACTIVE: ContextVar[tuple[InjectionState, ...]] = ContextVar("placements", default=())


def active_injections(patcher: object) -> tuple[InjectionState, ...]:
    """Return the states of the current runs of `patcher` in this context, the innermost first."""
    return tuple(state for state in reversed(_ACTIVE.get()) if state.belongs_to(patcher))


def _eject(pairs: tuple[Injection, ...] | list[Injection], patcher: Any) -> None:
    first: BaseException | None = None
    for pair in reversed(pairs):
        try:
            pair.eject(patcher)
        except BaseException as error:  # eject the remaining pairs too
            first = first or error
    if first is not None:
        raise first
