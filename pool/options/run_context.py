"""The options of the run that is under way, and what is known of the model call that is being made.

`ContextVar`s, so that what is installed on a shared module acts in its own run only. Knows no module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from pool.options.model_options import ModelOptions
from pool.options.transformer_options import Extra, TransformerOptions

_OPTIONS: ContextVar[ModelOptions | None] = ContextVar("run_options", default=None)
_FACTS: ContextVar[Mapping[str, Any]] = ContextVar("call_facts", default=MappingProxyType({}))

#: the options of the run that is under way, or None
current_options = _OPTIONS.get


@contextmanager
def running_with(options: ModelOptions) -> Iterator[None]:
    """Model calls inside the block belong to a run with `options`. May be nested; the inner one counts."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


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
