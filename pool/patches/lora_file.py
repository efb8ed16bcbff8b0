"""A LoRA file as patches for the components of one model.

Reads the file through a mapping; the factors stay views of it. Which name of the file means which rows of which
parameter is the key map's business (`pool.lora_names`). Nothing of a file is dropped without being counted
and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelpool.pool.core.errors import AdapterMismatch, CorruptFile, PatchFailed
from modelpool.pool.keymaps.key_map import RowRange
from modelpool.pool.patches.adapter_entries import AdapterEntry, Strange, read_adapters
from modelpool.pool.patches.adapter_values import bias_range, placed_value
from modelpool.pool.patches.patch_set import WeightPatch
from modelpool.pool.specs.spec import Role


@dataclass(frozen=True, slots=True)
class LoraMatch:
    """How a LoRA file meets a model.

    patches  for each component that it touches, patches of strength 1 in the order of the names
    matched  entries that belong to the model; `total` in the file
    strange  the others, with the reason
    """

    patches: Mapping[Role, tuple[WeightPatch, ...]]
    matched: int
    total: int
    strange: tuple[Strange, ...]

    @property
    def warning(self) -> str | None:
        """What to tell of a file that is used in part: counts and the first that are not used. None for a whole one."""
        if not self.strange:
            return None
        named = "; ".join(str(s) for s in self.strange[:3])
        more = f"; and {len(self.strange) - 3} more" if len(self.strange) > 3 else ""
        return f"{self.matched} of {self.total} keys matched, not used: {named}{more}"


def match_lora(
    path: Path,
    sha256: str,
    key_maps: Mapping[Role, Mapping[str, tuple[RowRange, ...]]],
    shapes: Mapping[Role, Mapping[str, tuple[int, ...]]],
) -> LoraMatch:
    """Find the rows that each entry of the file is for. One that does not fit its weight is strange, as is one for a
    weight that an entry of another name is for already.

    The factors that matched are looked through once for numbers that are not finite: here, where a person still hears
    of it and each process comes by once for a file, and not whenever a patch is computed.

    Raises CorruptFile as `read_adapters` does, and for numbers that are not finite.
    """
    file = read_adapters(path)
    patches: dict[Role, list[WeightPatch]] = {}
    strange = list(file.strange)
    taken: dict[tuple[Role, str, int, int], str] = {}
    used: list[AdapterEntry] = []
    for entry in file.entries:
        try:
            role, ranges = _targets(entry, key_maps, shapes)
            made = _patches(entry, sha256, ranges, shapes[role])
            for target in ranges:
                rows = (role, target.key, target.start, target.rows)
                if rows in taken:
                    raise PatchFailed(f"{taken[rows]!r} is for the same rows of {target.key!r}")
            taken |= {(role, t.key, t.start, t.rows): entry.name for t in ranges}
        except PatchFailed as reason:
            strange.append(Strange(entry.name, str(reason)))
            continue
        patches.setdefault(role, []).extend(made)
        used.append(entry)
    _expect_finite(path, used)
    frozen = {role: tuple(ps) for role, ps in patches.items()}
    return LoraMatch(frozen, len(used), len(file.entries) + len(file.strange), tuple(strange))


def require_match(match: LoraMatch, lora: str, model: str, architecture: str) -> None:
    """Raise AdapterMismatch unless at least half of the LoRA belongs to the model, with the counts."""
    if 2 * match.matched < match.total or match.matched == 0:
        raise AdapterMismatch(
            f"LoRA {lora!r} does not belong to model {model!r} ({architecture}): {match.matched} of its {match.total} "
            f"keys matched, expected all; the first that did not: {match.strange[0]}"
        )


def _targets(
    entry: AdapterEntry,
    key_maps: Mapping[Role, Mapping[str, tuple[RowRange, ...]]],
    shapes: Mapping[Role, Mapping[str, tuple[int, ...]]],
) -> tuple[Role, tuple[RowRange, ...]]:
    """The component and the rows that `entry` is for. Raises PatchFailed when the model has no such weight."""
    # norms are named by their parameter in some files and by their module in others
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
    """One patch for each range of rows that the entry's weight became. Raises PatchFailed when one does not fit."""
    made = []
    for target in ranges:
        value, offset = placed_value(entry, target, shapes[target.key])
        patch = WeightPatch(target.key, f"{sha256}:{entry.name}", value, offset=offset)
        patch.patched_shape(shapes[target.key])
        made.append(patch)
    return tuple(made)


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
    """One pass without copies: a sum is finite only if all that it is of are. Looks closer when the sum overflowed."""
    if tensor.dtype.itemsize == 1:
        return bool(torch.isfinite(tensor.float()).all())
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
