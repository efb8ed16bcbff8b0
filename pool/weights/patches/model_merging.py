"""Merges models by patches: blends, sums and differences with other models and their patches.

Knows weights by name and does not read them: a merge is a patch value like any other, computed when and where its
weight is needed, from host weights that may be views of mapped files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from modelpool.pool.values.core.errors import AdapterMismatch
from modelpool.pool.weights.patches.full_weights import Convert, ModelDifference, PatchedWeight
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.patches.weight_patch import WeightPatch


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's weights including its patches.

    identity  names the unpatched weights for digests: the file's hash and the component
    weights   host weights by parameter
    patches   applied to them first
    converts  for parameters that are stored quantized, the function that dequantizes them
    """

    identity: str
    weights: Mapping[str, Tensor]
    patches: PatchSet
    converts: Mapping[str, Convert]

    @classmethod
    def of(cls, identity: str, weights: Mapping[str, Tensor], patches: PatchSet | None = None) -> ModelWeights:
        """Return a model with plain weights."""
        return cls(identity, weights, patches or PatchSet(), {})

    def value(self, parameter: str) -> PatchedWeight:
        """Return one parameter as a patch value: the weight and its patches."""
        patches = self.patches.patches_for(parameter)
        return PatchedWeight(self.weights[parameter], patches, self.converts.get(parameter))


def merge(
    other: ModelWeights, strength: float, strength_model: float, parameters: Iterable[str] | None = None
) -> tuple[WeightPatch, ...]:
    """Return patches that make each weight W of a model `strength_model * W + strength * O`, with O the other model's.

    For the floating point `parameters` of the other model, all when None. Raises AdapterMismatch for one that it lacks.
    """
    names = tuple(other.weights) if parameters is None else tuple(parameters)
    _expect_known(names, other)
    return tuple(
        WeightPatch(
            name,
            f"{other.identity}:{other.patches.digest_for([name])}:{name}",
            other.value(name),
            strength,
            strength_model=strength_model,
        )
        for name in names
        if name in other.converts or other.weights[name].is_floating_point()
    )


def blend(other: ModelWeights, share: float, parameters: Iterable[str] | None = None) -> tuple[WeightPatch, ...]:
    """Return patches for `(1 - share) * W + share * O`. With `share` 0 they have no effect."""
    return merge(other, share, 1.0 - share, parameters)


def add(other: ModelWeights, parameters: Iterable[str] | None = None) -> tuple[WeightPatch, ...]:
    """Return patches for `W + O`: O is a difference of two models."""
    return merge(other, 1.0, 1.0, parameters)


def subtract(
    other: ModelWeights, multiplier: float = 1.0, parameters: Iterable[str] | None = None
) -> tuple[WeightPatch, ...]:
    """Return patches for `multiplier * (W - O)`: a difference of two models, to add to a third."""
    return merge(other, -multiplier, multiplier, parameters)


def model_as_lora(
    target: ModelWeights, original: Mapping[str, Tensor], strength: float = 1.0
) -> tuple[WeightPatch, ...]:
    """Return patches that add `strength * (T - original)`: the effect of fine-tuning a model, as a LoRA, without its
    patches.

    Only for floating point weights that both have. `original` are the host weights of the model to patch.
    """
    return tuple(
        WeightPatch(
            name,
            f"{target.identity} as lora:{name}",
            ModelDifference(weight, original[name], target.converts.get(name)),
            strength,
        )
        for name, weight in target.weights.items()
        if name in original and (name in target.converts or weight.is_floating_point())
    )


def _expect_known(names: Iterable[str], other: ModelWeights) -> None:
    missing = sorted(name for name in names if name not in other.weights)
    if missing:
        raise AdapterMismatch(
            f"model {other.identity!r} has no {missing[0]!r}: {len(missing)} of the weights to merge are not among its "
            f"{len(other.weights)}"
        )
