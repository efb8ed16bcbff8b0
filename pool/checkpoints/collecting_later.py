"""Python's search for cycles of garbage, put off while a model is built.

A module is some ten thousand objects that all stay. Making them has Python look through all that there is again and
again, a million objects where torch, diffusers and transformers are loaded: a quarter of the time that a model takes to
build, for nothing. Knows Python's collector; no model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """No search for cycles in this process meanwhile; as it was, after the last of those that are inside has left or
    sooner. Objects without cycles go as ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
