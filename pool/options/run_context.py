"""The options of the run that is under way, and what is known of the model call that is being made.

`ContextVar`s, so that what is installed on a shared module acts in its own run only. Does not look into modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.transformer_options import Extra, TransformerOptions


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run of `module`. A value of its own even where clones share their options: compare with `is`."""

    module: object
    options: ModelOptions


_RUNS: ContextVar[tuple[Run, ...]] = ContextVar("runs", default=())
_FACTS: ContextVar[Mapping[str, Any]] = ContextVar("call_facts", default=MappingProxyType({}))


def current_run(module: object) -> Run | None:
    """The run of `module` that is under way, the innermost if there are several; None when there is none.

    Runs of other modules, inside it or around it, do not count: a model may be called while another one runs.
    """
    return next((run for run in reversed(_RUNS.get()) if run.module is module), None)


@contextmanager
def under_way(run: Run) -> Iterator[None]:
    """Calls of the run's module inside the block belong to `run`."""
    token = _RUNS.set((*_RUNS.get(), run))
    try:
        yield
    finally:
        _RUNS.reset(token)


@contextmanager
def call_facts(**facts: Any) -> Iterator[None]:
    """`facts` are in the `extra` dictionary of every function that a model call inside the block reaches.

    Adds to those of the block around. Customary names: "sigmas" (float32 [B]), "sample_sigmas" (all noise levels of the
    run), "cond_or_uncond" (for each part of the batch, 0 for the prompt and 1 for the negative prompt).
    """
    token = _FACTS.set(MappingProxyType({**_FACTS.get(), **facts}))
    try:
        yield
    finally:
        _FACTS.reset(token)


def extra_options(options: TransformerOptions, **known: Any) -> Extra:
    """A fresh dictionary for a patch: the options' own entries, the facts of the call, and what is `known` here."""
    return {**options.extra, **_FACTS.get(), **known}
