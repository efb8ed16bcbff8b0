"""`Sent`: the base of values that travel between processes. Knows nothing of what they say."""

from __future__ import annotations

from typing import Any


class Sent:
    """A dataclass whose fields are the arguments that it is made from, in order: that is how it is pickled. So a value
    of the compiled scheduler (setup.py) is read by the Python one, and the other way round; and it takes less time
    than the state that a frozen dataclass with slots is pickled by."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind, tuple([getattr(self, name) for name in kind.__match_args__])
