"""Python's search for cycles of garbage, put off while a model is built.

A module is some ten thousand objects that all stay. Making them has Python look through all that there is again and
again, hundreds of thousands of objects where torch, diffusers and transformers are loaded: a quarter of the time that a
model takes to build, for nothing. Knows Python's collector; no model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """No search for cycles in this process meanwhile, or until another that is inside leaves; afterwards as it was.
    Objects without cycles go as ever."""
    was_enabled = gc.isenabled()
    try:
        if was_enabled:  # else another may be inside, and leave at this moment: nobody would enable it again
            gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
