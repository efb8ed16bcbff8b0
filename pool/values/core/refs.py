"""References to files that tasks use: models, LoRAs, ControlNets, upscalers, textual inversions; by name, path and
content hash.

Values only; torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from modelpool.pool.values.core.assembly import Assembly, Source
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.step_shares import begins_within
from modelpool.pool.values.core.strength_keyframes import Keyframes, strength_at
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.values.specs.wire_value import WireValue

#: boxes with which GLIGEN models were trained. Source: arXiv 2301.07093
MOST_BOXES = 30

#: name of the text encoders among the blocks of a LoRA
BASE_BLOCK = "BASE"


@dataclass(frozen=True, slots=True)
class ModelRef(WireValue):
    """A checkpoint. `sha256` (hexadecimal) is of the file, or of all its parts; it is the identity, not the path.

    components  keys of its components; models with equal weights share keys. Empty: keys are derived from the model
    assembly    its separate files, from a configuration; None: `path` is the source
    files       files of a source to fetch before `path` exists on a node; empty for local ones
    """

    name: str
    path: str
    sha256: str
    components: tuple[tuple[Role, ComponentKey], ...] = field(default=(), compare=False)
    assembly: Assembly | None = None
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)

    @property
    def source(self) -> Source:
        """The source of its weights."""
        return self.assembly or self.path


#: how weights of another model are put into a model
MERGES = ("mix", "add", "subtract")


@dataclass(frozen=True, slots=True)
class LoraRef(WireValue):
    """A LoRA file and its strength.

    noise          "high" or "low": it applies to this expert only (`pool.families.two_experts`)
    files          as of a model
    text_strength  on the text encoders; None: `strength`
    start, end     the part of the schedule's steps in which it acts on the diffusion model, as fractions
    blocks         factors of the strength by block (`pool.models.lora_names.blocks`); empty: 1 for all
    keyframes      strengths on the diffusion model over the steps; `strength` is then the strongest of them
    interpolation  between keyframes (a value of `pool.values.core.strength_keyframes.Interpolation`); empty: none
    only           the texts of a run for which it acts (`pool.values.core.lora_texts`); empty: all
    merge          empty: it is a LoRA. Else it is another model, of which weights O are put into weights W, with the
                   strength s: "mix" is W * (1 - s) + O * s, "add" W + O * s, "subtract" (W - O) * s. `blocks` are then
                   from `pool.models.lora_names.merge_blocks`
    """

    name: str
    path: str
    sha256: str
    strength: float
    noise: str = ""
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)
    text_strength: float | None = None
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()
    keyframes: Keyframes = ()
    interpolation: str = ""
    only: tuple[str, ...] = ()
    merge: str = ""

    @property
    def has_effect(self) -> bool:
        """Whether its strength is not 0 on some component."""
        return self.strength != 0 or self.text_strength not in (None, 0)

    @property
    def has_span(self) -> bool:
        """Whether it acts in a part of the steps only."""
        return self.start > 0.0 or self.end < 1.0

    @property
    def changes_in_run(self) -> bool:
        """Whether its strength on the diffusion model differs between the steps or the texts of a run."""
        return self.has_span or bool(self.keyframes) or bool(self.only)

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it acts in the step after `step` of `steps` steps of the complete schedule are done."""
        return begins_within(step, steps, self.start, self.end)

    def at_step(self, step: int, steps: int) -> LoraRef | None:
        """Return the same as it acts in that step, for the texts for which it acts; None if it does not act."""
        if not self.changes_in_run:
            return self
        if not self.is_on(step, steps):
            return None
        strength = strength_at(self.keyframes, self.interpolation, step, steps) if self.keyframes else self.strength
        plain = replace(self, strength=strength, start=0.0, end=1.0, keyframes=(), interpolation="", only=())
        return plain if strength else None

    def strength_on(self, role: Role) -> float:
        """The strength on one component, before the factors of blocks."""
        return self.text_strength if self.text_strength is not None and role.is_text_encoder else self.strength

    def for_text(self) -> LoraRef:
        """The same as text encoders see it for a text for which it acts, so that equal encodings are one task."""
        if self.text_strength is None and not self.changes_in_run and not self.blocks:
            return self
        blocks = tuple(each for each in self.blocks if each[0] == BASE_BLOCK)
        strength = self.strength if self.text_strength is None else self.text_strength
        plain = replace(self, strength=strength, text_strength=None, start=0.0, end=1.0, blocks=blocks)
        return replace(plain, keyframes=(), interpolation="", only=())

    def for_diffusion_model(self) -> LoraRef:
        """The same as a diffusion model sees it."""
        if self.text_strength is None and not self.blocks:
            return self
        blocks = tuple(each for each in self.blocks if each[0] != BASE_BLOCK)
        return replace(self, text_strength=None, blocks=blocks)


def loras_of_text(loras: Sequence[LoraRef]) -> list[LoraRef]:
    """Return LoRAs as text encoders see them. Texts are encoded once, before the first step: of several uses of one
    file over the steps, those count that begin first, so that a strength that changes is not added up."""
    begins = _begins(loras)
    return [lora.for_text() for lora in loras if lora.start == begins[lora.sha256]]


