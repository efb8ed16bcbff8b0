"""Which model makes images of what another one makes, where nobody names it: the one beside it, or the only one.

Pure functions over listings; torch-free. Knows neither headers nor hashes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from modelpool.pool.core.errors import MissingParts, unusable_field
from modelpool.pool.families.supported import running_families
from modelpool.pool.registry.listings import ModelListing

#: files with problems that are told of
_MOST_TOLD = 5


def decoder_among(listings: Sequence[ModelListing], model: str, path: str, families: Collection[str]) -> str:
    """The name of the one model of `listings` that is of one of `families` and lies in the folder that `path`, of
    `model`, lies in; without such a one, of the only one that there is.

    Raises MissingParts where there is none, UnusableField where there are several.
    """
    titles = decoder_titles(families)
    found = [each for each in listings if not each.problem and each.family in titles]
    folder = _folder(path)
    beside = [each for each in found if _folder(each.path) == folder]
    of = beside or found
    if not of:
        raise MissingParts(
            f"model {model!r} makes small latents, of which {' or '.join(titles)} makes images, and no such model is "
            f"known: put its file (stable_cascade_stage_b.safetensors) or its folder beside {path}, or name one in the "
            f"field decoder{_problems_beside(listings, folder)}"
        )
    if len(of) > 1:
        names = ", ".join(repr(each.name) for each in of)
        raise unusable_field("decoder", "nothing", f"one of {names}: each can make images of what {model!r} makes")
    return of[0].name


def decoder_titles(families: Collection[str]) -> tuple[str, ...]:
    """What models of `families` are called for people."""
    running = running_families()
    return tuple(running[name].title for name in families)


def _problems_beside(listings: Sequence[ModelListing], folder: str) -> str:
    """What lies in `folder` and cannot be used, and why: one of these may be meant. The problem names the file."""
    problems = [each.problem for each in listings if each.problem and _folder(each.path) == folder]
    if not problems:
        return ""
    left_out = len(problems) - _MOST_TOLD
    told = "; ".join([*problems[:_MOST_TOLD], *([f"and {left_out} more"] if left_out > 0 else [])])
    return f". There, but of no use: {told}"


def _folder(path: str) -> str:
    return os.path.dirname(os.path.realpath(path))
