"""Finds the requests that generate listed outputs again; shared by `repair` and `verify`.

Knows recipes, requests and the pool's answer to what they lead to; not the generated outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.graph.features.recipe import Recipe
    from modelpool.actors.outputs.entries import ManifestEntry
    from modelpool.actors.request.requests import GenerateRequest


@dataclass(frozen=True, slots=True)
class AgainRequest:
    """A request that generates a listed output again.

    recipe   of the request, in this pool
    differs  fields in which it differs from the listed recipe; none if the same output is expected
    """

    entry: ManifestEntry
    request: GenerateRequest
    recipe: Recipe
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Impossible:
    """A listed output that cannot be generated again, with the reason."""

    entry: ManifestEntry
    reason: str


def requests_again(
    entries: Sequence[ManifestEntry], pool: Pool, input_folders: Sequence[Path]
) -> tuple[list[AgainRequest], list[Impossible]]:
    """Return the requests for `entries`, in order, and those that have none. Input images are looked up by name in
    `input_folders`.
    """
    from modelpool.actors.graph.recipe_request import requests_of

    impossible: list[Impossible] = []
    candidates: list[tuple[ManifestEntry, GenerateRequest]] = []
    for entry in entries:
        try:
            found = requests_of(entry.recipe, lambda name: _file(name, input_folders))
        except UserError as problem:
            impossible.append(Impossible(entry, str(problem)))
        else:
            candidates += [(entry, request.model_copy(update=entry.labels.as_json())) for request in found]
    answers: dict[str, list[tuple[GenerateRequest, Recipe | UserError]]] = {}
    recipes = pool.recipes([request for _, request in candidates])
    for (entry, request), recipe in zip(candidates, recipes, strict=True):
        answers.setdefault(entry.key, []).append((request, recipe))
    again: list[AgainRequest] = []
    for entry in entries:
        best = _best(entry, answers.get(entry.key, []))
        if isinstance(best, AgainRequest):
            again.append(best)
        elif best is not None:
            impossible.append(best)
    return again, impossible


def _best(
    entry: ManifestEntry, answers: Sequence[tuple[GenerateRequest, Recipe | UserError]]
) -> AgainRequest | Impossible | None:
    """Return the request with the recipe nearest to the listed one; None without answers."""
    from modelpool.actors.graph.recipe_request import differing_fields

    found = [
        AgainRequest(entry, request, recipe, differing_fields(entry.recipe, recipe))
        for request, recipe in answers
        if not isinstance(recipe, UserError)
    ]
    if found:
        return min(found, key=lambda one: len(one.differs))
    return Impossible(entry, str(answers[0][1])) if answers else None


def _file(name: str, folders: Sequence[Path]) -> str:
    from modelpool.actors.graph.features.feature import InputMissing

    for folder in folders:
        if (path := folder / Path(name).name).is_file():
            return str(path)
    searched = ", ".join(map(str, folders))
    raise InputMissing(f"the input {name} is in none of these folders: {searched}; name its folder with --inputs")
