"""`OpenModel`: a checkpoint and the LoRAs requested on it, as built modules, sizes and patch sets.

The engine runs it and the catalog describes it, so that both use the same components, sizes and digests. Opening maps
the file and builds modules without weights; nothing is read before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.families.parts.video_calls import fixed_extent
from modelpool.pool.families.text_readings import lyrics_reading_of, readings_of
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.models.loading.build_checkpoint import BuiltComponent, Checkpoint, open_checkpoint
from modelpool.pool.models.loading.merged_model import match_model, merged_strengths
from modelpool.pool.models.loading.open_tokenizer import tokenizer_of
from modelpool.pool.models.loading.silence import has_silence, silence_latent
from modelpool.pool.models.lora_names.blocks import BASE, ModelBlocks
from modelpool.pool.models.lora_names.lora_key_map import lora_key_map
from modelpool.pool.models.lora_names.merge_blocks import check_merge, merge_factor
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile
from modelpool.pool.values.core.expert_names import HIGH, LOW
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef, component_key
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.ops.packed import stored_bytes
from modelpool.pool.weights.patcher.compute_dtype import compute_dtype
from modelpool.pool.weights.patcher.weight_bytes import ModuleWeights, component_spec, component_use, module_weights
from modelpool.pool.weights.patcher.weight_form import WeightForm, resident_form
from modelpool.pool.weights.patches.adapter_entries import NoAdapter
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora, require_match, require_shapes
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch

#: dtypes that most components compute in
DTYPES = ("float16", "bfloat16", "float32")
#: the expert of a role, as LoRAs for one of two experts name it
_NOISE_OF = {Role.DIFFUSION_MODEL: HIGH, Role.DIFFUSION_MODEL_2: LOW}
#: patch sets of a model that are kept; each is some 20 KiB and made again in about a millisecond
PATCH_SETS_REMEMBERED = 256
#: LoRA files of a model that stay mapped; mapping and matching one again takes some milliseconds
LORAS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Component:
    """One role of an open checkpoint, on the host."""

    key: ComponentKey
    role: Role
    built: BuiltComponent
    form: WeightForm
    weights: tuple[ModuleWeights, ...]

    def spec(self) -> ComponentSpec:
        """Return its sizes."""
        return component_spec(self.key, self.role, self.weights, self.form)

    def use(self, patches: PatchSet, passes: int = 1) -> ComponentUse:
        """Return what a run with `patches` needs."""
        return component_use(self.key, self.weights, self.form, patches, passes)


@dataclass(frozen=True, slots=True)
class RoleReading:
    """The reading of one text encoder of a model.

    place      index among the readings of the model's text encoders
    tokenizer  None for CLIP's, which is part of the package, and for a part that reads states
    """

    reading: Reading
    place: int
    tokenizer: TextTokenizer | None


class OpenModel:
    """One checkpoint, in one or several files. Components are built at the first access and kept."""

    def __init__(self, ref: ModelRef, device: str | DeviceCapabilities, *, whole: bool = True) -> None:
        """Map the file. `device` is what components will run on, or the name of its kind if no more is known. Unless
        `whole`, the model is for saving only and may be incomplete, see `open_checkpoint`.

        Raises CorruptFile or UnknownArchitecture.
        """
        self.ref = ref
        # the creator of the reference (`pool.catalog.catalog`) has allowed its source; nothing in a pickle is run
        self.checkpoint: Checkpoint = open_checkpoint(ref.source, allow_pickle=True, whole=whole)
        #: facts of its latents
        self.latent = self.checkpoint.latent
        self._device = capabilities_of(device)
        self._components: dict[Role, Component] = {}
        self._keys = dict(ref.components)
        self._readings: dict[Role, RoleReading] = {}
        self._matches: LruCache[str, LoraMatch] = LruCache(LORAS_KEPT)
        self._blocks: ModelBlocks | None = None
        self._silence: Tensor | None = None
        self._patch_sets: LruCache[tuple[Role, tuple[LoraRef, ...]], PatchSet] = LruCache(PATCH_SETS_REMEMBERED)

    def component(self, role: Role) -> Component:
        """Return the component of this role, built."""
        if role not in self._components:
            built = self.checkpoint.build(role)
            weights = tuple(module_weights(built.module))
            self._components[role] = Component(
                self._keys.get(role) or component_key(self.ref.name, role, self.ref.sha256),
                role,
                built,
                form_of(role, weights, self._device, self.checkpoint.family.dtypes),
                weights,
            )
        return self._components[role]

    @property
    def component_keys(self) -> frozenset[ComponentKey]:
        """The keys of the components that are built."""
        return frozenset(component.key for component in self._components.values())

    @property
    def extent(self) -> tuple[int, int, int] | None:
        """Width, height and frames of the only videos that the diffusion model generates; None if there are others."""
        if Role.DIFFUSION_MODEL not in self.checkpoint.roles:
            return None
        module: Any = self.component(Role.DIFFUSION_MODEL).built.module
        return fixed_extent(getattr(module, "config", None))

    def reading(self, role: Role, is_lyrics: bool = False) -> RoleReading:
        """Return how the text encoder `role` is read, by a prompt or by lyrics; its tokenizer is searched at the first
        access.

        Raises TokenizerMissing, saying which file to put where, if there is none.
        """
        if role not in self._readings:
            family = self.checkpoint.family
            readings, place = readings_of(family.text_set), self.place(role)
            assert readings is not None, f"{family.name}: no readings for its text encoders"
            reading = readings[place]
            tokenizer = None if reading.is_clip or reading.connects else self._tokenizer(role, reading)
            self._readings[role] = RoleReading(reading, place, tokenizer)
        found = self._readings[role]
        return replace(found, reading=lyrics_reading_of(self.checkpoint.family.text_set)) if is_lyrics else found

    def _tokenizer(self, role: Role, reading: Reading) -> TextTokenizer:
        return tokenizer_of(self.checkpoint, role, reading, self.component(role).built.module)

    def silence(self) -> Tensor | None:
        """Return the latent of silence for a model of music with a file that has none, computed at the first access;
        None for all others."""
        reads = self.checkpoint.family.sampling.reads_lyrics
        if self._silence is None and reads and not has_silence(self.component(Role.DIFFUSION_MODEL).built.module):
            self._silence = silence_latent(self.checkpoint)
        return self._silence

    def place(self, role: Role) -> int:
        """Return the index of a text encoder among the encoders of its family."""
        return TEXT_ROLES.index(role)

    def match(self, lora: LoraRef) -> LoraMatch:
        """Match a LoRA with this model's weights. Raises CorruptFile, or AdapterMismatch if it belongs to another, or
        makes a weight larger."""

        def find() -> LoraMatch:
            # both experts have the same weight names and shapes
            left_out = (Role.VAE, Role.DIFFUSION_MODEL_2)
            components = [self.component(role) for role in self.checkpoint.roles if role not in left_out]
            if lora.merge:
                return self._match_model(lora, components)
            shapes = {c.role: {n: tuple(p.shape) for n, p in c.built.module.named_parameters()} for c in components}
            try:
                match = match_lora(
                    Path(lora.path),
                    lora.sha256,
                    {c.role: lora_key_map(c.built) for c in components},
                    shapes,
                    has_experts=Role.DIFFUSION_MODEL_2 in self.checkpoint.roles,
                )
            except NoAdapter as found:
                raise CorruptFile(f"{found.path}: {mistaken(found.shapes, 'a LoRA', found.problem)}") from None
            require_match(match, lora.name, self.ref.name, self.checkpoint.family.title)
            require_shapes(match, lora.name, self.ref.name, shapes)
            return match

        return self._matches.get(lora.sha256, find)

    def _match_model(self, merge: LoraRef, components: Sequence[Component]) -> LoraMatch:
        """Match another model that is merged with this one. Raises AdapterMismatch, also for one with other parts, and
        for a model with two experts."""
        if Role.DIFFUSION_MODEL_2 in self.checkpoint.roles:
            found = f"model {self.ref.name!r} has two experts, expected one diffusion model"
            raise AdapterMismatch(f"model {merge.name!r} cannot be merged: {found}")
        other = OpenModel(ModelRef(merge.name, merge.path, merge.sha256, files=merge.files), self._device)
        roles = [each.role for each in components if each.role in other.checkpoint.roles]
        return match_model(merge, self.ref, components, [other.component(role) for role in roles])

    def lora_warning(self, lora: LoraRef) -> str | None:
        """Return a warning about a LoRA that is only partly used; None if all of it is. Raises as `match`."""
        match = self.match(lora)
        if lora.merge == "mix" and match.unmatched:
            # the weights of this model would lose their share
            raise AdapterMismatch(f"model {lora.name!r} cannot be mixed with {self.ref.name!r}: {match.warning}")
        text_patches = sum(len(patches) for role, patches in match.patches.items() if role.is_text_encoder)
        warnings = [match.warning] if match.warning else []
        if lora.noise and not any(match.patches.get(role) for role, noise in _NOISE_OF.items() if noise == lora.noise):
            warnings.append(f"it has nothing for {lora.noise} noise")
        if lora.noise and text_patches:
            warnings.append(
                f"{text_patches} of its patches are for text encoders: not used, as it is for {lora.noise} noise only"
            )
        is_on = bool(lora.strength or lora.text_strength) and not lora.merge
        if is_on and not any(lora.strength_on(role) and patches for role, patches in match.patches.items()):
            changed = "text encoders" if text_patches else "the diffusion model"
            warnings.append(f"none of its patches acts: all are for {changed}, and its strength on them is 0")
        return "; ".join(warnings) or None

    def touches(self, role: Role, lora: LoraRef) -> bool:
        """Whether a LoRA changes the component `role`. Raises as `match`, and UnusableField for blocks that the model
        does not have."""
        patches = self._patches_of(role, lora)
        if not lora.blocks:
            return bool(patches) and lora.strength_on(role) != 0
        return any(not patch.is_noop for patch in self._with_strengths(role, lora, patches))

    def _patches_of(self, role: Role, lora: LoraRef) -> Sequence[WeightPatch]:
        """Return the patches of a LoRA for one component; a LoRA for one expert patches only that one. Text encoders
        are shared: two LoRAs, one for each expert, would change them twice."""
        if lora.noise and _NOISE_OF.get(role) != lora.noise:
            return ()
        return self.match(lora).patches.get(role, ())

    def has_matched(self, loras: Iterable[LoraRef]) -> bool:
        """Whether the files of all these were read before, so that `patch_set` takes almost no time."""
        return all(lora.sha256 in self._matches for lora in loras)

    def patch_set(self, role: Role, loras: Iterable[LoraRef]) -> PatchSet:
        """Return the patches of `loras`, in order and at their strengths, for one component."""
        chosen = tuple(loras)
        for lora in chosen:
            self.match(lora)  # a LoRA in use stays mapped, even while its patch sets are found in the cache

        def find() -> PatchSet:
            strong = (self._with_strengths(role, lora, self._patches_of(role, lora)) for lora in chosen)
            return PatchSet(tuple(patch for each in strong for patch in each))

        return self._patch_sets.get((role, chosen), find)

    def _with_strengths(self, role: Role, lora: LoraRef, patches: Sequence[WeightPatch]) -> Iterable[WeightPatch]:
        """Return each of the LoRA's patches for one component at its strength; without patches of strength 0 by the
        factor of their block."""
        if lora.merge:
            return self._merged(role, lora, patches)
        return (replace(patch, strength=strength) for patch, strength in self._strengths(role, lora, patches))

    def _merged(self, role: Role, merge: LoraRef, patches: Sequence[WeightPatch]) -> Iterator[WeightPatch]:
        """Yield the patches of a model that is merged with this one, each with its share by block."""
        strength, factors = merge.strength_on(role), {} if role.is_text_encoder else dict(merge.blocks)
        if factors:
            check_merge(merge.blocks, self._model_blocks(), self.ref.name)
        for patch in patches:
            share = strength * (merge_factor(factors, self._model_blocks(), patch.parameter) if factors else 1.0)
            if share:
                of_other, of_own = merged_strengths(merge.merge, share)
                yield replace(patch, strength=of_other, strength_model=of_own)

    def _strengths(
        self, role: Role, lora: LoraRef, patches: Sequence[WeightPatch]
    ) -> Iterable[tuple[WeightPatch, float]]:
        strength = lora.strength_on(role)
        if strength == 0 and lora.text_strength is not None:
            return ()
        if not lora.blocks:
            return ((patch, strength) for patch in patches)
        blocks, factors = self._model_blocks(), dict(lora.blocks)
        blocks.check(lora.blocks)
        if role.is_text_encoder:
            of_text = factors.get(BASE, 1.0)
            return ((patch, strength * of_text) for patch in patches if of_text)
        found = ((patch, blocks.factor(factors, patch.parameter)) for patch in patches)
        return ((patch, strength * factor) for patch, factor in found if factor)

    def _model_blocks(self) -> ModelBlocks:
        if self._blocks is None:
            self._blocks = ModelBlocks.of(
                name for name, _ in self.component(Role.DIFFUSION_MODEL).built.module.named_parameters()
            )
        return self._blocks


def form_of(
    role: Role,
    weights: Sequence[ModuleWeights],
    device: DeviceCapabilities,
    dtypes: Sequence[str] = DTYPES,
) -> WeightForm:
    """Return the dtype and form of a component with these weights on `device`; `dtypes` as in `LocatedFamily`."""
    storage = _largest_dtype(weights)
    parameters = sum(p.numel() for own in weights for p in own.parameters.values())
    computed = compute_dtype(role, storage, device, parameters, [getattr(torch, name) for name in dtypes])
    return WeightForm(computed, resident_form(role, storage, computed, parameters, device))


def _largest_dtype(weights: Iterable[ModuleWeights]) -> torch.dtype:
    """Return the floating point dtype with the most bytes of a component."""
    bytes_of: dict[torch.dtype, int] = {}
    for owner in weights:
        for parameter in owner.parameters.values():
            if parameter.is_floating_point():
                bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + stored_bytes(parameter)
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])
