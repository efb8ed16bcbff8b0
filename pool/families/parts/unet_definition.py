"""`UNetDefinition`: everything that the project knows about one family of UNets, or one stage of Stable Cascade.
Torch-free to import.

The sibling of `Family` for models with one fixed layout of single files, so that a `LocatedFamily` value states
where their components are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelpool.pool.families.parts.family import Detection, ModelBuild, TextInputs
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.parts.lora_naming import LoraNaming
from modelpool.pool.families.parts.pipeline_form import PipelineFacts
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind


@dataclass(frozen=True, slots=True)
class FolderMark:
    """The mark of a diffusers folder for a family with a diffusion model recognised as another family.

    recognised_as  name of the other family
    folder         folder of a component that only this family has; empty: none
    lacks          folder of a component that this family lacks; empty: none
    entry          entry of the index that is true; empty: none
    edm            whether its scheduler has the noise of EDM with the prediction of noise
    """

    recognised_as: str
    folder: str = ""
    lacks: str = ""
    entry: str = ""
    edm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetDefinition:
    """One family of UNets, or one stage of Stable Cascade. Fields without a default must be decided for each.

    family      its components in a single file, its latents, and its sampling facts
    detect      how its diffusion model is recognised
    module      name of its class in diffusers
    latent      name of its latents (`latent_formats`)
    text        its text encoders, and how each is read
    lora        names of its weights in LoRA files
    pipeline    its pipeline in diffusers; None: the pipeline of the family that it is derived from, if any
    build       how it is built and called; None: by `pool.models.components.common`, as a UNet that reads only texts
    velocity_pixels  width and height of the training images of files that predict velocity; 0: no difference
    edm_noise   the default noise of files with a range of noise levels, which then predict velocity; None: no file of
                the family has one
    looks_like  another family with models of equal shapes at unpublished sizes: the text encoders tell them apart
    folder_mark what tells its folders from another family's; None: the shapes of the diffusion model do
    untrained_noise  kinds of noise that no model of the family was trained with, and the expected value of a scheduler
    vision_encoder   the vision encoder that its models read, if not the usual one for its use; empty: the usual one
    labels_width     width of the image embedding in its class labels; 0: it has none
    may_have_frame_decoder  whether files may have a decoder of frames next to the VAE
    """

    family: LocatedFamily
    detect: Detection
    module: str
    latent: str
    text: TextInputs
    lora: LoraNaming
    pipeline: PipelineFacts | None
    build: ModelBuild | None = None
    velocity_pixels: int = 0
    edm_noise: NoiseFacts | None = None
    looks_like: str = ""
    folder_mark: FolderMark | None = None
    untrained_noise: Mapping[NoiseKind, str] = field(default_factory=dict)
    vision_encoder: str = ""
    labels_width: int = 0
    may_have_frame_decoder: bool = False

    @property
    def name(self) -> str:
        """The name of the family."""
        return self.family.name

    @property
    def title(self) -> str:
        """The title of the family, for human readers."""
        return self.family.title

    @property
    def lora_family(self) -> str:
        """The name under which LoRAs know its weights."""
        return self.family.relative or self.family.name

    @property
    def readings_name(self) -> str:
        """The name under which its text encoders are read."""
        return self.text.set_name or self.name
