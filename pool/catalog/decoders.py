"""Chooses the model that decodes the latents of another one if none is named: the one in its folder, or the only one.

Pure functions of listings; torch-free. Knows neither headers nor hashes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from modelpool.pool.catalog.registry.listings import ModelListing
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.errors import MissingParts, missing_value

#: maximum number of files with problems in an error
_MAX_LISTED = 5


def choose_decoder(listings: Sequence[ModelListing], model: str, path: str, families: Collection[str]) -> str:
    """Return the name of the only model of `listings` that is of one of `families` and in the folder of `path`, the
    file of `model`; without one there, of the only one that exists.

    Raises MissingParts if there is none, UnusableField if there are several.
    """
    titles = decoder_titles(families)
    found = [each for each in listings if not each.problem and each.family in titles]
    folder = _folder(path)
    candidates = [each for each in found if _folder(each.path) == folder] or found
    if not candidates:
        raise MissingParts(
            f"model {model!r} generates small latents, which {' or '.join(titles)} decodes to images, and no such "
            f"model is known: put its file (stable_cascade_stage_b.safetensors) or its folder next to {path}, or name "
            f"one in the field decoder{_problems_in(listings, folder)}"
        )
    if len(candidates) > 1:
        names = ", ".join(repr(each.name) for each in candidates)
        raise missing_value("decoder", f"one of {names}: each can decode the latents of {model!r}")
    return candidates[0].name


def decoder_titles(families: Collection[str]) -> tuple[str, ...]:
    """Return the titles of `families`."""
    running = running_families()
    return tuple(running[name].title for name in families)


def _problems_in(listings: Sequence[ModelListing], folder: str) -> str:
    """Return the unusable files in `folder` with their problems, since one of them may be the expected one. The problem
    names the file."""
    problems = [each.problem for each in listings if each.problem and _folder(each.path) == folder]
    if not problems:
        return ""
    left_out = len(problems) - _MAX_LISTED
    listed = "; ".join([*problems[:_MAX_LISTED], *([f"and {left_out} more"] if left_out > 0 else [])])
    return f". Unusable files there: {listed}"


def _folder(path: str) -> str:
    return os.path.dirname(os.path.realpath(path))