def unread_text_strengths(loras: Sequence[LoraRef]) -> list[LoraRef]:
    """Return the LoRAs with a strength on the text encoders that `loras_of_text` leaves out."""
    begins = _begins(loras)
    return [lora for lora in loras if lora.text_strength is not None and lora.start > begins[lora.sha256]]


def _begins(loras: Sequence[LoraRef]) -> dict[str, float]:
    """Return the share of the schedule at which each file begins to act."""
    begins: dict[str, float] = {}
    for lora in loras:
        begins[lora.sha256] = min(lora.start, begins.get(lora.sha256, lora.start))
    return begins


class ControlMaskMode(StrEnum):
    """The ways in which an inpainting ControlNet gets the mask."""

    #: its image is masked; the ControlNet is for inpainting only
    ALWAYS = "always"
    #: its image is masked if there is a mask; otherwise it is used unchanged
    MASKED = "masked"
    #: if there is a mask, it reads the masked start image in addition to its own image
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class ControlRef:
    """A ControlNet file and its use: strength, and start and end as fractions of the steps.

    by_noise      start and end are fractions of the noise levels of the training instead, from the highest one down:
                  they mean the same levels in each part of a run
    mode          index of the control mode of a union ControlNet
    reads_latent  it reads the latent of its image instead of the pixels
    bright        that latent is encoded with `pool.values.core.stage_params.EncodeImageParams.bright`
    config_overrides  settings of the configuration in its folder that differ from those derived from shapes, by name
    mask_mode     in a task, how it gets the mask; in a catalog result, how it can. None: no mask
    files         as of a model
    is_blockwise  its blocks run behind the blocks of the model
    """

    name: str
    path: str
    sha256: str
    strength: float
    start: float
    end: float
    mode: int | None = None
    reads_latent: bool = False
    bright: bool = False
    config_overrides: tuple[tuple[str, bool], ...] = ()
    mask_mode: ControlMaskMode | None = None
    by_noise: bool = False
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)
    is_blockwise: bool = field(default=False, repr=False, compare=False)

    @property
    def content(self) -> tuple[str, tuple[tuple[str, bool], ...]]:
        """Identity of the module, whatever its use."""
        return self.sha256, self.config_overrides


@dataclass(frozen=True, slots=True)
class UpscalerRef:
    """A file of an upscaler, which enlarges both sides of an image by `scale`; `files` as of a model.
    `latent_channels`: of the latents that it enlarges instead; 0 for images."""

    name: str
    path: str
    sha256: str
    scale: int
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)
    latent_channels: int = field(default=0, repr=False)

    @property
    def content(self) -> str:
        """Identity of the module."""
        return self.sha256


@dataclass(frozen=True, slots=True)
class ImagePromptRef(WireValue):
    """An image prompt adapter (IP-Adapter, Redux) and its use: strength, and start and end as fractions of the steps.

    by_noise as of a ControlNet
    images   number of its images; 0 if it reads only faces
    face_version  it reads the embeddings of faces: 1, or 2 for FaceID Plus of version 2; 0 if it reads none
    blank    it reads the states of no image for the negative prompt
    blocks   factors of the strength by block of the diffusion model; others are 0. Empty: 1 for all
    appended  tokens that it appends to the prompt
    masks    number of its masks: 0 if it acts everywhere, 1 for all images together, or one for each image
    files    as of a model
    """

    name: str
    path: str
    sha256: str
    strength: float
    start: float = 0.0
    end: float = 1.0
    images: int = 1
    face_version: int = 0
    blank: bool = field(default=False, compare=False)  # it follows from the file
    blocks: tuple[tuple[str, float], ...] = ()
    appended: int = 0
    masks: int = 0
    by_noise: bool = False
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)

    @property
    def content(self) -> str:
        """Identity of the module, whatever its use."""
        return self.sha256

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it acts in the step after `step` of `steps` that are run are done, if it counts steps."""
        return begins_within(step, steps, self.start, self.end)


@dataclass(frozen=True, slots=True)
class GligenRef(WireValue):
    """A GLIGEN model and the boxes that it fills: the pooled text of each is an input.

    boxes  left, top, right and bottom, as shares of the sides of the image
    end    the share of the steps in which it acts
    files  as of a model
    """

    name: str
    path: str
    sha256: str
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    end: float = 1.0
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)

    @property
    def content(self) -> str:
        """Identity of the module, whatever its use."""
        return self.sha256

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it acts in the step after `step` of `steps` that are run are done."""
        return begins_within(step, steps, 0.0, self.end)


@dataclass(frozen=True, slots=True)
class FoundImagePrompt:
    """An image prompt adapter, and the vision encoder that it reads.

    encoder     None for an adapter that reads only the embeddings of faces
    use         the output of the encoder that it reads (a value of `pool.values.core.sampling_facts.VisionEncoderUse`)
    face_width  width of the face embeddings that it reads; 0 if it reads none
    """

    ref: ImagePromptRef
    encoder: ModelRef | None = None
    use: str = ""
    face_width: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingRef:
    """A textual inversion that a prompt names; `rows` is the number of tokens that it replaces; `files` as of a
    model."""

    name: str
    path: str
    sha256: str
    rows: int
    files: tuple[RemoteFile, ...] = field(default=(), compare=False)
