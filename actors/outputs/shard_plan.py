"""`ShardPlan`: which outputs are in a shard, decided before it is written. Pure.

The plans of a place are numbered. Each is created once (`ObjectPrefix.create`), by a writer that has read all plans
before it and leaves out their outputs. So an output is in one plan, whichever processes write and whenever they end.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelpool.actors.outputs.entries import ManifestEntry, parse_entry
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout
from modelpool.actors.request.json_text import parse_json
from modelpool.pool.values.core.errors import UserError

PLAN_FOLDER = "shards/"
#: bytes of the outputs in a shard, so that it fits on a disk of the writer. Source: the default of webdataset's
#: ShardWriter, `maxsize=3e9`
MAX_SHARD_BYTES = 3_000_000_000
_ENDINGS = {LayoutKind.WEBDATASET: "tar", LayoutKind.PARQUET: "parquet"}
_PLAN_NAME = re.compile(rf"{PLAN_FOLDER}plan-(\d{{6,}})\.jsonl")
#: characters that a WebDataset key cannot have, such as the dot before the name of a column
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
#: the names of a tar in the format of POSIX 1988 have up to 100 bytes, with the ending
_KEY_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """An output of a shard. `key` is its name in there, different from all others of the shard."""

    key: str
    entry: ManifestEntry


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The outputs of the shard with this number."""

    number: int
    outputs: tuple[PlannedOutput, ...]

    def shard_name(self, kind: LayoutKind) -> str:
        """Return the name of the shard."""
        return f"shard-{self.number:06}.{_ENDINGS[kind]}"

    @property
    def name(self) -> str:
        """The name of the plan."""
        return plan_name(self.number)

    def as_bytes(self) -> bytes:
        """Return the plan as JSON lines."""
        lines = ({"key": output.key, "entry": dict(output.entry.fields)} for output in self.outputs)
        return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)


def plan_name(number: int) -> str:
    """Return the name of the plan with this number."""
    return f"{PLAN_FOLDER}plan-{number:06}.jsonl"


def number_of_plan(name: str) -> int | None:
    """Return the number of the plan with this name; None for other objects."""
    match = _PLAN_NAME.fullmatch(name)
    return int(match[1]) if match else None


def parse_plan(name: str, content: bytes) -> ShardPlan:
    """Parse a plan. Raises UserError for an object that is none."""
    number, outputs = number_of_plan(name), []
    assert number is not None, name
    for count, line in enumerate(content.splitlines(), start=1):
        try:
            fields = parse_json(line)
            if not isinstance(fields, Mapping) or not isinstance(fields.get("key"), str):
                raise UserError(f"found {line[:80]!r}, expected an object with a key and an entry")
            outputs.append(PlannedOutput(fields["key"], parse_entry(fields.get("entry"))))
        except UserError as problem:
            raise UserError(f"{name}, line {count}: {problem}") from problem
    return ShardPlan(number, tuple(outputs))


def next_plan(
    number: int, waiting: Iterable[ManifestEntry], layout: OutputLayout, takes_rest: bool
) -> ShardPlan | None:
    """Return the plan for a shard of outputs that are in none, in the order of their rows; None if they do not fill
    one. With `takes_rest` a shard may have fewer.
    """
    chosen: list[ManifestEntry] = []
    size_bytes, is_full = 0, False
    for entry in sorted(waiting, key=lambda each: (each.run, each.index, each.file)):
        entry_bytes = entry.file_bytes or 0
        if len(chosen) == layout.shard_rows or (chosen and size_bytes + entry_bytes > MAX_SHARD_BYTES):
            is_full = True
            break
        chosen.append(entry)
        size_bytes += entry_bytes
    if not chosen or not (is_full or takes_rest or len(chosen) == layout.shard_rows):
        return None
    taken: set[str] = set()
    outputs = []
    for entry in chosen:
        key = next(key for key in _possible_keys(entry) if key not in taken)
        taken.add(key)
        outputs.append(PlannedOutput(key, entry))
    return ShardPlan(number, tuple(outputs))


def _possible_keys(entry: ManifestEntry) -> Iterator[str]:
    """Yield keys for an output, the best first: the id of the request, or the name of the file. What had to be changed
    gets digits of the output's key, which equal requests with different ids do not share.
    """
    wanted: Any = entry.fields.get("id") or entry.file.partition(".")[0]
    safe = _UNSAFE.sub("-", str(wanted))[:_KEY_CHARACTERS]
    if safe == wanted:
        yield safe
    yield f"{safe}-{entry.key[:8]}"
    for count in itertools.count(2):
        yield f"{safe}-{entry.key[:8]}-{count}"
