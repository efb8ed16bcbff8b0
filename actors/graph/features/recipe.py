"""The recipe of an output: everything that it depends on, with names resolved to hashes and defaults to numbers.

Values only. Images with equal recipes have equal pixels; videos have equal frames, audio clips equal samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelpool.actors.graph.features import recorded
from modelpool.actors.graph.features.control_graph import RecipeControl as RecipeControl
from modelpool.actors.graph.features.decoder_graph import RecipeDecoder as RecipeDecoder
from modelpool.actors.graph.features.expert_graph import RecipeLowNoise as RecipeLowNoise
from modelpool.actors.graph.features.image_prompt_graph import RecipeImagePrompt as RecipeImagePrompt
from modelpool.actors.graph.features.lora_graph import RecipeLora as RecipeLora
from modelpool.actors.graph.features.recorded import FILE_NAME, INFORMATIVE, LATER, LATER_IN_DIGEST, NOT_WRITTEN
from modelpool.actors.graph.features.region_graph import RecipeRegion as RecipeRegion
from modelpool.actors.graph.features.schedule_guidance import RecipeNoise as RecipeNoise
from modelpool.actors.graph.features.upscale_graph import RecipeUpscale as RecipeUpscale
from modelpool.actors.graph.features.video_output_graph import IMAGE_FORMAT as IMAGE_FORMAT
from modelpool.actors.graph.features.vision_graph import RecipeView as RecipeView
from modelpool.actors.graph.features.workflow_part import RecipeWorkflow as RecipeWorkflow
from modelpool.pool.values.specs.wire_value import WireValue


@dataclass(frozen=True, slots=True)
class RecipeImages:
    """The input images of an output; the names are the fields of a request. Hashes are of the pixels as used; file
    names are informative and not part of the digest."""

    image_sha256: str = ""
    image_file: str = field(default="", metadata=INFORMATIVE)
    mask_sha256: str = ""
    mask_file: str = field(default="", metadata=INFORMATIVE)
    first_step: int = 0
    paste: bool = False
    hires: Mapping[str, Any] = field(default_factory=dict)
    controls: tuple[RecipeControl, ...] = field(default=(), metadata=LATER_IN_DIGEST)
    image_prompts: tuple[RecipeImagePrompt, ...] = field(default=(), metadata=LATER)
    regions: tuple[RecipeRegion, ...] = field(default=(), metadata=LATER_IN_DIGEST)
    reference_sha256: str = field(default="", metadata=LATER_IN_DIGEST)
    reference_file: str = field(default="", metadata=INFORMATIVE)
    #: hashes, and file names, of the references after the first
    more_references: tuple[str, ...] = field(default=(), metadata=LATER_IN_DIGEST)
    more_reference_files: tuple[str, ...] = field(default=(), metadata=INFORMATIVE)
    #: how a text encoder with vision read them; empty if none did
    reference_as: str = field(default="", metadata=LATER_IN_DIGEST)
    last_image_sha256: str = field(default="", metadata=LATER_IN_DIGEST)
    last_image_file: str = field(default="", metadata=INFORMATIVE)
    video_sha256: str = field(default="", metadata=LATER_IN_DIGEST)
    video_file: str = field(default="", metadata=INFORMATIVE)
    video_mask_sha256: str = field(default="", metadata=LATER_IN_DIGEST)
    video_mask_file: str = field(default="", metadata=INFORMATIVE)
    face_video_sha256: str = field(default="", metadata=LATER_IN_DIGEST)
    face_video_file: str = field(default="", metadata=INFORMATIVE)
    #: as used; 0 if the model is not guided by an image
    image_cfg: float = field(default=0.0, metadata=LATER_IN_DIGEST)
    noise_level: int = field(default=0, metadata=LATER_IN_DIGEST)


@dataclass(frozen=True, slots=True)
class Recipe(WireValue):
    """Everything needed to generate the same image, video or audio clip again. The marks of fields are in
    `recorded`: new fields are `LATER`."""

    model: str = field(metadata=FILE_NAME)
    model_sha256: str
    prompt: str
    negative: str
    loras: tuple[RecipeLora, ...]
    steps: int
    cfg: float
    sampler: str
    schedule: str
    width: int
    height: int
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict, metadata=INFORMATIVE)
    warnings: tuple[str, ...] = field(default=(), metadata=INFORMATIVE)
    #: None for an image that is generated from text only
    pictures: RecipeImages | None = field(default=None, metadata=LATER)
    #: of a video, or of the layers of an image
    frames: int = field(default=0, metadata=LATER)
    frame_rate: float = field(default=0.0, metadata=LATER)
    #: conditioning of a video, as used
    motion: int = field(default=0, metadata=LATER)
    image_noise: float = field(default=0.0, metadata=LATER)
    elevation: float = field(default=0.0, metadata=LATER)
    #: of an audio clip, which has width and height 0
    seconds: float = field(default=0.0, metadata=LATER)
    #: file format; empty for images in `IMAGE_FORMAT`
    format: str = field(default="", metadata=LATER)
    #: of an image file with lossy compression
    quality: int = field(default=0, metadata=LATER)
    clip_skip: int = field(default=0, metadata=LATER)
    #: name and SHA-256 of the textual inversions that the texts name
    embeddings: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)
    #: None for a model with one stage
    decoder: RecipeDecoder | None = field(default=None, metadata=LATER)
    #: None for the sampler's defaults
    noise: RecipeNoise | None = field(default=None, metadata=LATER)
    view: RecipeView | None = field(default=None, metadata=LATER)
    #: noise levels that the request listed
    sigmas: tuple[float, ...] = field(default=(), metadata=LATER)
    #: None for a model without experts
    low_noise: RecipeLowNoise | None = field(default=None, metadata=LATER)
    #: None for an output in the size of its latent
    upscale: RecipeUpscale | None = field(default=None, metadata=LATER)
    #: all settings of the options of the run, by the name of the option
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata=LATER)
    #: of music, for models that read them
    lyrics: str = field(default="", metadata=LATER)
    lyrics_language: str = field(default="", metadata=LATER)
    bpm: int = field(default=0, metadata=LATER)
    key_scale: str = field(default="", metadata=LATER)
    time_signature: str = field(default="", metadata=LATER)
    #: of the noise levels, where it is not the model's own
    shift: float = field(default=0.0, metadata=LATER)
    #: images of a forward pass; 0 for one
    batch: int = field(default=0, metadata=LATER)
    #: tiles of the VAE in pixels and in frames; 0 if the request asks for none
    vae_tile: int = field(default=0, metadata=LATER)
    vae_frames: int = field(default=0, metadata=LATER)
    #: why it is so many, if nobody chose the number
    batch_reason: str = field(default="", metadata=NOT_WRITTEN)
    #: GPUs that share the sampling, as requested: a number above 1, or "auto"; empty for one
    gpus: str = field(default="", metadata=LATER)
    #: None for an output of a request without a workflow and without passes
    workflow: RecipeWorkflow | None = field(default=None, metadata=LATER)
    #: settings of the pool that change pixels, by name, where they differ from the defaults
    computed_by: Mapping[str, str] = field(default_factory=dict, metadata={**LATER, **INFORMATIVE})

    def as_json(self) -> dict[str, Any]:
        """Return a plain dictionary for `json.dumps`. Unused later fields are left out, so that no existing digest
        changes."""
        return recorded.as_json(self)

    def to_json(self, indent: int | None = None) -> str:
        """Return it as the JSON text that output files have."""
        return json.dumps(self.as_json(), indent=indent)

    @property
    def ending(self) -> str:
        """The file extension of the output, without a dot."""
        return self.format or IMAGE_FORMAT

    @property
    def is_layers(self) -> bool:
        """Whether its frames are the layers of one image, in one file of the format of images."""
        return self.frames > 0 and self.ending == IMAGE_FORMAT

    @property
    def is_video(self) -> bool:
        """Whether its frames form a video."""
        return self.frames > 0 and not self.is_layers and not self.seconds

    @property
    def digest(self) -> str:
        """20 hexadecimal digits that identify the output."""
        return hashlib.sha256(json.dumps(self.determining(), sort_keys=True).encode()).hexdigest()[:20]

    def determining(self) -> dict[str, Any]:
        """Return the part that determines the output."""
        return recorded.determining(self)
