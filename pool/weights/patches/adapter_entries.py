"""Reads the entries of a LoRA file: one for each weight or bias, with its kind and tensors.

Knows which tensors each kind of adapter has and how their shapes must match. Does not know models
(`pool.weights.patches.lora_file`) nor the arithmetic of adapters. Reads no factors, only alphas and shapes that are
stored as numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import CorruptFile, counted
from modelpool.pool.weights.keymaps.adapter_keys import adapter_of, bundled_name, normalized_keys, split_key
from modelpool.pool.weights.patches.adapter_config import NEUMANN_TERMS, SavedStrength, read_strengths
from modelpool.pool.weights.quant.open_weights import open_weights

#: limit of a weight's dimensions; a longer stored shape is damaged, and is not read
MAX_DIMENSIONS = 8
#: the matrices that all layers of a VeRA share; the last part of their keys
SHARED_PROJECTIONS = ("vera_A", "vera_B")

#: the last parts of a key, which name a part of an adapter
_END = re.compile(r".*?(\.[^.\d]*(?:\.(?:weight|bias|default))?)$", re.DOTALL)
#: words in the keys of adapters of any kind
_ADAPTER_WORDS = re.compile(r"lora|dora|hada|lokr|oft_|vera|ia3|lycoris|adapter", re.IGNORECASE)


class NoAdapter(CorruptFile):
    """A file without a known kind of adapter. `shapes` are the tensors that it has instead."""

    def __init__(self, path: Path, problem: str, shapes: Mapping[str, Shape]) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem, self.shapes = path, problem, shapes


class AdapterKind(Enum):
    """Kinds of entries. If a name has several for its weight, the later one in this order is used."""

    LORA = "LoRA"
    LOHA = "LoHa"
    LOKR = "LoKr"
    GLORA = "GLoRA"
    OFT = "OFT"
    BOFT = "BOFT"
    ROTATION = "OFT of rotations"
    INPUT_OFT = "OFT of inputs"
    VERA = "VeRA"
    NORM = "norm"
    DIFFERENCE = "difference"
    REPLACEMENT = "replacement"


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter of a file.

    name      base name of its keys
    is_bias   whether it is for the bias of the named weight
    parts     its tensors by part, views of the file's mapping
    alpha     None if missing
    scale     factor of its delta from the file's header, if there is no alpha; of the numbers of an OFT of inputs
    reshaped  shape that the weight is padded to first
    by_peft   whether PEFT wrote it: PEFT's OFTs rotate convolutions the other way than OneTrainer's
    terms     of the series of an OFT of inputs, or 0 if its rotations are exact
    """

    name: str
    kind: AdapterKind
    is_bias: bool
    parts: Mapping[str, Tensor]
    alpha: float | None = None
    scale: float | None = None
    reshaped: Shape | None = None
    by_peft: bool = False
    terms: int = NEUMANN_TERMS

    @property
    def rank(self) -> int | None:
        """The rank that its factors share (of a LoKr the inner one's); None for a LoKr of undecomposed matrices, and
        for kinds without a rank."""
        for factor in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b", "vera_lambda_d"):
            if factor in self.parts:
                return self.parts[factor].shape[0]
        return None


