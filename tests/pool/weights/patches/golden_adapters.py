"""The golden cases of `tests/golden/adapters.*`: their inputs drawn again, and their patches as the pool's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from modelpool.pool.weights.patches.additive import Additive, Padded
from modelpool.pool.weights.patches.dora import DoRA
from modelpool.pool.weights.patches.full_weights import Difference, PatchedWeight, Replacement, padded_difference
from modelpool.pool.weights.patches.glora import glora_of
from modelpool.pool.weights.patches.loha import HadamardFactor, LoHa
from modelpool.pool.weights.patches.lokr import KroneckerFactor, LoKr
from modelpool.pool.weights.patches.lora import LowRank, TuckerLowRank
from modelpool.pool.weights.patches.oft import BOFT, OFT
from modelpool.pool.weights.patches.weight_patch import Offset, PatchValue, Shape, WeightPatch, swap_scale_shift

GOLDEN = Path(__file__).resolve().parents[3] / "golden"


@dataclass(frozen=True)
class AdapterCase:
    """One golden case: a weight, patches for it, and what comes out."""

    name: str
    weight: Tensor
    patches: tuple[WeightPatch, ...]
    expected: Tensor
    specification: Mapping[str, Any]

    def patched(self) -> Tensor:
        """The weight with the patches, computed as the pool does: in float32, rounded once at the end."""
        working = self.weight.float().clone()
        for patch in self.patches:
            working = patch(working)
        return working.to(self.weight.dtype)


def adapter_cases() -> dict[str, AdapterCase]:
    """Every golden case by name."""
    outputs = load_file(GOLDEN / "adapters.safetensors")
    return {s["name"]: _case(s, outputs) for s in json.loads((GOLDEN / "adapters.json").read_text())}


def draw(seed: int, specs: list[Any]) -> dict[str, Tensor]:
    """The inputs of a case: one generator, tensors in order."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale + shift for name, shape, scale, shift in specs}


def value_of(kind: str, drawn: Mapping[str, Tensor], params: Mapping[str, Any], shape: Shape) -> PatchValue:
    """The pool's value for a patch of `kind` with the tensors `drawn`, for a weight of `shape`."""
    alpha = params.get("alpha")
    if kind == "diff":
        return padded_difference(drawn["diff"]) if params.get("pad_weight") else Difference(drawn["diff"])
    if kind == "set":
        return Replacement(drawn["value"])
    if kind == "nested":
        inner = WeightPatch("k", "inner", Difference(drawn["inner"]), params["inner_strength"])
        return PatchedWeight(drawn["base"], (inner,))
    if "reshape" in params:
        shape = tuple(params["reshape"])
    made = additive(kind, drawn, alpha, shape)
    if "dora" in drawn:
        made = DoRA(made, drawn["dora"], shape)
    return Padded(made, shape) if "reshape" in params else made


def additive(kind: str, t: Mapping[str, Tensor], alpha: float | None, shape: Shape) -> Additive:
    """The adapter of `kind` alone."""
    if kind == "lora":
        scale = 1.0 if alpha is None else alpha / t["down"].shape[0]
        if "mid" in t:
            return TuckerLowRank(t["up"], t["down"], t["mid"], scale)
        return LowRank(t["up"].flatten(1), t["down"].flatten(1), scale)
    if kind == "loha":
        scale = 1.0 if alpha is None else alpha / t["w1b"].shape[0]
        return LoHa(HadamardFactor(t["w1a"], t["w1b"]), HadamardFactor(t["w2a"], t["w2b"]), scale)
    if kind == "lokr":
        outer = KroneckerFactor(t.get("w1"), t.get("w1a"), t.get("w1b"))
        inner = KroneckerFactor(t.get("w2"), t.get("w2a"), t.get("w2b"), t.get("t2"))
        rank = inner.rank or outer.rank
        return LoKr(outer, inner, 1.0 if alpha is None or rank is None else alpha / rank)
    if kind == "glora":
        return glora_of(t["a1"], t["a2"], t["b1"], t["b2"], alpha, shape)
    made = OFT if kind == "oft" else BOFT
    return made(t["blocks"], t.get("rescale"), alpha or 0.0, shape)


def _case(specification: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> AdapterCase:
    drawn = draw(specification["seed"], specification["specs"])
    weight = drawn["weight"].to(getattr(torch, specification["weight_dtype"]))
    patches = []
    for index, patch in enumerate(specification["patches"]):
        own = {name.split(".", 1)[1]: t for name, t in drawn.items() if name.startswith(f"{index}.")}
        offset = Offset(*patch["offset"]) if patch.get("offset") else None
        shape = tuple(weight.shape) if offset is None else offset.shape_of(tuple(weight.shape))
        patches.append(
            WeightPatch(
                "k",
                f"{specification['name']}:{index}",
                value_of(patch["kind"], own, patch.get("params", {}), shape),
                patch.get("strength", 1.0),
                strength_model=patch.get("strength_model", 1.0),
                offset=offset,
                function=swap_scale_shift() if patch.get("function") else None,
            )
        )
    name = specification["name"]
    return AdapterCase(name, weight, tuple(patches), outputs[name], specification)
