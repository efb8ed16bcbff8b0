"""`LocatedFamily`: a family as a file has it: where each component is, which architecture it has, and the facts that no
tensor tells. Torch-free.

`pool.models.loading.detect_family` finds the value of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.family_facts import LatentFacts, TextFacts
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.values.specs.spec import Role


class Architecture(Enum):
    """The way to build a component (`pool.models.components.common.module_classes`), and the key naming of its file."""

    CLIP_TEXT = "CLIP text model, in the naming of transformers"
    OPEN_CLIP_TEXT = "CLIP text model with a projection, in the naming of open_clip"
    OPEN_CLIP_TEXT_ALONE = "CLIP text model without a projection, in the naming of open_clip"
    LDM_UNET = "UNet of latent diffusion"
    CLIP_TEXT_PROJECTED = "CLIP text model with a projection, in the naming of transformers"
    DIFFUSERS_UNET = "UNet of latent diffusion, in the naming of diffusers"
    VAE = "autoencoder, built by pool.models.vae"
    DIFFUSION_TRANSFORMER = "diffusion model, built by pool.models.diffusion"
    AUDIO_TRANSFORMER = "diffusion model, with a small model that embeds seconds"
    TEXT_MODEL = "text model, built by pool.models.text"
    VISION_MODEL = "CLIP vision model, built by pool.models.vision"
    TEXT_CONNECTOR = "part that joins the states of a text encoder, built by pool.models.text"
    TEXT_VISION = "vision part of a text encoder, built by pool.models.vision"


@dataclass(frozen=True, slots=True)
class CarriedText:
    """A text encoder that some files of a family carry and its model does not need: its key prefix in single files, how
    it is read, and the set of text encoders (`LocatedFamily.text_set`)."""

    prefix: str
    texts: Mapping[Role, TextFacts]
    text_set: str


@dataclass(frozen=True, slots=True)
class LocatedFamily:
    """One kind of checkpoint: a `Family` with the places of its components.

    name           short and stable, "sd1"
    title          for human readers
    prefixes       key prefix of each component; text encoders in the order in which their states are concatenated
    architectures  how each component is built
    texts          how each text encoder is read
    native_pixels  width and height of the training images, if the file does not state them
    native_sides   width and height, if they differ
    latent_shift, latent_means, latent_deviations  as in `LatentFacts`
    latent_format  name of its latents (`pool.families.parts.latent_formats`), if the VAE is to be checked
    shifts_latent  whether a shift that the configuration of a VAE states applies
    text_set       how the text encoders read prompts: a key of `MEMBERS` of `pool.families.detection.text_encoders`;
                   empty if `texts` states it
    dtypes         names of the compute dtypes of the diffusion model, best first
    relative       family that it was pruned or fine-tuned from; LoRAs use the same names for its weights. Empty for
                   none
    configs        for diffusers folders: the arguments of each component's class
    extra_prefixes  key prefixes of further tensors of a component
    sound_configs  for diffusers folders: the arguments of the classes that decode audio, by folder
    inside         components with tensors that are also tensors of the diffusion model
    latent         the latents of a model without a VAE; None if the VAE defines them
    companion      part of the diffusion model that has a folder of its own in diffusers: the name of both
    carried_text   the text encoder that some files carry; None if none does
    carried_vision  key prefix of the vision encoder that some files carry, for images that a request may have; empty:
                    none does
    carried_encoder  key prefix of the encoder of images that some files carry without a decoder; empty: none does
    """

    name: str
    title: str
    prefixes: Mapping[Role, str]
    architectures: Mapping[Role, Architecture]
    texts: Mapping[Role, TextFacts]
    native_pixels: int
    scaling_factor: float
    sampling: SamplingFacts = PLAIN_SAMPLING
    latent_shift: float = 0.0
    latent_means: tuple[float, ...] = ()
    latent_deviations: tuple[float, ...] = ()
    text_set: str = ""
    latent_format: str = ""
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    relative: str = ""
    native_sides: tuple[int, int] | None = None
    configs: Mapping[Role, Mapping[str, Any]] = field(default_factory=dict)
    extra_prefixes: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    latent: LatentFacts | None = None
    shifts_latent: bool = True
    sound_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    companion: str = ""
    carried_text: CarriedText | None = None
    inside: frozenset[Role] = frozenset()
    carried_vision: str = ""
    carried_encoder: str = ""

    def with_carried(self, shapes: Mapping[str, Shape]) -> LocatedFamily:
        """Return the family of a file with tensors of `shapes`, with the vision and text encoders in it."""
        return self.with_carried_vision(shapes).with_carried_encoder(shapes)

    def with_carried_encoder(self, shapes: Mapping[str, Shape]) -> LocatedFamily:
        """Return the family of a file with tensors of `shapes`: with its encoder of images, if it carries a whole
        one."""
        prefix = self.carried_encoder
        if not prefix or not all(prefix + key in shapes for key in _WHOLE_ENCODER):
            return self
        return self.with_encoder(prefix)

    def with_encoder(self, prefix: str) -> LocatedFamily:
        """Return the family with an encoder of images under this prefix, which makes latents of stage C."""
        assert self.latent is not None, "a family without a VAE states its latents"
        return replace(
            self,
            prefixes={**self.prefixes, Role.VAE: prefix},
            architectures={**self.architectures, Role.VAE: Architecture.VAE},
            latent=replace(self.latent, vae=_ENCODER, encoded_side=EFFICIENTNET_SIDE),
        )

    def without_encoder(self) -> LocatedFamily:
        """Return the family without the encoder of images that a file carried."""
        if not self.carried_encoder:
            return self
        return replace(self, prefixes={role: name for role, name in self.prefixes.items() if role is not Role.VAE})

    def with_carried_vision(self, shapes: Mapping[str, Shape]) -> LocatedFamily:
        """Return the family of a file with tensors of `shapes`: with its vision encoder, if it carries a whole one."""
        prefix = self.carried_vision
        if not prefix or not all(prefix + key in shapes for key in _WHOLE_VISION):
            return self
        return replace(
            self,
            prefixes={**self.prefixes, Role.VISION_ENCODER: prefix},
            architectures={**self.architectures, Role.VISION_ENCODER: Architecture.VISION_MODEL},
        )

    @property
    def text_encoders(self) -> tuple[Role, ...]:
        """The components that read a prompt."""
        return tuple(role for role in self.prefixes if role.is_text_encoder)

    def shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the component's part of `shapes`, with the keys of the file."""
        prefix, extra = self.prefixes[role], self.extra_prefixes.get(role, ())
        kept = prefix + _PROJECTION if self.architectures[role] is Architecture.CLIP_TEXT_PROJECTED else None
        # a diffusion model without prefix gets all keys that no other component has
        outside = (other for part, other in self.prefixes.items() if part not in self.inside)
        others = () if prefix else tuple(other for other in outside if other)
        others += tuple(other for own, more in self.extra_prefixes.items() if own is not role for other in more)
        found: dict[str, Shape] = {}
        for key, shape in shapes.items():
            is_own = key.startswith(prefix) and not (others and key.startswith(others))
            if (is_own and (key == kept or self._is_weight(role, key, prefix))) or (extra and key.startswith(extra)):
                found[key] = shape
        return found

    def _is_weight(self, role: Role, key: str, prefix: str) -> bool:
        if self.architectures[role] is Architecture.TEXT_MODEL:
            seeing = (*SEEING_PARTS, *_LLAVA_PARTS, *CODE_PARTS)
            return not key.endswith(_TEXT_MODEL_LEFTOVERS) and not key.removeprefix(prefix).startswith(seeing)
        return is_weight(role, key, prefix)

    def bare_shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return `shapes_of` with keys without the component's prefix."""
        return {self.bare_key(role, key): shape for key, shape in self.shapes_of(role, shapes).items()}

    def bare_key(self, role: Role, key: str) -> str:
        """Return a component's `key` without its prefix."""
        bare = key.removeprefix(self.prefixes[role])
        # some files have this level before CLIP's keys, some do not
        return bare.removeprefix("text_model.") if self.architectures[role] in _TRANSFORMERS_TEXTS else bare


