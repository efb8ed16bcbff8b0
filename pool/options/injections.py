"""Injections: pairs of functions that put something into a model and take it out again.

Knows the order and what to undo when one fails; does not know models. `pool.patcher.model_patcher` says when.
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
    """One pair. Both get the patcher; `eject` must undo what `inject` did, also when `inject` raised half way."""

    inject: Callable[[Any], None]
    eject: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Injections:
    """All pairs of a patcher, in the order of their adding.

    entries  the pairs of each key
    """

    entries: Mapping[str, tuple[Injection, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def with_injections(self, key: str, *pairs: Injection) -> Injections:
        """These with `pairs` under `key`, in place of the ones that were there."""
        return Injections(MappingProxyType({**self.entries, key: pairs}))

    def without(self, key: str) -> Injections:
        """These but for the ones of `key`."""
        return Injections(MappingProxyType({k: v for k, v in self.entries.items() if k != key}))

    @property
    def pairs(self) -> tuple[Injection, ...]:
        """All of them, in order."""
        return tuple(pair for pairs in self.entries.values() for pair in pairs)

    def inject(self, patcher: Any) -> None:
        """Put all in, in order. When one raises, it and the ones before it are taken out again, last first."""
        done: list[Injection] = []
        try:
            for pair in self.pairs:
                done.append(pair)
                pair.inject(patcher)
        except BaseException:
            _eject(done, patcher)
            raise

    def eject(self, patcher: Any) -> None:
        """Take all out, last first. Every one is asked, even if another raises; the first error comes out."""
        _eject(self.pairs, patcher)


class Placement:
    """The injections of one run: in the model or out of it. Each is taken out once for each time that it was put in."""

    def __init__(self, injections: Injections, patcher: object, is_in: bool = False) -> None:
        self._injections, self._patcher = injections, patcher
        self.is_in = is_in

    def put_in(self) -> None:
        """All in. When one raises, all are out."""
        assert not self.is_in, "injections are in already"
        self._injections.inject(self._patcher)
        self.is_in = True

    def take_out(self) -> None:
        """All out, also when one raises."""
        assert self.is_in, "injections are out already"
        self.is_in = False
        self._injections.eject(self._patcher)

    def is_of(self, patcher: object) -> bool:
        """It belongs to a run of `patcher`."""
        return self._patcher is patcher

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside the block `placements_of` finds it."""
        token = _PLACEMENTS.set((*_PLACEMENTS.get(), self))
        try:
            yield
        finally:
            _PLACEMENTS.reset(token)


_PLACEMENTS: ContextVar[tuple[Placement, ...]] = ContextVar("placements", default=())


def placements_of(patcher: object) -> tuple[Placement, ...]:
    """Those of the runs of `patcher` that are under way in this context, the innermost first."""
    return tuple(placement for placement in reversed(_PLACEMENTS.get()) if placement.is_of(patcher))


def _eject(pairs: tuple[Injection, ...] | list[Injection], patcher: Any) -> None:
    first: BaseException | None = None
    for pair in reversed(pairs):
        try:
            pair.eject(patcher)
        except BaseException as error:  # every pair must get its chance
            first = first or error
    if first is not None:
        raise first
