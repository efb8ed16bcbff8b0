"""`WireValue`: base class of values that travel between processes."""

from __future__ import annotations

from typing import Any


class WireValue:
    """A dataclass that is pickled as its constructor arguments, in order.

    A value of the compiled scheduler (setup.py) can thus be read by the Python one and the other way round; it is also
    faster than pickling the state of a frozen dataclass with slots.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind, tuple([getattr(self, name) for name in kind.__match_args__])
