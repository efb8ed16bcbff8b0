"""A LoRA file as patches for the components of one model.

Reads the file through a mapping; the factors stay views of it. Which name of the file means which rows of which
parameter is the key map's business (`pool.checkpoints.lora_names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pool.checkpoints.adapter_keys import split_key
from pool.checkpoints.key_map import RowRange
from pool.checkpoints.mapped_file import MappedFile
from pool.errors import AdapterMismatch, CorruptFile
from pool.patches.patch_set import LowRank, WeightPatch
from pool.spec import Role

#: the parts of an entry that `LowRank` computes; one with others is told as strange, not applied in half
_LOW_RANK_PARTS = {"up", "down", "alpha"}


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """The factors for one weight, by their name in the file. `scale` is alpha over rank, 1 without an alpha."""

    name: str
    up: Tensor
    down: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The inner size of the product."""
        return int(self.down.shape[0])


@dataclass(frozen=True, slots=True)
class LoraMatch:
    """How a LoRA file meets a model.

    patches  for each component that it touches, patches of strength 1 in the order of the file
    matched  entries that belong to the model; `total` in the file
    strange  names of the others, sorted
    """

    patches: Mapping[Role, tuple[WeightPatch, ...]]
    matched: int
    total: int
    strange: tuple[str, ...]


def read_lora(path: Path) -> tuple[tuple[LoraEntry, ...], tuple[str, ...]]:
    """Every low-rank entry of the file, and the names of keys and entries that are something else; each in name order.

    Factors are views of the file's mapping. Raises CorruptFile when the file is not whole, holds nothing of a LoRA, or
    has a factor without its other half or of another rank.
    """
    tensors = MappedFile.open(path).tensors()
    parts: dict[str, dict[str, Tensor]] = {}
    strange: list[str] = []
    for key, tensor in tensors.items():
        split = split_key(key)
        if split is None:
            strange.append(key)
        else:
            parts.setdefault(split[0], {})[split[1]] = tensor
    if not parts:
        raise CorruptFile(f"{path}: found no LoRA keys, expected pairs such as 'NAME.lora_up.weight' and 'lora_down'")
    low_rank = {name for name, held in parts.items() if held.keys() <= _LOW_RANK_PARTS}
    strange += [f"{name} ({', '.join(sorted(held))})" for name, held in parts.items() if name not in low_rank]
    return tuple(_entry(path, name, parts[name]) for name in sorted(low_rank)), tuple(sorted(strange))


def match_lora(
    path: Path,
    sha256: str,
    key_maps: Mapping[Role, Mapping[str, tuple[RowRange, ...]]],
    shapes: Mapping[Role, Mapping[str, tuple[int, ...]]],
) -> LoraMatch:
    """Find the rows that each entry of the file is for. One whose shape does not fit its weight is strange too.

    Raises CorruptFile as `read_lora` does.
    """
    entries, others = read_lora(path)
    patches: dict[Role, list[WeightPatch]] = {}
    strange = list(others)
    for entry in entries:
        role = next((r for r, names in key_maps.items() if entry.name in names), None)
        found = _patches(entry, sha256, key_maps[role][entry.name], shapes[role]) if role is not None else ()
        if role is not None and found:
            patches.setdefault(role, []).extend(found)
        else:
            strange.append(entry.name)
    frozen = {role: tuple(ps) for role, ps in patches.items()}
    total = len(entries) + len(others)
    return LoraMatch(frozen, total - len(strange), total, tuple(strange))


def require_match(match: LoraMatch, lora: str, model: str, architecture: str) -> None:
    """Raise AdapterMismatch unless at least half of the LoRA belongs to the model, with the counts."""
    if 2 * match.matched < match.total or match.matched == 0:
        raise AdapterMismatch(
            f"LoRA {lora!r} does not belong to model {model!r} ({architecture}): {match.matched} of its {match.total} "
            f"keys matched, expected all; the first that did not: {match.strange[0]}"
        )


def _entry(path: Path, name: str, parts: Mapping[str, Tensor]) -> LoraEntry:
    for half, other in (("up", "down"), ("down", "up")):
        if half not in parts:
            raise CorruptFile(f"{path}: {name!r} has no {half!r} factor, expected one beside its {other!r} factor")
    up, down = parts["up"], parts["down"]
    rank = int(down.shape[0]) if down.ndim else 0
    if up.ndim < 2 or down.ndim < 2 or up.shape[1] != rank or rank == 0:
        raise CorruptFile(
            f"{path}: {name!r} has factors of shapes {tuple(up.shape)} and {tuple(down.shape)}, "
            "expected (O, R) and (R, I)"
        )
    alpha = parts.get("alpha")
    return LoraEntry(name, up, down, 1.0 if alpha is None else float(alpha) / rank)


def _patches(
    entry: LoraEntry, sha256: str, ranges: tuple[RowRange, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[WeightPatch, ...]:
    """One patch for each range of rows that the entry's weight became; none when a shape does not fit."""
    up_OR, down_RI = entry.up.flatten(1), entry.down.flatten(1)
    columns = down_RI.shape[1]
    if sum(r.rows for r in ranges) != up_OR.shape[0]:
        return ()
    made = []
    for r in ranges:
        shape = shapes[r.key]
        numel = 1
        for size in shape[1:]:
            numel *= size
        if numel != columns:
            return ()
        value = LowRank(up_OR.narrow(0, r.source_start, r.rows), down_RI, entry.scale)
        made.append(WeightPatch(r.key, f"{sha256}:{entry.name}", value, 1.0, r.start, r.rows))
    return tuple(made)
