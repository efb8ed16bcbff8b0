"""What a LoRA file holds: one entry for each weight or bias that it is about, of one kind, with its tensors.

Knows which tensors make up which kind of adapter and how they must fit each other. Does not know models
(`pool.patches.lora_file`) nor what adapters compute (`pool.patches.adapters`). Reads no factors: only alphas and shapes
that are kept as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torch import Tensor

from pool.checkpoints.adapter_keys import common_spelling, split_key
from pool.checkpoints.mapped_file import MappedFile
from pool.checkpoints.safetensors_file import Shape
from pool.errors import CorruptFile


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
    reshaped  the shape that the weight is padded to first
    """

    name: str
    kind: AdapterKind
    is_bias: bool
    parts: Mapping[str, Tensor]
    alpha: float | None = None
    reshaped: Shape | None = None


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

    Raises CorruptFile when the file is not whole or holds nothing of a LoRA, when an adapter lacks a factor, has
    factors that share no rank, or an alpha that is not one finite number, and when two keys are the same part of one
    name.
    """
    mapped = MappedFile.open(path)
    keys = common_spelling(mapped.header.shapes)
    grouped: dict[str, dict[str, str]] = {}
    strange: list[Strange] = []
    for key, original in keys.original.items():
        split = split_key(key)
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
        tensors = {part: mapped.tensor(original) for part, original in grouped[name].items()}
        for found in _entries(path, name, tensors, keys.reshaped.get(name)):
            if isinstance(found, Strange):
                strange.append(found)
            else:
                entries.append(found)
    return AdapterFile(path, tuple(entries), tuple(sorted(strange, key=lambda s: s.name)))


def _entries(
    path: Path, name: str, tensors: Mapping[str, Tensor], reshaped: Shape | None
) -> Iterator[AdapterEntry | Strange]:
    """The adapters that `tensors` of one name make up; what counts less than another, or for nothing, is strange."""
    left = set(tensors)
    for is_bias in (False, True):
        present = [r for r in _RECIPES if r.is_bias == is_bias and left & r.parts]
        whole = []
        for recipe in present:
            if any(needed <= left for needed in recipe.needed):
                whole.append(recipe)
            elif recipe.tells:
                raise CorruptFile(_lacks(path, name, recipe, left))
        for recipe in whole[:-1]:
            yield Strange(name, f"its {recipe.kind.value} counts less than the {whole[-1].kind.value} of the same name")
            left -= recipe.parts
        if whole:
            used = left & (whole[-1].parts | whole[-1].optional)
            yield _entry(path, name, whole[-1], {part: tensors[part] for part in sorted(used)}, reshaped)
            left -= used
        if whole[:-1]:  # what belonged to those that count less
            left -= frozenset().union(*(r.optional for r in whole[:-1]))
    if left:
        yield Strange(name, f"{', '.join(sorted(left))} alone: no part of any known kind of adapter")


def _lacks(path: Path, name: str, recipe: _Recipe, held: set[str]) -> str:
    nearest = min(recipe.needed, key=lambda needed: (len(needed - held), -len(needed & held), sorted(needed)))
    missing, found = sorted(nearest - held), sorted(held & recipe.parts)
    return f"{path}: {name!r} has no {missing[0]!r} factor, expected one beside its {', '.join(found)!r} factor"


def _entry(path: Path, name: str, recipe: _Recipe, parts: dict[str, Tensor], reshaped: Shape | None) -> AdapterEntry:
    alpha = parts.pop("alpha", None)
    shape_tensor = parts.pop("reshape_weight", None)
    if shape_tensor is not None:
        reshaped = tuple(int(size) for size in shape_tensor.tolist())
    kind = recipe.kind
    if kind is AdapterKind.OFT and parts["oft_blocks"].ndim == 4:
        kind = AdapterKind.BOFT
    entry = AdapterEntry(
        name,
        kind,
        recipe.is_bias,
        parts,
        None if alpha is None else _alpha(path, name, alpha),
        reshaped if kind is AdapterKind.LORA else None,
    )
    expected = _misfit(entry)
    if expected:
        found = ", ".join(f"{part} {tuple(t.shape)}" for part, t in parts.items())
        raise CorruptFile(f"{path}: the {kind.value} of {name!r} has factors of shapes {found}, expected {expected}")
    return entry


def _alpha(path: Path, name: str, tensor: Tensor) -> float:
    alpha = tensor.float().item() if tensor.numel() == 1 else math.nan
    if not math.isfinite(alpha):
        raise CorruptFile(f"{path}: the alpha of {name!r} is {tensor.tolist()}, expected one finite number")
    return alpha


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
