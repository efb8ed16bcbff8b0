"""Converts errors of the tokenizers library to errors of this project. Torch-free.

The library is written in Rust. It raises bare `Exception`s, and on internal failures, for example in a regular
expression, a `PanicException`, which is not an `Exception` and would pass every handler. The caller chooses the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modelpool.pool.values.core.errors import UserError

#: the library does not export the class
_PANIC = "PanicException"
_MAX_CHARACTERS = 300


@contextmanager
def convert_errors(refusal: Callable[[str], UserError]) -> Iterator[None]:
    """Convert errors in the block to the `refusal` of their message.

    Errors of this project, interrupts, exit of the process and MemoryError pass unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise refusal(_short(error)) from error


def _short(error: BaseException) -> str:
    """Return the message of `error`, shortened."""
    try:
        # the message of a KeyError is only the key
        message = repr(error) if isinstance(error, KeyError) else str(error) or type(error).__name__
    except ValueError:  # a number of more digits than Python writes
        message = type(error).__name__
    return message if len(message) <= _MAX_CHARACTERS else f"{message[:_MAX_CHARACTERS]}..."
