"""What nodes of ComfyUI need to know of the family of a model: its sampling facts, and its class in ComfyUI. Pure.

Listings name families by their titles. Where ComfyUI decides by its own class of a model, so do the nodes here; all
else is a fact of the family, so that a new family needs no change of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from modelpool.pool.families.detection.signatures import SIGNATURES
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.parts.text_reading import reading_of
from modelpool.pool.families.supported import running_families
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.transformer_families import UNCONDITIONAL
from modelpool.pool.families.two_experts import TWO_EXPERTS
from modelpool.pool.values.core.sampling_facts import (
    PLAIN_SAMPLING,
    CfgRescale,
    FirstFrameMode,
    Guidance,
    ImageConcat,
    SamplingFacts,
    SeenAs,
)

#: titles whose families are remembered
_MOST_TITLES = 256


@dataclass(frozen=True, slots=True)
class ComfyFamily:
    """A family of models, as nodes see it.

    facts       its sampling facts; the facts of a plain model for an unknown title
    comfyui     its class in ComfyUI; empty for none
    has_second  a second model, a part of it in ComfyUI's workflows, predicts without a text
    clip_only   all of its text encoders are CLIP's
    """

    facts: SamplingFacts = PLAIN_SAMPLING
    comfyui: str = ""
    has_second: bool = False
    clip_only: bool = False

    def is_a(self, *classes: str) -> bool:
        """Whether its class in ComfyUI begins with one of `classes`."""
        return bool(self.comfyui) and self.comfyui.startswith(classes)

    @property
    def guidance(self) -> Guidance:
        """Its guidance method."""
        return Guidance.CLASSIFIER_FREE if self.facts.defaults is None else self.facts.defaults.guidance

    @property
    def has_blocks_of_xl(self) -> bool:
        """It has the blocks of Stable Diffusion XL."""
        return self.comfyui in ("SDXL", "SDXL_instructpix2pix")

    @property
    def is_guided_by_default(self) -> bool:
        """ComfyUI gives it a guidance scale as an input without FluxGuidance, too."""
        return self.reads_guidance and self.comfyui in ("Flux", "FluxInpaint")

    @property
    def reads_frames(self) -> bool:
        """Its autoencoder reads the frames of a video as one latent, with fewer cells than frames."""
        return self.facts.video is not None and self.facts.video.frames_per_cell > 1

    @property
    def reads_guidance(self) -> bool:
        """The guidance scale is an input of the model."""
        return self.guidance is Guidance.DISTILLED and "guidance" in self.facts.reads

    @property
    def is_normed(self) -> bool:
        """Its guidance is scaled to the norm of the positive prediction."""
        return self.facts.cfg_rescale is not CfgRescale.NOTHING

    @property
    def is_guided_by_image(self) -> bool:
        """An image that it reads with the latent has a guidance scale of its own."""
        return self.guidance is Guidance.TEXT_AND_IMAGE and self.facts.image_concat is not None

    @property
    def is_guided_by_references(self) -> bool:
        """ComfyUI guides it by reference images of the texts of a run. Models whose image is in the place of one
        (`edits_reference`) are guided by it."""
        return bool(self.comfyui) and self.facts.guides_by_references and not self.edits_reference

    @property
    def edits_reference(self) -> bool:
        """It edits one reference image, which ComfyUI's nodes give it as the image that is concatenated."""
        return self.facts.blank_reference

    @property
    def varies_images(self) -> bool:
        """It varies images that its vision encoder reads."""
        return self.facts.image_labels is not None

    @property
    def sees_states(self) -> bool:
        """It reads embeddings of images as states next to the text."""
        return self.facts.seen_as is SeenAs.STATES

    @property
    def sees_images(self) -> bool:
        """It varies images, or reads embeddings of images next to a text."""
        return self.varies_images or self.facts.seen_as is not None

    @property
    def sees_first_image(self) -> bool:
        """Its vision encoder reads the image that a video begins with."""
        video = self.facts.video
        begins = None if video is None else video.begins
        return begins is FirstFrameMode.CONCATENATED and "image_context" in self.facts.reads and not self.follows

    @property
    def follows(self) -> bool:
        """It follows a video, or the camera of one."""
        return not self.facts.reads.isdisjoint(("followed", "control", "camera"))

    @property
    def samples_sound(self) -> bool:
        """It samples the audio of a video with its frames, in ComfyUI as two latents."""
        return bool(self.comfyui) and self.facts.video is not None and self.facts.video.sound is not None

    @property
    def is_guided_by_frames(self) -> bool:
        """Images guide its videos at frames of them."""
        return self.facts.video is not None and self.facts.video.guided

    @property
    def reads_image_instead(self) -> bool:
        """It reads an image in the place of noise, and estimates what the image shows."""
        return self.facts.image_concat is ImageConcat.INSTEAD


@lru_cache(_MOST_TITLES)
def family_of(title: str) -> ComfyFamily:
    """Return the family with this title, or with the longest one that `title` begins with; an unknown family is a plain
    model."""
    known = _titled()
    found = max((each for each in known if title.startswith(each)), key=len, default="")
    return known.get(found, ComfyFamily())


@lru_cache(1)
def _titled() -> Mapping[str, ComfyFamily]:
    classes = {row.name: row.comfyui for row in SIGNATURES}
    families = [*running_families().items(), *TWO_EXPERTS.items()]
    return MappingProxyType(
        {
            each.title: ComfyFamily(each.sampling, classes[name], name in UNCONDITIONAL, _reads_clip_only(name, each))
            for name, each in families
        }
    )


def _reads_clip_only(name: str, family: LocatedFamily) -> bool:
    readings = readings_of(name) or tuple(map(reading_of, family.texts.values()))
    return bool(readings) and all(reading.is_clip for reading in readings)
