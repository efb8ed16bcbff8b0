"""What the tokenizers library raises, as errors of this project. Torch-free.

The library is written in Rust. It raises bare `Exception`s, and where its code gives up, in a regular expression for
one, a `PanicException`, which is no `Exception` and would pass every handler on its way. Which error comes of either is
the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modelpool.pool.core.errors import UserError

#: the library does not export the class
_PANIC = "PanicException"
_MOST_CHARACTERS = 300


@contextmanager
def faults_become(refusal: Callable[[str], UserError]) -> Iterator[None]:
    """What goes wrong while this is open becomes the `refusal` of what is wrong.

    Errors of this project pass unchanged, and so does what is nobody's fault: an interrupt, the end of the process, no
    memory left.
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
    """What is wrong, without the rest of a long text that it is wrong in."""
    try:
        # what an error of a missing key says is the key alone
        said = repr(error) if isinstance(error, KeyError) else str(error) or type(error).__name__
    except ValueError:  # a number of more digits than Python writes
        said = type(error).__name__
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]}..."
