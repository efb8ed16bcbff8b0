"""A checkpoint and the LoRAs that were asked for on it: built modules, sizes and patch sets.

What the engine runs and what the catalog describes come from here, so that both speak of the same components, sizes and
digests. Opening maps the file and builds modules without weights; nothing is read until it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelpool.pool.core.expert_names import HIGH, LOW
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.stage_params import LoraRef, ModelRef, component_key
from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.loading.build_checkpoint import BuiltComponent, Checkpoint, open_checkpoint
from modelpool.pool.loading.open_tokenizer import tokenizer_of
from modelpool.pool.lora_names.key_map import lora_key_map
from modelpool.pool.ops.packed import stored_bytes
from modelpool.pool.patcher.compute_dtype import compute_dtype
from modelpool.pool.patcher.weight_bytes import OwnWeights, component_spec, component_use, own_weights
from modelpool.pool.patcher.weight_form import WeightForm, resident_form
from modelpool.pool.patches.lora_file import LoraMatch, match_lora, require_match
from modelpool.pool.patches.patch_set import PatchSet, WeightPatch
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.text.reading import Reading
from modelpool.pool.text.text_tokenizer import TextTokenizer

#: which of two models LoRAs call so that are for one of them
_NOISE_OF = {Role.DIFFUSION_MODEL: HIGH, Role.DIFFUSION_MODEL_2: LOW}
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


@dataclass(frozen=True, slots=True)
class RoleReading:
    """How one text encoder of a model is read.

    place      among the readings of the model's set of text encoders
    tokenizer  None where it is CLIP's, which comes with the project
    """

    reading: Reading
    place: int
    tokenizer: TextTokenizer | None


class OpenModel:
    """One checkpoint, in a file or in several. Components are built when first asked for and kept."""

    def __init__(self, ref: ModelRef, device: str | DeviceCapabilities, *, whole: bool = True) -> None:
        """Map the file. `device` is what components are to run on, or the name of its kind where no more is known. What
        need not be `whole` is there to be saved, as `open_checkpoint` says.

        Raises CorruptFile or UnknownArchitecture.
        """
        self.ref = ref
        # whoever made the reference (`pool.catalog.catalog`) has allowed what it leads to; nothing in a pickle is run
        self.checkpoint: Checkpoint = open_checkpoint(ref.source, allow_pickle=True, whole=whole)
        #: what its latents mean
        self.latent = self.checkpoint.latent
        self._device = capabilities_of(device)
        self._components: dict[Role, Component] = {}
        self._keys = dict(ref.components)
        self._readings: dict[Role, RoleReading] = {}
        self._matches: dict[str, LoraMatch] = {}
        self._patch_sets: Recent[tuple[Role, tuple[LoraRef, ...]], PatchSet] = Recent(PATCH_SETS_REMEMBERED)

    def component(self, role: Role) -> Component:
        """The component of this role, built."""
        if role not in self._components:
            built = self.checkpoint.build(role)
            weights = tuple(own_weights(built.module))
            self._components[role] = Component(
                self._keys.get(role) or component_key(self.ref.name, role, self.ref.sha256),
                role,
                built,
                form_of(role, weights, self._device, self.checkpoint.family.dtypes),
                weights,
            )
        return self._components[role]

    def reading(self, role: Role) -> RoleReading:
        """How the text encoder `role` is read; its tokenizer is looked for when it is first asked for.

        Raises TokenizerMissing, saying which file to put where, when there is none.
        """
        if role not in self._readings:
            family = self.checkpoint.family
            readings, place = readings_of(family.text_set), self.place(role)
            assert readings is not None, f"{family.name}: nothing says how its texts are read"
            reading = readings[place]
            tokenizer = None if reading.is_clip else self._tokenizer(role, reading)
            self._readings[role] = RoleReading(reading, place, tokenizer)
        return self._readings[role]

    def _tokenizer(self, role: Role, reading: Reading) -> TextTokenizer:
        return tokenizer_of(self.checkpoint, role, reading, self.component(role).built.module)

    def place(self, role: Role) -> int:
        """The place of a text encoder among those that models of its family have."""
        return TEXT_ROLES.index(role)

    def match(self, lora: LoraRef) -> LoraMatch:
        """How a LoRA meets this model. Raises CorruptFile, or AdapterMismatch when it belongs to another."""
        if lora.sha256 not in self._matches:
            # both models of a pair have the same weights by name: what is found for one is for the other too
            left_out = (Role.VAE, Role.DIFFUSION_MODEL_2)
            components = [self.component(role) for role in self.checkpoint.roles if role not in left_out]
            match = match_lora(
                Path(lora.path),
                lora.sha256,
                {c.role: lora_key_map(c.built) for c in components},
                {c.role: {n: tuple(p.shape) for n, p in c.built.module.named_parameters()} for c in components},
            )
            require_match(match, lora.name, self.ref.name, self.checkpoint.family.title)
            self._matches[lora.sha256] = match
        return self._matches[lora.sha256]

    def lora_warning(self, lora: LoraRef) -> str | None:
        """What to tell of a LoRA that is used in part only; None where all of it is. Raises as `match`."""
        match = self.match(lora)
        beside = sum(len(patches) for role, patches in match.patches.items() if role.is_text_encoder)
        told = [match.warning] if match.warning else []
        if lora.noise and beside:
            told.append(
                f"{beside} of its patches are for text encoders: not used, as it is for {lora.noise} noise alone"
            )
        return "; ".join(told) or None

    def touches(self, role: Role, lora: LoraRef) -> bool:
        """Whether a LoRA changes the component `role`. Raises as `match`."""
        return bool(self._patches_of(role, lora))

    def _patches_of(self, role: Role, lora: LoraRef) -> Sequence[WeightPatch]:
        """What a LoRA says of one component; one for one model of a pair, of that alone. Texts are for both: two that
        are each for one of them would change their encoders twice."""
        if lora.noise and _NOISE_OF.get(role) != lora.noise:
            return ()
        named = Role.DIFFUSION_MODEL if role is Role.DIFFUSION_MODEL_2 else role
        return self.match(lora).patches.get(named, ())

    def has_matched(self, loras: Iterable[LoraRef]) -> bool:
        """The files of these were read before: `patch_set` takes next to no time."""
        return all(lora.sha256 in self._matches for lora in loras)

    def patch_set(self, role: Role, loras: Iterable[LoraRef]) -> PatchSet:
        """The patches of `loras`, in order and at their strengths, for one component."""
        chosen = tuple(loras)

        def find() -> PatchSet:
            patches = (
                replace(patch, strength=lora.strength) for lora in chosen for patch in self._patches_of(role, lora)
            )
            return PatchSet(tuple(patches))

        return self._patch_sets.get((role, chosen), find)


def form_of(
    role: Role,
    weights: Sequence[OwnWeights],
    device: DeviceCapabilities,
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32"),
) -> WeightForm:
    """How a component with these weights is kept and computed with on `device`; `dtypes` as `Family` has them."""
    storage = _largest_dtype(weights)
    parameters = sum(p.numel() for own in weights for p in own.parameters.values())
    computed = compute_dtype(role, storage, device, parameters, [getattr(torch, name) for name in dtypes])
    return WeightForm(computed, resident_form(role, storage, computed, parameters, device))


def _largest_dtype(weights: Iterable[OwnWeights]) -> torch.dtype:
    """The floating point dtype that holds the most bytes of a component."""
    bytes_of: dict[torch.dtype, int] = {}
    for own in weights:
        for parameter in own.parameters.values():
            if parameter.is_floating_point():
                bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + stored_bytes(parameter)
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])
