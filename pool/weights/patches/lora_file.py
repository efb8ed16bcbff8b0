"""Matches a LoRA file with a model and returns patches for its components.

Reads the file through a mapping; the factors stay views of it. The key map (`pool.models.lora_names`) maps names of the
file to rows of parameters. Every entry that is not used is counted and listed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile, PatchFailed, counted
from modelpool.pool.values.core.expert_names import HIGH, LOW
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.adapter_prefixes import NamedComponent, readings_of
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.adapter_entries import AdapterEntry, UnmatchedEntry, read_adapters
from modelpool.pool.weights.patches.adapter_values import bias_range, value_for_rows
from modelpool.pool.weights.patches.patch_set import WeightPatch

_NUMBER = re.compile(r"\d+")

KeyMaps: TypeAlias = Mapping[Role, Mapping[str, tuple[RowRange, ...]]]
Shapes: TypeAlias = Mapping[Role, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class LoraMatch:
    """The result of matching a LoRA file with a model.

    patches    for each component, patches of strength 1 in the order of the names
    matched    number of entries that the model uses; `total` in the file
    unmatched  the others, with the reason
    known      some names that the model has
    """

    patches: Mapping[Role, tuple[WeightPatch, ...]]
    matched: int
    total: int
    unmatched: tuple[UnmatchedEntry, ...]
    known: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """Warning for a file that is used in part: counts and the unused entries, only the first of entries
        with names that differ by numbers. None if all are used."""
        if not self.unmatched:
            return None
        groups: dict[tuple[str, str], list[UnmatchedEntry]] = {}
        for entry in self.unmatched:
            groups.setdefault((_NUMBER.sub("*", entry.name), _NUMBER.sub("*", entry.reason)), []).append(entry)
        listed = "; ".join(
            f"{first}" + (f", and {len(others)} named like it" if others else "") for first, *others in groups.values()
        )
        return f"{self.matched} of {counted(self.total, 'key')} matched, not used: {listed}"


def match_lora(path: Path, sha256: str, key_maps: KeyMaps, shapes: Shapes, *, has_experts: bool = False) -> LoraMatch:
    """Find the rows that each entry of the file is for. Entries that do not fit their weight, or come after an
    entry for the same rows, are unmatched.

    A model that `has_experts` has a second diffusion model with the same names and shapes. An entry that names one
    of both models patches that one. Other entries patch the first one if the file has entries for the second,
    else both.

    Checks the matched factors for numbers that are not finite: once per file and process, when the user still gets the
    error, and not at every computation of a patch.

    Raises CorruptFile as `read_adapters` does, and for numbers that are not finite.
    """
    file = read_adapters(path)
    patches: dict[Role, list[WeightPatch]] = {}
    unmatched = list(file.unmatched)
    taken: dict[tuple[Role, str, int, int], str] = {}
    used: list[AdapterEntry] = []
    places = [_place(entry.name, key_maps) for entry in file.entries]
    has_second = any(place is not None and place.expert == LOW for place in places)
    for entry, place in zip(file.entries, places, strict=True):
        try:
            if place is None:
                raise PatchFailed("the model has no weight of this name")
            roles = _roles(place, has_experts, has_second)
            ranges = _ranges(entry, place.ranges, shapes[place.role])
            entry_patches = _patches(entry, sha256, ranges, shapes[place.role])
            rows = [(role, t.key, t.start, t.rows) for role in roles for t in ranges]
            for role, key, start, count in rows:
                if (role, key, start, count) in taken:
                    raise PatchFailed(f"{taken[role, key, start, count]!r} is for the same rows of {key!r}")
            taken |= dict.fromkeys(rows, entry.name)
        except PatchFailed as reason:
            unmatched.append(UnmatchedEntry(entry.name, str(reason)))
            continue
        for role in roles:
            patches.setdefault(role, []).extend(entry_patches)
        used.append(entry)
    _expect_finite(path, used)
    frozen = {role: tuple(ps) for role, ps in patches.items()}
    known = tuple(name for names in key_maps.values() for name in islice(names, 1))
    return LoraMatch(frozen, len(used), len(file.entries) + len(file.unmatched), tuple(unmatched), known)


def require_match(match: LoraMatch, lora: str, model: str, architecture: str) -> None:
    """Raise AdapterMismatch, with the counts, unless at least half of the LoRA matches the model."""
    if 2 * match.matched < match.total or match.matched == 0:
        known = f"; the model's names are such as {', '.join(map(repr, match.known))}" if match.known else ""
        raise AdapterMismatch(
            f"LoRA {lora!r} does not belong to model {model!r} ({architecture}): {match.matched} of its "
            f"{counted(match.total, 'key')} matched, expected all; the first that did not: {match.unmatched[0]}{known}"
        )


def require_shapes(match: LoraMatch, lora: str, model: str, shapes: Shapes) -> None:
    """Raise AdapterMismatch for a LoRA that makes a weight larger: a run gives the module its usual inputs."""
    for role, patches in match.patches.items():
        for patch in patches:
            before = shapes[role if role in shapes else Role.DIFFUSION_MODEL][patch.parameter]
            if (after := patch.patched_shape(before)) != before:
                changed = f"LoRA {lora!r} changes {patch.parameter!r} of model {model!r} from shape {before} to {after}"
                raise AdapterMismatch(
                    f"{changed}, expected the same shape: models that read further channels, such as Flux.1 Canny and "
                    "Depth, run from a file of their own"
                )


@dataclass(frozen=True, slots=True)
class _Place:
    """The weight that a name means: its component and rows, and the expert that the name says."""

    role: Role
    ranges: tuple[RowRange, ...]
    expert: str = ""


def _place(name: str, key_maps: KeyMaps) -> _Place | None:
    """Return the weight that the base name `name` means; None if the model has none of this name.

    The usual names of the model's family apply first, then the same without some of their prefixes.
    """
    for role, known in key_maps.items():
        if (found := _known_name(name, known)) is not None:
            return _Place(role, known[found])
    for reading in readings_of(name):
        for role, known in key_maps.items():
            is_named = {
                NamedComponent.ANY: True,
                NamedComponent.DIFFUSION_MODEL: role is Role.DIFFUSION_MODEL,
                NamedComponent.TEXT_ENCODER: role.is_text_encoder,
            }[reading.component]
            found = next((n for each in reading.names if (n := _known_name(each, known)) is not None), None)
            if is_named and found is not None:
                return _Place(role, known[found], reading.expert)
    return None


def _known_name(name: str, known: Container[str]) -> str | None:
    # some files name norms by their parameter, others by their module
    names = (name, name.removesuffix(".weight"), name.removesuffix(".scale"))
    return next((n for n in names if n in known), None)


def _roles(place: _Place, has_experts: bool, has_second: bool) -> tuple[Role, ...]:
    """Return the components that an entry patches: both diffusion models of two experts, or one of them.

    Raises PatchFailed when it is for an expert, and the model has only one diffusion model.
    """
    if place.role is not Role.DIFFUSION_MODEL:
        return (place.role,)
    if place.expert and not has_experts:
        raise PatchFailed(f"it is for the {place.expert}-noise expert of two, the model has a single diffusion model")
    if place.expert == LOW:
        return (Role.DIFFUSION_MODEL_2,)
    if place.expert == HIGH or has_second or not has_experts:
        return (Role.DIFFUSION_MODEL,)
    return (Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2)


def _ranges(
    entry: AdapterEntry, ranges: tuple[RowRange, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[RowRange, ...]:
    """Return the rows of the weight, or of its bias, that `entry` is for. Raises PatchFailed when the model has no such
    bias."""
    if not entry.is_bias:
        return ranges
    keys = [target.key.removesuffix("weight") + "bias" for target in ranges]
    missing = next((key for key in keys if key not in shapes), None)
    if missing is not None:
        raise PatchFailed(f"the model has no {missing!r}")
    return tuple(bias_range(target, key) for target, key in zip(ranges, keys, strict=True))


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
