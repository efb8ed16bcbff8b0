"""Pause Python's cyclic garbage collector while a model is built.

A module is some ten thousand objects that all stay. Creating them makes the collector scan all objects repeatedly,
hundreds of thousands with torch, diffusers and transformers loaded: a quarter of the build time, for nothing. Knows
Python's collector; no model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Disable the cyclic collector in this process until the last nested context leaves; then restore it. Reference
    counting continues."""
    was_enabled = gc.isenabled()
    try:
        if was_enabled:  # otherwise another context is active and may leave right now: nobody would enable it again
            gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
