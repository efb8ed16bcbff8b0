"""The families of models that this version runs, as values. Torch-free.

A family says where its components are in a file and what no tensor tells. `pool.checkpoints.detect` finds the family
of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pool.checkpoints.safetensors_file import Shape
from pool.spec import Role


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """What the numbers of a latent mean.

    channels        channels of a latent
    downscale       pixels along one side of one latent cell
    scaling_factor  the diffusion model's latents are this many times the VAE's, less `shift`
    shift           what is taken off the VAE's latents before they are scaled
    """

    channels: int
    downscale: int
    scaling_factor: float
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint.

    name           short and stable, "sd1"
    title          for human readers
    prefixes       what the keys of each component begin with
    native_pixels  width and height that the model was trained for, where the file does not say
    """

    name: str
    title: str
    prefixes: Mapping[Role, str]
    native_pixels: int
    scaling_factor: float

    def shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The component's part of `shapes`, keys as they are in the file."""
        prefix = self.prefixes[role]
        return {key: shape for key, shape in shapes.items() if key.startswith(prefix) and is_weight(role, key, prefix)}

    def bare_shapes_of(self, role: Role, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """As `shapes_of`, keys without the component's prefix."""
        return {self.bare_key(role, key): shape for key, shape in self.shapes_of(role, shapes).items()}

    def bare_key(self, role: Role, key: str) -> str:
        """A component's `key` without its prefix."""
        bare = key.removeprefix(self.prefixes[role])
        # some files carry CLIP with this level, some without
        return bare.removeprefix("text_model.") if role is Role.TEXT_ENCODER else bare


#: the parts of an autoencoder's files that are not its training loss
_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")


def is_weight(role: Role, key: str, prefix: str) -> bool:
    """Whether `key` of a component is a weight of it, and not a table or a leftover of its training."""
    if role is Role.VAE:
        return key.removeprefix(prefix).startswith(_VAE_PARTS)
    return not key.endswith(".position_ids")


SD1 = Family(
    name="sd1",
    title="Stable Diffusion 1",
    prefixes={
        Role.TEXT_ENCODER: "cond_stage_model.transformer.",
        Role.DIFFUSION_MODEL: "model.diffusion_model.",
        Role.VAE: "first_stage_model.",
    },
    native_pixels=512,
    # std of the VAE's latents on its training pictures, inverted; the constant of the published SD1 configuration
    scaling_factor=0.18215,
)
