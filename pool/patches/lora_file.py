"""Matches a LoRA file with a model and returns patches for its components.

Reads the file through a mapping; the factors stay views of it. The key map (`pool.lora_names`) maps names of the file
to rows of parameters. Every entry that is not used is counted and listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelpool.pool.core.errors import AdapterMismatch, CorruptFile, PatchFailed
from modelpool.pool.keymaps.key_map import RowRange
from modelpool.pool.patches.adapter_entries import AdapterEntry, UnmatchedEntry, read_adapters
from modelpool.pool.patches.adapter_values import bias_range, value_for_rows
from modelpool.pool.patches.patch_set import WeightPatch
from modelpool.pool.specs.spec import Role


@dataclass(frozen=True, slots=True)
class LoraMatch:
    """The result of matching a LoRA file with a model.

    patches    for each component, patches of strength 1 in the order of the names
    matched    number of entries that the model uses; `total` in the file
    unmatched  the others, with the reason
    """

    patches: Mapping[Role, tuple[WeightPatch, ...]]
    matched: int
    total: int
    unmatched: tuple[UnmatchedEntry, ...]

    @property
    def warning(self) -> str | None:
        """Warning for a file that is used in part: counts and the first unused entries. None if all are used."""
        if not self.unmatched:
            return None
        listed = "; ".join(str(s) for s in self.unmatched[:3])
        more = f"; and {len(self.unmatched) - 3} more" if len(self.unmatched) > 3 else ""
        return f"{self.matched} of {self.total} keys matched, not used: {listed}{more}"


def match_lora(
    path: Path,
    sha256: str,
    key_maps: Mapping[Role, Mapping[str, tuple[RowRange, ...]]],
    shapes: Mapping[Role, Mapping[str, tuple[int, ...]]],
) -> LoraMatch:
    """Find the rows that each entry of the file is for. Entries that do not fit their weight, or whose weight another
    entry already patches, are unmatched.

    Checks the matched factors for numbers that are not finite: once per file and process, when the user still gets the
    error, and not at every computation of a patch.

    Raises CorruptFile as `read_adapters` does, and for numbers that are not finite.
    """
    file = read_adapters(path)
    patches: dict[Role, list[WeightPatch]] = {}
    unmatched = list(file.unmatched)
    taken: dict[tuple[Role, str, int, int], str] = {}
    used: list[AdapterEntry] = []
    for entry in file.entries:
        try:
            role, ranges = _targets(entry, key_maps, shapes)
            entry_patches = _patches(entry, sha256, ranges, shapes[role])
            for target in ranges:
                rows = (role, target.key, target.start, target.rows)
                if rows in taken:
                    raise PatchFailed(f"{taken[rows]!r} is for the same rows of {target.key!r}")
            taken |= {(role, t.key, t.start, t.rows): entry.name for t in ranges}
        except PatchFailed as reason:
            unmatched.append(UnmatchedEntry(entry.name, str(reason)))
            continue
        patches.setdefault(role, []).extend(entry_patches)
        used.append(entry)
    _expect_finite(path, used)
    frozen = {role: tuple(ps) for role, ps in patches.items()}
    return LoraMatch(frozen, len(used), len(file.entries) + len(file.unmatched), tuple(unmatched))


def require_match(match: LoraMatch, lora: str, model: str, architecture: str) -> None:
    """Raise AdapterMismatch, with the counts, unless at least half of the LoRA matches the model."""
    if 2 * match.matched < match.total or match.matched == 0:
        raise AdapterMismatch(
            f"LoRA {lora!r} does not belong to model {model!r} ({architecture}): {match.matched} of its {match.total} "
            f"keys matched, expected all; the first that did not: {match.unmatched[0]}"
        )


def _targets(
    entry: AdapterEntry,
    key_maps: Mapping[Role, Mapping[str, tuple[RowRange, ...]]],
    shapes: Mapping[Role, Mapping[str, tuple[int, ...]]],
) -> tuple[Role, tuple[RowRange, ...]]:
    """Return the component and the rows that `entry` is for. Raises PatchFailed when the model has no such weight."""
    # some files name norms by their parameter, others by their module
    names = (entry.name, entry.name.removesuffix(".weight"), entry.name.removesuffix(".scale"))
    for role, known in key_maps.items():
        name = next((n for n in names if n in known), None)
        if name is None:
            continue
        ranges = known[name]
        if not entry.is_bias:
            return role, ranges
        keys = [target.key.removesuffix("weight") + "bias" for target in ranges]
        missing = next((key for key in keys if key not in shapes[role]), None)
        if missing is not None:
            raise PatchFailed(f"the model has no {missing!r}")
        return role, tuple(bias_range(target, key) for target, key in zip(ranges, keys, strict=True))
    raise PatchFailed("the model has no weight of this name")


def _patches(
    entry: AdapterEntry, sha256: str, ranges: tuple[RowRange, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[WeightPatch, ...]:
    """Return one patch for each range of rows of the entry's weight. Raises PatchFailed when one does not fit."""
    entry_patches = []
    for target in ranges:
        value, offset = value_for_rows(entry, target, shapes[target.key])
        patch = WeightPatch(target.key, f"{sha256}:{entry.name}", value, offset=offset)
        patch.patched_shape(shapes[target.key])
        entry_patches.append(patch)
    return tuple(entry_patches)


def _expect_finite(path: Path, entries: Iterable[AdapterEntry]) -> None:
    for entry in entries:
        for part, tensor in entry.parts.items():
            if not _is_finite(tensor):
                wide = tensor.float()
                count = int(wide.numel() - torch.isfinite(wide).sum())
                raise CorruptFile(
                    f"{path}: the {part!r} factor of {entry.name!r} holds {count} of {tensor.numel()} numbers that are "
                    "infinite or undefined, expected finite numbers"
                )


def _is_finite(tensor: Tensor) -> bool:
    """Check in one pass without copies: a sum is finite only if all its terms are. Looks closer if the sum
    overflowed."""
    if tensor.dtype.itemsize == 1:
        return bool(torch.isfinite(tensor.float()).all())
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