#: keys of an encoder of images of Stable Cascade's stage C, its kind, and pixels along one side of its cells
_WHOLE_ENCODER = ("backbone.0.0.weight", "backbone.1.0.block.0.1.running_mean", "mapper.0.weight")
_ENCODER, EFFICIENTNET_SIDE = "cascade_c_encoder", 32
#: keys of a vision encoder that gives projected embeddings
_WHOLE_VISION = ("vision_model.embeddings.patch_embedding.weight", "visual_projection.weight")
#: parts of autoencoder files that only training needs
_VAE_LEFTOVERS = ("loss.", "model_ema.")
#: position tables, a mask and a training temperature: not weights
_PROJECTION = "text_projection.weight"
_TEXT_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", _PROJECTION)
#: the same, and serialized tokenizers
_TEXT_MODEL_LEFTOVERS = (".position_ids", "attn_mask", "logit_scale", "spiece_model", "tekken_model", "tokenizer_json")
#: vision part of a text model, as files of different versions name it: a component of its own, or ignored
SEEING_PARTS = ("visual.", "model.visual.")
#: the part of GLM-Image's that turns states of an image into tokens
CODE_PARTS = ("vqmodel.", "model.vqmodel.")
#: the part that reads images of LLaVA and Gemma
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
#: text models in the naming of transformers, with or without the `text_model` level
_TRANSFORMERS_TEXTS = (Architecture.CLIP_TEXT, Architecture.CLIP_TEXT_PROJECTED)


def is_weight(role: Role, key: str, prefix: str) -> bool:
    """Return whether `key` is a weight of the component, not a table or a leftover of its training."""
    if role is Role.VAE:
        return not key.removeprefix(prefix).startswith(_VAE_LEFTOVERS)
    return not key.endswith(_TEXT_LEFTOVERS if role.is_text_encoder else ".position_ids")
