"""What a LoRA file holds: one entry for each weight or bias that it is about, of one kind, with its tensors.

Knows which tensors make up which kind of adapter and how they must fit each other. Does not know models
(`pool.patches.lora_file`) nor what adapters compute (`pool.patches.adapters`). Reads no factors: only alphas and shapes
that are kept as numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.adapter_keys import common_spelling, split_key
from modelpool.pool.mapping.mapped_file import MappedFile
from modelpool.pool.patches.adapter_config import SavedStrength, read_strengths

#: of a weight; what is more is damage, and is not read
MAX_DIMENSIONS = 8
#: ends of the scales of quantized weights: 'NAME.scale_weight', 'NAME.weight_scale' and 'NAME_scale'
_SCALE_ENDS = re.compile(r"(\.scale_weight|\.weight_scale|(?<=[^.])_scale)$")


class AdapterKind(Enum):
    """Kinds of entries. Where one name has several for its weight, the later one here counts."""

    LORA = "LoRA"
    LOHA = "LoHa"
    LOKR = "LoKr"
    GLORA = "GLoRA"
    OFT = "OFT"
    BOFT = "BOFT"
    NORM = "norm"
    DIFFERENCE = "difference"
    REPLACEMENT = "replacement"


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter of a file.

    name      base name of its keys
    is_bias   it is about the bias that belongs to the named weight
    parts     its tensors by part, views of the file's mapping
    alpha     None without one
    scale     what its delta is multiplied with where the file's header says so, and no alpha does
    reshaped  the shape that the weight is padded to first
    """

    name: str
    kind: AdapterKind
    is_bias: bool
    parts: Mapping[str, Tensor]
    alpha: float | None = None
    scale: float | None = None
    reshaped: Shape | None = None

    @property
    def rank(self) -> int | None:
        """The rank that its factors share: of a LoKr the inner one's; None for a LoKr of whole matrices, and for what
        has no rank."""
        for factor in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
            if factor in self.parts:
                return self.parts[factor].shape[0]
        return None


