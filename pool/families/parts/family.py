"""`Family`: everything that the project knows about one family of transformer models. Torch-free to import.

The modules of `pool.families.definitions` define one family each (or a few that share an architecture). Detection, text
encoding, the module, sampling, LoRA names and saved folders all follow from these values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.detection.layouts.signature import Condition, Layout, Naming
from modelpool.pool.families.parts.forward import Arguments, Call, Convert, Prepare, Shapes
from modelpool.pool.families.parts.layout_names import LayoutNames
from modelpool.pool.families.parts.lora_naming import LoraNaming
from modelpool.pool.families.parts.pipeline_form import SchedulerFacts
from modelpool.pool.families.parts.teacache import TeaCacheFacts
from modelpool.pool.families.parts.text_join import TextJoin
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.values.core.sampling_facts import (
    NoiseKind,
    Prediction,
    ReferenceMode,
    SamplingDefaults,
    SamplingFacts,
    VideoFacts,
)
from modelpool.pool.values.specs.spec import Role

#: compute dtypes, best first. Source: section 9 of the notes on ComfyUI's behaviour, which lists them by class
HALF_FIRST = ("float16", "bfloat16", "float32")
BFLOAT16_FIRST = ("bfloat16", "float16", "float32")
NO_FLOAT16 = ("bfloat16", "float32")
#: entry of a pipeline's index for a component that it lacks
NOTHING = (None, None)


class VisionPart(Enum):
    """The vision part of a text encoder, by its model."""

    QWEN_25 = "Qwen 2.5 VL"
    QWEN_3 = "Qwen 3 VL"
    GLM_IMAGE = "GLM-Image"


@dataclass(frozen=True, slots=True)
class TextVision:
    """The reading of reference images by a text encoder, the first one or the one in `role`, if the file has its vision
    part.

    pipelines     pipelines of diffusers, by how the images are presented
    missing       components of these pipelines that no checkpoint has: by folder, what to provide
    numbered_key  a tensor in some files of models that were trained with numbered images; empty: there is none
    edit_names    pattern in the names of the models that were trained with reference images, if only some of the family
                  were; empty: all were
    numbered_names  the same, of the models that were trained with numbered images
    part          the vision part that it must be
    """

    pipelines: Mapping[ReferenceMode, str]
    missing: Mapping[str, str]
    numbered_key: str = ""
    part: VisionPart = VisionPart.QWEN_25
    role: Role = Role.TEXT_ENCODER
    edit_names: str = ""
    numbered_names: str = ""


@dataclass(frozen=True, slots=True)
class Connector:
    """Where single files have the part that joins the states of a text encoder (`Reading.connects`): its key prefix,
    and further ones below the prefix of the diffusion model."""

    prefix: str
    inside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The text encoders of a family, and how each is read.

    readings   one for each text encoder, in the order of their roles
    set_name   name of the set of text encoders (`pool.families.detection.text_encoders`); empty: the name of the family
    join       how the states of several encoders are joined; None: the states of each are a separate input
    vision     how the first text encoder reads reference images; None: it reads none
    connector  place of the reading that connects the text encoder to the model; None: there is none
    optional   encoders that the model runs without, but not without all of them
    lyrics     how the first text encoder reads lyrics, for models that read them
    lora_names  names of its text encoders in LoRA files, by encoder, where they differ from other families
    words      key prefix of the table of words in the diffusion model, by naming, if that table is the text encoder;
               empty: text encoders are separate
    """

    readings: tuple[Reading, ...]
    set_name: str = ""
    join: TextJoin | None = None
    vision: TextVision | None = None
    connector: Connector | None = None
    optional: frozenset[str] = frozenset()
    lyrics: Reading | None = None
    lora_names: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[Naming, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detection:
    """How the diffusion model of a family is recognised in a file.

    layout    the identifying keys of its architecture, and how to measure its sizes
    when      condition on the measured sizes that distinguishes it from other families of the same layout; conditions
              of families that share a layout exclude each other, except in one module: the first one counts
    comfyui   its class in ComfyUI; empty if none
    extra_keys      required keys of the file outside of the model, with their prefixes
    extra_prefixes  further key prefixes of the diffusion model in single files
    sound_prefixes  key prefixes of the autoencoder of audio, and of the part that makes samples of its spectrograms
    """

    layout: Layout
    when: Condition
    comfyui: str
    extra_keys: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()
    sound_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """Optional methods and models that runs of a family can use.

    controlnets  name of the ControlNets for its models (`pool.inference.controlnets.controlnet_kinds`); empty for none
    image_prompts  name of the image prompt adapters for its models (`pool.inference.image_prompts`); empty for none
    teacache     published facts for TeaCache, by rising pixels; empty: nothing was published
    skips_blocks      its blocks take and return tokens in a known form, so that options may skip them
    moves_positions   the model is called with the positions of its patches, or counts them in a module of its own
    isolates_sound    a model of videos with sound can be called without either reading the other
    caches_references   its module can read reference images apart, and be called with their keys and values
    takes_windows     its module is called with latents [B, C, T, H, W], of which windows of frames are a video
    """

    controlnets: str = ""
    image_prompts: str = ""
    teacache: tuple[TeaCacheFacts, ...] = ()
    skips_blocks: bool = False
    moves_positions: bool = False
    isolates_sound: bool = False
    caches_references: bool = False
    takes_windows: bool = False


@dataclass(frozen=True, slots=True)
class TwoExperts:
    """The model that two experts of a family make, high-noise and low-noise.

    sampling  its sampling facts; `low_noise` has the boundary and the guidance scale of the low-noise expert
    sources   where the figures are from
    """

    title: str
    sampling: SamplingFacts
    sources: str


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """How a diffusion model is built and called.

    module    name of its class in diffusers; `pool.models.components.diffusion.adapted_modules` replaces some of them
    config    arguments of the class, from the measured sizes and the shapes of the module's parameters. Equal for both
              namings of a file
    convert   tensors under the published names, without prefix, to the module's parameters: renames, splits and
              reshapes rows only. Not used for files in the naming of diffusers. The name of a layout of
              `pool.models.lora_names.discovered` (or `LayoutNames`, with exceptions), or a function
    forward   (module, x, level_B, kwargs) -> the prediction; see `pool.models.components.diffusion.architecture`
    dtypes    compute dtypes, best first
    optional_inputs  inputs that `forward` accepts and runs without; it requires the others of `Family.sampling.reads`
    companion  part of the diffusion model that has a folder of its own in diffusers: the name of both; empty: none
    prepare   what a run does once with the texts, before its steps; None: nothing
    seconds_model  name in the module of the model that embeds seconds; empty: there is none
    unconditional  name in the module of a second model of the same sizes, which predicts without a text and which files
                 may lack; empty: there is none
    lengths   arguments of the class that allocate no table, unlike in other classes: a folder may state any number
    metadata_config  arguments of the class that the metadata of a file states and no shape tells; None: there are none
    """

    module: str
    config: Callable[[Config, Shapes], Arguments]
    convert: Convert | str | LayoutNames
    forward: Call
    dtypes: tuple[str, ...]
    optional_inputs: frozenset[str] = frozenset()
    companion: str = ""
    prepare: Prepare | None = None
    seconds_model: str = ""
    unconditional: str = ""
    lengths: frozenset[str] = frozenset()
    metadata_config: Callable[[Mapping[str, str]], Arguments] | None = None


@dataclass(frozen=True, slots=True)
class DiffusersFolder:
    """How pipelines of diffusers store a model of a family in folders.

    pipeline          its class; empty for a family that diffusers has no pipeline for
    entries           further entries of the pipeline's index
    missing           components of the pipeline that no checkpoint has: by folder, what to provide
    config_pipelines  another pipeline for a module with a true entry in its configuration: by that entry
    scheduler_entries settings of the flow scheduler, if the pipeline defines the noise levels; empty: the shift
    is_multistep      whether its folders have a multistep solver with the levels of a flow
    scheduler         scheduler of its folders, if it is none of the usual ones for its noise
    shifts_by_size    whether the pipeline passes the size of an image to the scheduler; folders with dynamic shifting
                      are refused otherwise
    guiders           guiders of the pipeline, by folder
    same_as           another family with equal tensors in its folders: the pipeline distinguishes them
    vae_class         class of diffusers that its pipelines have for a VAE of Wan 2.1 with equal halves; empty: Wan's
    vae_entries       settings of its VAE's configuration that pipelines read, other than scale and statistics
    text_folders      folder of each text encoder; empty: the names of the roles
    own_levels        whether the pipeline defines the noise levels, with a shift that the scheduler does not have
    scales_latent     whether the pipeline reads the scale of latents in the configuration of the VAE; else it reads
                      mean and deviation of each channel there
    libraries         subpackages of diffusers with further models of its folders, by folder
    config_entries    settings of the diffusion model's configuration that no tensor determines and that have another
                      default in the class
    distilled_entries entries of the configuration of a distilled model, one of which says so; empty: an entry of the
                      index does
    """

    pipeline: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    config_pipelines: Mapping[str, str] = field(default_factory=dict)
    scheduler_entries: Mapping[str, Any] = field(default_factory=dict)
    is_multistep: bool = False
    scheduler: SchedulerFacts | None = None
    shifts_by_size: bool = True
    guiders: Mapping[str, SchedulerFacts] = field(default_factory=dict)
    same_as: str = ""
    vae_class: str = ""
    vae_entries: Mapping[str, Any] = field(default_factory=dict)
    text_folders: Mapping[Role, str] = field(default_factory=dict)
    own_levels: bool = False
    scales_latent: bool = True
    libraries: Mapping[str, str] = field(default_factory=dict)
    config_entries: Mapping[str, Any] = field(default_factory=dict)
    distilled_entries: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models: its facts, in groups. Fields without a default must be decided for each family.

    name      short and stable, "lumina2": recipes and manifests contain it
    title     for human readers
    detect    how its diffusion model is recognised
    build     how its diffusion model is built and called
    text      its text encoders, and how each is read
    latent    name of its latents (`pool.families.parts.latent_formats`)
    shifts_latent  whether the mean of those latents is subtracted, as by most pipelines; else they are only scaled
    sampling  prediction, noise, inputs and defaults; for videos and audio also `video` and `audio`. The value that
              travels to the controller, which `pool.families.transformer_families` completes with what `name` and
              `text` imply
    size      width and height of the training images or videos, in pixels; zeros for audio
    folder    how diffusers stores it in folders
    lora      names of its weights in LoRA files
    sources   where the figures of `sampling` are from
    options   optional methods and models that its runs can use
    distilled    sampling of the distilled model with the same tensors, as its folder says; None: there is none
    two_experts  two models of the family as experts for high and low noise; None if there are none
    """

    name: str
    title: str
    detect: Detection
    build: ModelBuild
    text: TextInputs
    latent: str
    sampling: SamplingFacts
    folder: DiffusersFolder
    lora: LoraNaming
    sources: str
    size: tuple[int, int] = (1024, 1024)
    shifts_latent: bool = True
    options: OptionFacts = OptionFacts()
    distilled: SamplingFacts | None = None
    two_experts: TwoExperts | None = None

    def __post_init__(self) -> None:
        """Check what every family must state and `SamplingFacts` leaves open. Raises ValueError naming the field."""
        found = (self.sampling, self.distilled, None if self.two_experts is None else self.two_experts.sampling)
        for facts in (each for each in found if each is not None):
            if facts.defaults is None:
                raise ValueError(f"family {self.name}: sampling.defaults: found None, expected its defaults")
            if facts.side_multiple < 1 or any(side % facts.side_multiple for side in self.size):
                expected = f"a divisor of its size of {self.size[0]} x {self.size[1]} pixels"
                raise ValueError(
                    f"family {self.name}: sampling.side_multiple: found {facts.side_multiple}, expected {expected}"
                )
            if (facts.noise.kind is NoiseKind.FLOW) != (facts.prediction is Prediction.FLOW):
                raise ValueError(
                    f"family {self.name}: sampling.prediction: found {facts.prediction.value} with the noise "
                    f"{facts.noise.kind.value}, expected flow with flow only"
                )

    @property
    def required_inputs(self) -> frozenset[str]:
        """The names in `ModelKwargs` that its call requires."""
        return self.sampling.reads - self.build.optional_inputs

    @property
    def module(self) -> str:
        """The name of its class in diffusers, or in `pool.models.components.diffusion.adapted_modules`."""
        return self.build.module

    @property
    def layout_names(self) -> LayoutNames | None:
        """The layout of the names of its published files; None if `build.convert` is a function."""
        convert = self.build.convert
        if isinstance(convert, str):
            return LayoutNames(convert)
        return convert if isinstance(convert, LayoutNames) else None

    @property
    def lora_family(self) -> str:
        """The name under which LoRAs know its weights."""
        return self.name

    @property
    def readings_name(self) -> str:
        """The name under which its text encoders are read."""
        return self.text.set_name or self.name


def defaults_like(facts: SamplingFacts, **changes: Any) -> SamplingDefaults:
    """Return the defaults of `facts` with these fields changed, for a family that differs from another in them."""
    assert facts.defaults is not None, "no defaults to change"
    return replace(facts.defaults, **changes)


def video_like(facts: SamplingFacts, **changes: Any) -> VideoFacts:
    """Return the video facts of `facts` with these fields changed, for a family that differs from another in them."""
    assert facts.video is not None, "no video facts to change"
    return replace(facts.video, **changes)
