"""A checkpoint and the LoRAs that were asked for on it: built modules, sizes and patch sets.

What the engine runs and what the catalog describes come from here, so that both speak of the same components, sizes and
digests. Opening maps the file and builds modules without weights; nothing is read until it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pool.checkpoints.build import BuiltComponent, Checkpoint, open_checkpoint
from pool.checkpoints.lora_names import lora_key_map
from pool.devices.capabilities import DeviceCapabilities, capabilities_of
from pool.ops import stored_bytes
from pool.patches.lora_file import LoraMatch, match_lora, require_match
from pool.patches.patch_set import PatchSet
from pool.precision import compute_dtype
from pool.recent import Recent
from pool.sizing import OwnWeights, component_spec, component_use, own_weights
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from pool.weight_form import WeightForm, resident_form
from pool.work import LoraRef, ModelRef

#: patch sets of a model that are kept; each is some 20 KiB and made again in about a millisecond
PATCH_SETS_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Component:
    """One role of an open checkpoint, on the host."""

    key: ComponentKey
    role: Role
    built: BuiltComponent
    form: WeightForm
    weights: tuple[OwnWeights, ...]

    def spec(self) -> ComponentSpec:
        """Its sizes."""
        return component_spec(self.key, self.role, self.weights, self.form)

    def use(self, patches: PatchSet, passes: int = 1) -> ComponentUse:
        """What a run with `patches` needs."""
        return component_use(self.key, self.weights, self.form, patches, passes)


class OpenModel:
    """One checkpoint, in a file or in several. Components are built when first asked for and kept."""

    def __init__(self, ref: ModelRef, device: str | DeviceCapabilities) -> None:
        """Map the file. `device` is what components are to run on, or the name of its kind where no more is known.

        Raises CorruptFile or UnknownArchitecture.
        """
        self.ref = ref
        # whoever made the reference (`pool.catalog`) has allowed what it leads to; nothing in a pickle is run
        self.checkpoint: Checkpoint = open_checkpoint(Path(ref.path), allow_pickle=True)
        #: what its latents mean
        self.latent = self.checkpoint.latent
        self._device = capabilities_of(device)
        self._components: dict[Role, Component] = {}
        self._matches: dict[str, LoraMatch] = {}
        self._patch_sets: Recent[tuple[Role, tuple[LoraRef, ...]], PatchSet] = Recent(PATCH_SETS_REMEMBERED)

    def component(self, role: Role) -> Component:
        """The component of this role, built."""
        if role not in self._components:
            built = self.checkpoint.build(role)
            weights = tuple(own_weights(built.module))
            self._components[role] = Component(
                ComponentKey(f"{self.ref.name}/{role.value}@{self.ref.sha256[:10]}"),
                role,
                built,
                _form(role, weights, self._device),
                weights,
            )
        return self._components[role]

    def match(self, lora: LoraRef) -> LoraMatch:
        """How a LoRA meets this model. Raises CorruptFile, or AdapterMismatch when it belongs to another."""
        if lora.sha256 not in self._matches:
            components = [self.component(role) for role in self.checkpoint.roles if role is not Role.VAE]
            match = match_lora(
                Path(lora.path),
                lora.sha256,
                {c.role: lora_key_map(c.built) for c in components},
                {c.role: {n: tuple(p.shape) for n, p in c.built.module.named_parameters()} for c in components},
            )
            require_match(match, lora.name, self.ref.name, self.checkpoint.family.title)
            self._matches[lora.sha256] = match
        return self._matches[lora.sha256]

    def patch_set(self, role: Role, loras: Iterable[LoraRef]) -> PatchSet:
        """The patches of `loras`, in order and at their strengths, for one component."""
        chosen = tuple(loras)

        def find() -> PatchSet:
            patches = (
                replace(patch, strength=lora.strength)
                for lora in chosen
                for patch in self.match(lora).patches.get(role, ())
            )
            return PatchSet(tuple(patches))

        return self._patch_sets.get((role, chosen), find)


def _form(role: Role, weights: Sequence[OwnWeights], device: DeviceCapabilities) -> WeightForm:
    storage = _largest_dtype(weights)
    computed = compute_dtype(role, storage, device)
    parameters = sum(p.numel() for own in weights for p in own.parameters.values())
    return WeightForm(computed, resident_form(role, storage, computed, parameters, device))


def _largest_dtype(weights: Iterable[OwnWeights]) -> torch.dtype:
    """The floating point dtype that holds the most bytes of a component."""
    bytes_of: dict[torch.dtype, int] = {}
    for own in weights:
        for parameter in own.parameters.values():
            if parameter.is_floating_point():
                bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + stored_bytes(parameter)
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])
