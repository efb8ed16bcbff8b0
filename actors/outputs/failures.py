"""Outputs that could not be generated, as a place remembers them next to its manifest: one JSON object each.

A failure counts until its output is listed in the manifest: a resumed batch tries it again, and a report names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.entries import UnusableEntry
from modelpool.actors.request.labels import NO_LABELS, Labels, labels_from_json, output_key

#: name of the list in a folder, and below which a store has a record of each
FAILURES_NAME, FAILURES_FOLDER = "failures.jsonl", "failures/"
#: characters of a message and of a prompt that are kept
_MOST_MESSAGE, _MOST_PROMPT = 2000, 200
_TYPES = {"key": str, "index": int, "job_id": str, "kind": str, "message": str, "model": str, "prompt": str}


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """An output that could not be generated.

    key      that it would have among the outputs of the place
    index    position of its request in the command or call, from 0
    kind     of the error (`RunErrorKind`), and its `message`
    at       when, in seconds since the epoch
    """

    key: str
    index: int
    job_id: str
    kind: str
    message: str
    at: float
    model: str
    prompt: str
    seed: int
    labels: Labels = NO_LABELS

    @classmethod
    def of(
        cls, recipe: Recipe, labels: Labels, index: int, job_id: str, kind: str, message: str, at: float
    ) -> FailedOutput:
        """Return the failure of the output with this recipe."""
        return cls(
            output_key(recipe.digest, labels.id),
            index,
            job_id,
            kind,
            message[:_MOST_MESSAGE],
            round(at, 3),
            recipe.model,
            recipe.prompt[:_MOST_PROMPT],
            recipe.seed,
            labels,
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found = {name: getattr(self, name) for name in (*_TYPES, "at", "seed")}
        return {**found, **self.labels.as_json()}

    def as_line(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps(self.as_json(), ensure_ascii=True).encode("ascii") + b"\n"

    @property
    def words(self) -> str:
        """What failed and why, for people."""
        prompt = self.prompt if len(self.prompt) < _MOST_PROMPT else f"{self.prompt}..."
        return f"{self.kind}: {self.message} ({self.model}, {prompt!r}, seed {self.seed})"

    @property
    def title(self) -> str:
        """What identifies it, for people."""
        facts = [f"id {self.labels.id}"] if self.labels.id else []
        facts += [] if self.labels.line is None else [f"line {self.labels.line}"]
        return f"job {self.job_id}" + (f" ({', '.join(facts)})" if facts else "")


def parse_failure(fields: Any) -> FailedOutput:
    """Return JSON values as a failure. Raises UnusableEntry."""
    if not isinstance(fields, dict):
        raise UnusableEntry(f"found {type(fields).__name__}, expected a JSON object")
    for name, expected in {**_TYPES, "seed": int}.items():
        if type(fields.get(name)) is not expected:
            raise UnusableEntry(f"{name}: found {str(fields.get(name))[:80]!r}, expected {expected.__name__}")
    at = fields.get("at")
    if not isinstance(at, int | float) or isinstance(at, bool):
        raise UnusableEntry(f"at: found {str(at)[:80]!r}, expected a number")
    labels = labels_from_json({name: fields.get(name) for name in ("id", "metadata", "line")})
    return FailedOutput(**{name: fields[name] for name in _TYPES}, at=float(at), seed=fields["seed"], labels=labels)


def unresolved(failures: Iterable[FailedOutput], is_listed: Callable[[str], bool]) -> tuple[FailedOutput, ...]:
    """Return the last failure of each output that is not listed, in the order of the first ones."""
    last = {failure.key: failure for failure in failures}
    return tuple(failure for key, failure in last.items() if not is_listed(key))
