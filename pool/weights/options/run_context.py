"""The options of the current run, and facts about the current model call, as context variables.

Code installed on a shared module thus affects its own run only. Does not look into modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import Extra, TransformerOptions


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRun:
    """One run of `module`. Distinct even where clones share their options: compare with `is`."""

    module: object
    options: ModelOptions


_RUNS: ContextVar[tuple[ModuleRun, ...]] = ContextVar("runs", default=())
_FACTS: ContextVar[Mapping[str, Any]] = ContextVar("call_facts", default=MappingProxyType({}))


def current_run(module: object) -> ModuleRun | None:
    """Return the current run of `module`, the innermost if there are several; None when there is none.

    Runs of other modules, inside it or around it, are ignored: a model may be called while another one runs.
    """
    return next((run for run in reversed(_RUNS.get()) if run.module is module), None)


@contextmanager
def active_run(run: ModuleRun) -> Iterator[None]:
    """Make calls of the run's module inside the block belong to `run`."""
    token = _RUNS.set((*_RUNS.get(), run))
    try:
        yield
    finally:
        _RUNS.reset(token)


@contextmanager
def call_facts(**facts: Any) -> Iterator[None]:
    """Add `facts` to the `extra` dictionary of every function that a model call inside the block calls.

    Adds to the facts of outer blocks. Customary names: "sigmas" (float32 [B]), "sample_sigmas" (all noise levels of the
    run), "cond_or_uncond" (for each part of the batch, 0 for the prompt and 1 for the negative prompt), "members" (the
    place of each part among the texts of the run), "has_negative" (whether the run reads a negative prompt).
    """
    token = _FACTS.set(MappingProxyType({**_FACTS.get(), **facts}))
    try:
        yield
    finally:
        _FACTS.reset(token)


def extra_options(options: TransformerOptions, **known: Any) -> Extra:
    """Return a new dictionary for a patch: the options' entries, the facts of the call, and `known`."""
    return {**options.extra, **_FACTS.get(), **known}
