"""Errors that users can cause, as `ValueError`s that state what was found and what was expected.

Torch-free. Every class takes one message, so that it is pickled unchanged; the functions below build the messages.
Errors on a GPU during a task are `pool.values.specs.spec.RunError` values instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
#: problems of one request in a message
MOST_PROBLEMS = 6
#: characters of a value in a message
MOST_SHOWN = 500


class UserError(ValueError):
    """Invalid user input. The message names the field or file and what was expected."""


class UnknownName(UserError):
    """A model, LoRA, sampler or field that does not exist."""


class AmbiguousName(UserError):
    """A name that several files have. The message lists them and how to select one."""


class UnusableField(UserError):
    """A field with a value outside of the allowed range."""


class CorruptFile(UserError):
    """A weights file that is truncated, too long, overlapping, non-finite or not of the type that its name claims."""


class UnsafeFile(CorruptFile):
    """A weights file that could run code or points outside of its folder, without permission."""


class UnknownArchitecture(UserError):
    """A readable file of weights with keys and shapes that match no known family."""


class NeedsNewerLibrary(UnknownArchitecture):
    """A model with an architecture that the installed version of a library lacks."""


class MissingParts(UnknownArchitecture):
    """Separate files that do not form a model: a part is missing, or does not belong to it."""


class AdapterMismatch(UserError):
    """A LoRA with keys that do not match the model."""


class PatchFailed(UserError):
    """A weight patch that cannot be applied to its weight. The message names patch, parameter and shapes."""


class BadQuantization(UserError):
    """Quantized weights that are not stored as their format specifies, or a format that does not support the
    operation."""


class DoesNotFit(UserError):
    """A run that exceeds the memory budget even when fully streamed."""


class ModelClosed(UserError):
    """A model of explicit control that was used after it was closed."""


class OutputFailed(UserError):
    """An output folder or file that cannot be written."""


class FilesWouldBeLost(OutputFailed):
    """A folder that may be overwritten, but contains a file that would not be replaced. The message names it."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """An `UnknownName` that suggests the nearest of `known` and lists all of them when they are few."""
    names = sorted(known)
    name = _shown(name)
    near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    suggestion = next((n for n in names if near and n.lower() == near[0]), None)
    hint = f"; did you mean {suggestion!r}?" if suggestion else "."
    few = f" Known: {', '.join(names)}." if names else " There is none."
    listed = few if len(names) <= 20 else f" {len(names)} are known."
    return UnknownName(f"unknown {kind} {name!r}{hint}{listed}")


def unusable_field(field: str, found: object, expected: str) -> UnusableField:
    """An `UnusableField` that names `field`, what was `found` there and what was `expected`."""
    return UnusableField(f"{field}: found {_shown(repr(found))}, expected {expected}")


def missing_value(field: str, expected: str) -> UnusableField:
    """An `UnusableField` that names `field`, which is not set, and what was `expected`."""
    return UnusableField(f"{field}: missing, expected {expected}")


def together(problems: Sequence[UserError]) -> UserError:
    """One error of the class of the first of `problems`, with all messages, each once; `problems[0]` if it is alone."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1:
        return problems[0]
    more = len(texts) - MOST_PROBLEMS
    end = f"; and {more} more" if more > 0 else ""
    return type(problems[0])("; also ".join(texts[:MOST_PROBLEMS]) + end)


def _shown(text: str) -> str:
    """Return a value for a message, its beginning if it is long: it may be the largest that a caller can send."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({counted(len(text), 'character')})"


def does_not_fit(what: str, needed_bytes: int, budget_bytes: int, detail: str) -> DoesNotFit:
    """A `DoesNotFit` with both sizes in readable units; in bytes if the rounded values are equal."""
    needed, budget = format_bytes(needed_bytes), format_bytes(budget_bytes)
    if needed == budget:
        needed, budget = f"{needed_bytes} B", f"{budget_bytes} B"
    return DoesNotFit(f"{what} needs at least {needed} of device memory, the budget is {budget} ({detail})")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count: '1 image', '8 images'; with `plural` of a noun that has no s, '8 entries'. A noun may have its
    verb: `counted(count, "image fails", "images fail")`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: int) -> str:
    """Return `count` bytes as text: '512 B', '3.2 KiB', '64.0 MiB', '24.0 GiB'. Rounded up in the last digit, so that a
    budget set to the printed value is never below the true one."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            tenths = -(-count * 10 // unit)
            return f"{tenths // 10}.{tenths % 10} {name}"
    return f"{count} B"


def parse_bytes(text: str) -> int:
    """The number of bytes in '64MiB', '24GiB', '512 MB', '1.5G' or '1000000'.

    Binary and decimal units both; a bare K, M, G, T is binary, as GPU tools print it.
    Raises UnusableField for anything else, and for zero or less.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[letter] = units[letter + "ib"] = 1024**power
        units[letter + "b"] = 1000**power
    stripped = text.strip().lower()
    number = stripped.rstrip("bikmgt ")
    unit = stripped[len(number) :].strip()
    try:
        count = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise unusable_field("size in bytes", text, "a positive number with a unit, such as 64MiB or 24GiB")
    return count