@dataclass(frozen=True, slots=True)
class UnmatchedEntry:
    """A part of a file that is not used, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        """Text for users: 'name (reason)'."""
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The contents of a LoRA file: its entries in the order of their names, and the unused rest."""

    path: Path
    entries: tuple[AdapterEntry, ...]
    unmatched: tuple[UnmatchedEntry, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The parts of an adapter kind: all of one set in `needed`, and any of `optional`."""

    kind: AdapterKind
    needed: tuple[frozenset[str], ...]
    optional: frozenset[str] = field(default_factory=frozenset)
    is_bias: bool = False
    # False: incomplete parts are another model's names, not a damaged adapter
    is_distinctive: bool = True

    @property
    def parts(self) -> frozenset[str]:
        """The parts that only this kind has."""
        return frozenset().union(*self.needed)


def _parts(*names: str) -> frozenset[str]:
    return frozenset(names)


_SHARED = _parts("alpha", "dora_scale")
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
    _Recipe(AdapterKind.GLORA, (_parts("a1", "a2", "b1", "b2"),), _SHARED, is_distinctive=False),
    _Recipe(AdapterKind.OFT, (_parts("oft_blocks"),), _SHARED | {"rescale"}),
    _Recipe(AdapterKind.ROTATION, (_parts("oft_diag"),), _SHARED | {"rescale"}),
    _Recipe(AdapterKind.INPUT_OFT, (_parts("oft_R"),), _SHARED | {"scaled_oft"}),
    _Recipe(AdapterKind.VERA, (_parts("vera_lambda_b", "vera_lambda_d", *SHARED_PROJECTIONS),), _parts("alpha")),
    _Recipe(AdapterKind.NORM, (_parts("w_norm"),), _parts("alpha")),
    _Recipe(AdapterKind.DIFFERENCE, (_parts("diff"),), _parts("alpha")),
    _Recipe(AdapterKind.REPLACEMENT, (_parts("set_weight"),), _parts("alpha")),
    _Recipe(AdapterKind.NORM, (_parts("b_norm"),), _parts("alpha"), is_bias=True),
    _Recipe(AdapterKind.DIFFERENCE, (_parts("diff_b"),), _parts("alpha"), is_bias=True),
)
#: how the kinds that have other parts are called
_KINDS = "LoHa, LoKr, GLoRA, OFT, BOFT, VeRA or differences"
#: kinds that use alpha: as a factor of the delta, or as the limit of a rotation
_ALPHA_KINDS = {AdapterKind.LORA, AdapterKind.LOHA, AdapterKind.LOKR, AdapterKind.GLORA, AdapterKind.OFT}


def read_adapters(path: Path) -> AdapterFile:
    """Read every adapter of the file at `path`.

    Quantized factors are read with their scales.

    Raises BadQuantization for factors with scales that are not known, CorruptFile when the file is incomplete or
    contains no known kind of adapter, when an adapter lacks a factor or has factors that do not share a rank or are not
    floating point, an alpha with an effect that is not one finite number, or an invalid new shape, when two keys are
    the same part of one name, also as parts of two PEFT adapters,
    and as `read_strengths` does.
    """
    # the reference was checked when it was created (`pool.catalog.catalog`); no code of a pickle is run
    weights = open_weights(path, allow_pickle=True)
    strengths = read_strengths(path, weights.header.metadata)
    keys = normalized_keys(weights.shapes)
    grouped: dict[str, dict[str, str]] = {}
    unmatched: list[UnmatchedEntry] = []
    shared: dict[str, str] = {}
    adapters = sorted({name for key in keys.original if (name := adapter_of(key))})
    for key, original in keys.original.items():
        split = split_key(key)
        if key.rpartition(".")[2] in SHARED_PROJECTIONS:
            shared[key.rpartition(".")[2]] = original
            continue
        if bundled_name(key) is not None:
            continue  # an embedding, which prompts name
        if split is None:
            unmatched.append(UnmatchedEntry(original, "no part of any known kind of adapter"))
            continue
        factors = grouped.setdefault(split[0], {})
        if split[1] in factors:
            if len(adapters) > 1:
                raise CorruptFile(
                    f"{path}: found {counted(len(adapters), 'adapter')} for the same weights: "
                    f"{', '.join(map(repr, adapters))} "
                    f"(such as {original!r} and {factors[split[1]]!r}), expected one: save each as a file"
                )
            raise CorruptFile(
                f"{path}: {original!r} and {factors[split[1]]!r} are both the {split[1]!r} factor of {split[0]!r}, "
                "expected one of them"
            )
        factors[split[1]] = original
    if not grouped:
        raise NoAdapter(path, _none_known(unmatched, shared), weights.header.shapes)
    if not any("vera_lambda_b" in parts for parts in grouped.values()):
        unmatched += (UnmatchedEntry(key, "shared by VeRAs, of which the file has none") for key in shared.values())
    entries: list[AdapterEntry] = []
    for name in sorted(grouped):
        if "vera_lambda_b" in grouped[name]:
            if set(shared) < set(SHARED_PROJECTIONS):
                reason = "its VeRA needs vera_A and vera_B, which are not in the file: save it with save_projection"
                unmatched.append(UnmatchedEntry(name, reason))
                continue
            grouped[name] |= shared
        found_keys = grouped[name]
        tensors, found_keys = _as_matrices(
            {part: weights.values_of(key) for part, key in found_keys.items()}, found_keys
        )
        named = _NamedTensors(
            path, name, tensors, found_keys, keys.reshaped.get(name), strengths.of(name), strengths.terms
        )
        for found in _entries(named):
            if isinstance(found, UnmatchedEntry):
                unmatched.append(found)
            else:
                entries.append(found)
    used = {key for names in grouped.values() for key in names.values()} | set(shared.values())
    weights.expect_scales_read(keys.original[key] for key in keys.original if keys.original[key] not in used)
    return AdapterFile(path, tuple(entries), tuple(sorted(unmatched, key=lambda s: s.name)))


@dataclass(frozen=True, slots=True)
class _NamedTensors:
    """The contents of the file at `path` under one name: tensors and keys by part, padded shape, saved strength."""

    path: Path
    name: str
    tensors: Mapping[str, Tensor]
    keys: Mapping[str, str]
    reshaped: Shape | None
    strength: SavedStrength | None
    neumann_terms: int

    @property
    def is_of_peft(self) -> bool:
        """Whether PEFT wrote it: it names its model or the adapter."""
        return "base_model.model." in self.name or any(map(adapter_of, self.keys.values()))


def _none_known(unmatched: Sequence[UnmatchedEntry], shared: Mapping[str, str]) -> str:
    """Return an error message for a file without a known kind of adapter: the keys found and expected."""
    keys = [entry.name for entry in unmatched] + sorted(shared.values())
    of_adapters = [key for key in keys if _ADAPTER_WORDS.search(key)]
    listed = of_adapters or keys
    ends = list(dict.fromkeys(_END.sub(r"\1", key) for key in listed))
    what = "keys of no known kind of adapter" if of_adapters else "no LoRA keys"
    found = f"found {what} among its {counted(len(keys), 'key')}"
    if listed:
        others = f" and {len(ends) - 4} others" if len(ends) > 4 else ""
        found += f", which end in {', '.join(map(repr, ends[:4]))}{others} (such as {listed[0]!r})"
    return (
        f"{found}; expected pairs such as 'NAME.lora_up.weight' and 'NAME.lora_down.weight', or 'NAME.lora_A.weight' "
        f"and 'NAME.lora_B.weight', or the parts of {_KINDS}"
    )


def _as_matrices(tensors: dict[str, Tensor], keys: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and keys of an adapter with PEFT's forms replaced by the common ones.

    PEFT stores the factors of a table of vectors transposed, A (R, rows) and B (columns, R), and its magnitudes as a
    number for each row, whatever their shape, or for each column of a table.
    """
    keys = dict(keys)
    is_table = {"embedding_up", "embedding_down"} <= tensors.keys()
    if is_table:
        up, down = tensors.pop("embedding_down"), tensors.pop("embedding_up")
        tensors |= {"up": up.mT, "down": down.mT} if up.ndim == down.ndim == 2 else {"up": up, "down": down}
        keys |= {"up": keys.pop("embedding_down"), "down": keys.pop("embedding_up")}
    if "magnitude" in tensors and "dora_scale" not in tensors:
        tensors["dora_scale"] = tensors.pop("magnitude").reshape((1, -1) if is_table else (-1,))
        keys["dora_scale"] = keys.pop("magnitude")
    return tensors, keys


def _entries(named: _NamedTensors) -> Iterator[AdapterEntry | UnmatchedEntry]:
    """Yield the adapters that the tensors of one name form; superseded and left-over ones as UnmatchedEntry."""
    name = named.name
    left = set(named.tensors)
    for is_bias in (False, True):
        present = [r for r in _RECIPES if r.is_bias == is_bias and left & r.parts]
        complete = []
        for recipe in present:
            if any(needed <= left for needed in recipe.needed):
                complete.append(recipe)
            elif recipe.is_distinctive:
                raise CorruptFile(_missing_factor(named.path, name, recipe, left))
        for recipe in complete[:-1]:
            yield UnmatchedEntry(
                name, f"its {recipe.kind.value} is superseded by the {complete[-1].kind.value} of the same name"
            )
            left -= recipe.parts
        if complete:
            used = left & (complete[-1].parts | complete[-1].optional)
            if complete[-1].kind is AdapterKind.LOKR:  # a factor that is stored complete needs no product
                used -= {f"{full}_{half}" for full in used for half in "ab"}
            yield _entry(named, complete[-1], used)
            left -= used
        if complete[:-1]:  # optional parts of superseded kinds
            left -= frozenset().union(*(r.optional for r in complete[:-1]))
    if left:
        yield UnmatchedEntry(name, f"{', '.join(sorted(left))} alone: no part of any known kind of adapter")


def _missing_factor(path: Path, name: str, recipe: _Recipe, present: set[str]) -> str:
    nearest = min(recipe.needed, key=lambda needed: (len(needed - present), -len(needed & present), sorted(needed)))
    missing, found = sorted(nearest - present), sorted(present & recipe.parts)
    return f"{path}: {name!r} has no {missing[0]!r} factor, expected one for its {', '.join(found)!r} factor"


def _entry(named: _NamedTensors, recipe: _Recipe, used: Iterable[str]) -> AdapterEntry | UnmatchedEntry:
    parts = {part: named.tensors[part] for part in sorted(used)}
    alpha = None
    if (stored := parts.pop("alpha", None)) is not None and _has_alpha(recipe.kind, parts):
        # a limit of rotations may be infinite
        alpha = _alpha(named, stored, may_be_infinite=recipe.kind is AdapterKind.OFT)
    is_scaled_oft = (flag := parts.pop("scaled_oft", None)) is not None and bool(flag.any())
    reshaped = _new_shape(named, parts.pop("reshape_weight")) if "reshape_weight" in parts else named.reshaped
    for part, tensor in parts.items():
        if not tensor.is_floating_point() or tensor.dtype is torch.float8_e8m0fnu:
            raise CorruptFile(
                f"{named.path}: the {part!r} factor {named.keys[part]!r} has type {str(tensor.dtype).split('.')[-1]}, "
                "expected floating point numbers"
            )
    kind = recipe.kind
    if kind is AdapterKind.OFT and parts["oft_blocks"].ndim == 4:
        kind = AdapterKind.BOFT
    saved = named.strength if alpha is None and _is_scaled(named, kind) else None
    scale = _bias_scale(named) if recipe.is_bias else None
    if is_scaled_oft:
        scale = 0.5 / math.sqrt(max(1, block_size(parts["oft_R"].shape[-1]) - 1))
    entry = AdapterEntry(
        named.name,
        kind,
        recipe.is_bias,
        parts,
        alpha,
        scale if saved is None else saved.scale,
        reshaped if kind is AdapterKind.LORA else None,
        named.is_of_peft,
        named.neumann_terms,
    )
    if any(tensor.numel() == 0 for tensor in parts.values()):
        return UnmatchedEntry(named.name, "its rank is 0: it changes nothing")
    expected = _misfit(entry)
    if expected:
        found = ", ".join(f"{part} {tuple(t.shape)}" for part, t in parts.items())
        raise CorruptFile(
            f"{named.path}: the {kind.value} of {named.name!r} has factors of shapes {found}, expected {expected}"
        )
    rank = entry.rank
    if saved is not None and rank not in (None, saved.rank):
        return UnmatchedEntry(named.name, f"its factors share the rank {rank}, the file's header says {saved.rank}")
    return entry


def _is_scaled(named: _NamedTensors, kind: AdapterKind) -> bool:
    """Whether PEFT scales what it saves as this kind; includes the bias of a LoRA, but no full weights."""
    if kind is AdapterKind.DIFFERENCE:
        return named.keys.get("diff_b", "").endswith(".bias")
    return kind in (AdapterKind.LORA, AdapterKind.LOHA, AdapterKind.LOKR)


def _bias_scale(named: _NamedTensors) -> float | None:
    """Return the factor of the bias of an `up` matrix, which is part of the scaled product; None for a difference."""
    if not named.keys.get("diff_b", "").endswith(".bias") or not {"alpha", "down"} <= named.tensors.keys():
        return None
    return _alpha(named, named.tensors["alpha"]) / max(1, len(named.tensors["down"]))


def _has_alpha(kind: AdapterKind, parts: Container[str]) -> bool:
    """Whether an alpha changes the adapter: not a LoKr of undecomposed matrices, which has no rank."""
    if kind is AdapterKind.LOKR:
        return not ("lokr_w1" in parts and "lokr_w2" in parts)
    return kind in _ALPHA_KINDS


def _alpha(named: _NamedTensors, tensor: Tensor, may_be_infinite: bool = False) -> float:
    is_number = tensor.numel() == 1 and not tensor.is_complex()
    alpha = tensor.float().item() if is_number else math.nan
    if not math.isfinite(alpha) and not (may_be_infinite and alpha == math.inf):
        raise CorruptFile(f"{named.path}: the alpha of {named.name!r} is {tensor.tolist()}, expected one finite number")
    return alpha


def _new_shape(named: _NamedTensors, tensor: Tensor) -> Shape:
    """Return the sizes in `tensor`, after checking that they are few."""
    if tensor.ndim == 1 and 0 < tensor.numel() <= MAX_DIMENSIONS and not tensor.is_complex():
        sizes = tensor.tolist()
        if all(not isinstance(s, bool) and math.isfinite(s) and s == int(s) > 0 for s in sizes):
            return tuple(int(size) for size in sizes)
        found = str(sizes)
    else:
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    raise CorruptFile(
        f"{named.path}: {named.keys['reshape_weight']!r} is {found}, expected 1 to {MAX_DIMENSIONS} integers above 0"
    )


def _misfit(entry: AdapterEntry) -> str | None:
    """Return the expected shapes of the entry's parts; None when its shapes match each other."""
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
            return None if all(p[part].ndim > 1 for part in ("a1", "a2", "b1", "b2")) else "matrices"
        case AdapterKind.VERA:
            fits = p["vera_A"].ndim == p["vera_B"].ndim == 2
            fits = fits and p["vera_lambda_b"].ndim == p["vera_lambda_d"].ndim == 1
            return None if fits else "two matrices and two vectors"
        case AdapterKind.OFT | AdapterKind.BOFT:
            blocks = p["oft_blocks"]
            fits = blocks.ndim in (3, 4) and blocks.shape[-1] == blocks.shape[-2] > 0
            return None if fits else "blocks (n, b, b), or (m, n, b, b) for a butterfly"
        case AdapterKind.ROTATION:
            blocks = p["oft_diag"]
            return None if blocks.ndim == 3 and blocks.shape[-1] == blocks.shape[-2] > 0 else "blocks (n, b, b)"
        case AdapterKind.INPUT_OFT:
            fits = p["oft_R"].ndim == 2 and block_size(p["oft_R"].shape[1]) > 1
            return None if fits else "the numbers above the diagonals of blocks, (n, b * (b - 1) / 2)"
        case _:
            return None


def block_size(elements: int) -> int:
    """Return the size of a square matrix with so many elements above its diagonal; 0 if there is none."""
    size = (1 + math.isqrt(1 + 8 * elements)) // 2
    return size if size * (size - 1) // 2 == elements else 0


def _is_point(factor: Tensor) -> bool:
    """Whether `factor` is a matrix, perhaps as a convolution with a kernel of one."""
    return factor.ndim > 1 and math.prod(factor.shape[2:]) == 1


def _is_product(a: Tensor, b: Tensor, core: Tensor | None) -> bool:
    if a.ndim < 2 or b.ndim < 2:
        return False
    if core is None:
        return math.prod(a.shape[1:]) == b.shape[0] > 0
    fits = core.ndim > 2 and _is_point(a) and _is_point(b)
    return fits and (a.shape[0], b.shape[0]) == tuple(core.shape[:2]) and b.shape[0] > 0