@dataclass(frozen=True, slots=True)
class Strange:
    """Something of a file that is not used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        """For people: 'name (reason)'."""
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA file, read: its entries in the order of their names, and what it holds beside."""

    path: Path
    entries: tuple[AdapterEntry, ...]
    strange: tuple[Strange, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Which parts an adapter kind has: all of one of `needed`, and any of `optional`."""

    kind: AdapterKind
    needed: tuple[frozenset[str], ...]
    optional: frozenset[str] = field(default_factory=frozenset)
    is_bias: bool = False
    # without all it needs it is some other model's name for something, not half an adapter
    tells: bool = True

    @property
    def parts(self) -> frozenset[str]:
        """The parts that only this kind has."""
        return frozenset().union(*self.needed)


def _parts(*names: str) -> frozenset[str]:
    return frozenset(names)


_SHARED = _parts("alpha", "dora_scale", "magnitude")
_RECIPES = (
    _Recipe(AdapterKind.LORA, (_parts("up", "down"),), _SHARED | {"mid", "reshape_weight"}),
    _Recipe(
        AdapterKind.LOHA,
        (_parts("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),),
        _SHARED | {"hada_t1", "hada_t2"},
    ),
    _Recipe(
        AdapterKind.LOKR,
        tuple(
            _parts(*(f"lokr_{part}" for part in (*outer, *inner)))
            for outer in (("w1",), ("w1_a", "w1_b"))
            for inner in (("w2",), ("w2_a", "w2_b"))
        ),
        _SHARED | {"lokr_t2"},
    ),
    _Recipe(AdapterKind.GLORA, (_parts("a1", "a2", "b1", "b2"),), _SHARED, tells=False),
    _Recipe(AdapterKind.OFT, (_parts("oft_blocks"),), _SHARED | {"rescale"}),
    _Recipe(AdapterKind.NORM, (_parts("w_norm"),)),
    _Recipe(AdapterKind.DIFFERENCE, (_parts("diff"),)),
    _Recipe(AdapterKind.REPLACEMENT, (_parts("set_weight"),)),
    _Recipe(AdapterKind.NORM, (_parts("b_norm"),), is_bias=True),
    _Recipe(AdapterKind.DIFFERENCE, (_parts("diff_b"),), is_bias=True),
)


def read_adapters(path: Path) -> AdapterFile:
    """Every adapter of the file at `path`.

    Factors that are scaled by a tensor of their own make their name strange.

    Raises CorruptFile when the file is not whole or holds nothing of a LoRA, when an adapter lacks a factor, has
    factors that share no rank or are no floating point numbers, an alpha that is not one finite number, or a new shape
    that is none, when two keys are the same part of one name, and as `read_strengths` does.
    """
    # whoever made the reference (`pool.catalog.catalog`) has allowed what it leads to; nothing in a pickle is run
    mapped = MappedFile.open(path, allow_pickle=True)
    strengths = read_strengths(path, mapped.header.metadata)
    keys = common_spelling(mapped.header.shapes)
    scales = _scale_keys(mapped.header.tensors)
    grouped: dict[str, dict[str, str]] = {}
    strange: list[Strange] = []
    for key, original in keys.original.items():
        split = split_key(key)
        if original in scales.values():
            continue  # told with the factor that it belongs to
        if split is None:
            strange.append(Strange(original, "no part of any known kind of adapter"))
            continue
        held = grouped.setdefault(split[0], {})
        if split[1] in held:
            raise CorruptFile(
                f"{path}: {original!r} and {held[split[1]]!r} are both the {split[1]!r} factor of {split[0]!r}, "
                "expected one of them"
            )
        held[split[1]] = original
    if not grouped:
        raise CorruptFile(f"{path}: found no LoRA keys, expected pairs such as 'NAME.lora_up.weight' and 'lora_down'")
    entries: list[AdapterEntry] = []
    for name in sorted(grouped):
        scaled = [f"{own!r} is scaled by {scales[own]!r}" for own in grouped[name].values() if own in scales]
        if scaled:
            strange.append(Strange(name, f"{', '.join(scaled)}, which is not known here"))
            continue
        tensors = {part: mapped.tensor(own) for part, own in grouped[name].items()}
        found_here = _Held(path, name, tensors, grouped[name], keys.reshaped.get(name), strengths.of(name))
        for found in _entries(found_here):
            if isinstance(found, Strange):
                strange.append(found)
            else:
                entries.append(found)
    return AdapterFile(path, tuple(entries), tuple(sorted(strange, key=lambda s: s.name)))


@dataclass(frozen=True, slots=True)
class _Held:
    """What the file at `path` has under one name: tensors and keys by part, and what is told of them elsewhere."""

    path: Path
    name: str
    tensors: Mapping[str, Tensor]
    keys: Mapping[str, str]
    reshaped: Shape | None
    strength: SavedStrength | None


def _scale_keys(keys: Iterable[str]) -> dict[str, str]:
    """For each of `keys` that has a scale beside it, as quantized weights have: the key of the scale."""
    known = set(keys)
    beside = {key: _SCALE_ENDS.sub("", key) for key in sorted(known) if _SCALE_ENDS.search(key)}
    return {factor: scale for scale, stem in beside.items() for factor in (stem, f"{stem}.weight") if factor in known}


def _entries(held: _Held) -> Iterator[AdapterEntry | Strange]:
    """The adapters that the tensors of one name make up; what counts less than another, or for nothing, is strange."""
    name = held.name
    left = set(held.tensors)
    for is_bias in (False, True):
        present = [r for r in _RECIPES if r.is_bias == is_bias and left & r.parts]
        whole = []
        for recipe in present:
            if any(needed <= left for needed in recipe.needed):
                whole.append(recipe)
            elif recipe.tells:
                raise CorruptFile(_lacks(held.path, name, recipe, left))
        for recipe in whole[:-1]:
            yield Strange(name, f"its {recipe.kind.value} counts less than the {whole[-1].kind.value} of the same name")
            left -= recipe.parts
        if whole:
            used = left & (whole[-1].parts | whole[-1].optional)
            yield _entry(held, whole[-1], used)
            left -= used
        if whole[:-1]:  # what belonged to those that count less
            left -= frozenset().union(*(r.optional for r in whole[:-1]))
    if left:
        yield Strange(name, f"{', '.join(sorted(left))} alone: no part of any known kind of adapter")


def _lacks(path: Path, name: str, recipe: _Recipe, held: set[str]) -> str:
    nearest = min(recipe.needed, key=lambda needed: (len(needed - held), -len(needed & held), sorted(needed)))
    missing, found = sorted(nearest - held), sorted(held & recipe.parts)
    return f"{path}: {name!r} has no {missing[0]!r} factor, expected one beside its {', '.join(found)!r} factor"


def _entry(held: _Held, recipe: _Recipe, used: Iterable[str]) -> AdapterEntry | Strange:
    parts = {part: held.tensors[part] for part in sorted(used)}
    alpha = _alpha(held, parts.pop("alpha")) if "alpha" in parts else None
    reshaped = _new_shape(held, parts.pop("reshape_weight")) if "reshape_weight" in parts else held.reshaped
    for part, tensor in parts.items():
        if not tensor.is_floating_point() or tensor.dtype is torch.float8_e8m0fnu:
            raise CorruptFile(
                f"{held.path}: the {part!r} factor {held.keys[part]!r} has type {str(tensor.dtype).split('.')[-1]}, "
                "expected floating point numbers"
            )
    kind = recipe.kind
    if kind is AdapterKind.OFT and parts["oft_blocks"].ndim == 4:
        kind = AdapterKind.BOFT
    told = held.strength if alpha is None and _is_scaled(held, kind) else None
    entry = AdapterEntry(
        held.name,
        kind,
        recipe.is_bias,
        parts,
        alpha,
        None if told is None else told.scale,
        reshaped if kind is AdapterKind.LORA else None,
    )
    expected = _misfit(entry)
    if expected:
        found = ", ".join(f"{part} {tuple(t.shape)}" for part, t in parts.items())
        raise CorruptFile(
            f"{held.path}: the {kind.value} of {held.name!r} has factors of shapes {found}, expected {expected}"
        )
    rank = entry.rank
    if told is not None and rank not in (None, told.rank):
        return Strange(held.name, f"its factors share the rank {rank}, the file's header says {told.rank}")
    return entry


def _is_scaled(held: _Held, kind: AdapterKind) -> bool:
    """Whether PEFT scales what it saves under this name; the bias of a LoRA as well, and no whole weight."""
    if kind is AdapterKind.DIFFERENCE:
        return held.keys.get("diff_b", "").endswith(".bias")
    return kind in (AdapterKind.LORA, AdapterKind.LOHA, AdapterKind.LOKR)


def _alpha(held: _Held, tensor: Tensor) -> float:
    is_number = tensor.numel() == 1 and not tensor.is_complex()
    alpha = tensor.float().item() if is_number else math.nan
    if not math.isfinite(alpha):
        raise CorruptFile(f"{held.path}: the alpha of {held.name!r} is {tensor.tolist()}, expected one finite number")
    return alpha


def _new_shape(held: _Held, tensor: Tensor) -> Shape:
    """The sizes in `tensor`. They are few, which is made sure of before any is read."""
    if tensor.ndim == 1 and 0 < tensor.numel() <= MAX_DIMENSIONS and not tensor.is_complex():
        sizes = tensor.tolist()
        if all(not isinstance(s, bool) and math.isfinite(s) and s == int(s) > 0 for s in sizes):
            return tuple(int(size) for size in sizes)
        found = str(sizes)
    else:
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    raise CorruptFile(
        f"{held.path}: {held.keys['reshape_weight']!r} is {found}, expected 1 to {MAX_DIMENSIONS} whole numbers above 0"
    )


def _misfit(entry: AdapterEntry) -> str | None:
    """What was expected of the entry's shapes; None when they fit each other."""
    p = entry.parts
    match entry.kind:
        case AdapterKind.LORA:
            up, down, mid = p["up"], p["down"], p.get("mid")
            if mid is not None:
                fits = mid.ndim > 2 and _is_point(up) and _is_point(down)
                fits = fits and (up.shape[1], down.shape[0]) == tuple(mid.shape[:2]) and down.shape[0] > 0
                return None if fits else "(O, R, 1, ..), (R, I, 1, ..) and (R, R, kernel..)"
            fits = up.ndim > 1 and down.ndim > 1 and math.prod(up.shape[1:]) == down.shape[0] > 0
            return None if fits else "(O, R) and (R, I)"
        case AdapterKind.LOHA:
            pairs = [(p[f"hada_w{n}_a"], p[f"hada_w{n}_b"], p.get(f"hada_t{n}")) for n in (1, 2)]
            fits = ("hada_t1" in p) == ("hada_t2" in p) and all(_is_product(*pair) for pair in pairs)
            return None if fits else "twice (O, R) and (R, I), or (R, O), (R, I) and (R, R, kernel..)"
        case AdapterKind.LOKR:
            fits = "lokr_t2" not in p or "lokr_w2_a" in p
            for n, core in ((1, None), (2, p.get("lokr_t2"))):
                if f"lokr_w{n}" in p:
                    fits = fits and p[f"lokr_w{n}"].ndim > 1
                else:
                    fits = fits and _is_product(p[f"lokr_w{n}_a"], p[f"lokr_w{n}_b"], core)
            return None if fits else "matrices, or products that share a rank"
        case AdapterKind.GLORA:
            return None if all(t.ndim > 1 for t in p.values()) else "matrices"
        case AdapterKind.OFT | AdapterKind.BOFT:
            blocks = p["oft_blocks"]
            fits = blocks.ndim in (3, 4) and blocks.shape[-1] == blocks.shape[-2] > 0
            return None if fits else "blocks (n, b, b), or (m, n, b, b) for a butterfly"
        case _:
            return None


def _is_point(factor: Tensor) -> bool:
    """Whether it is a matrix, perhaps as a convolution with a kernel of one."""
    return factor.ndim > 1 and math.prod(factor.shape[2:]) == 1


def _is_product(a: Tensor, b: Tensor, core: Tensor | None) -> bool:
    if a.ndim < 2 or b.ndim < 2:
        return False
    if core is None:
        return math.prod(a.shape[1:]) == b.shape[0] > 0
    fits = core.ndim > 2 and _is_point(a) and _is_point(b)
    return fits and (a.shape[0], b.shape[0]) == tuple(core.shape[:2]) and b.shape[0] > 0
