"""Options of a sampling run: extensions of the guidance, changes inside the diffusion model, and caches over the steps.

Frozen values with their ranges and defaults; torch-free. `pool.families.option_support` says which families have which,
`pool.inference.extensions` implements them, `actors.request.run_option_fields` parses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from modelpool.pool.values.core.step_shares import begins_within
from modelpool.pool.values.specs.wire_value import WireValue

#: factors by the name of a block, or of all blocks of a kind
BlockFactors: TypeAlias = tuple[tuple[str, float], ...]
#: blocks of a transformer that an option may name, tiles along a side, steps of a run: bounds of outside input
_MAX_BLOCK, _MAX_SIDE, _MAX_INTERVAL = 999, 16384, 1000
#: latent frames of a window
_MAX_FRAMES = 16384
#: factors of a block
_MAX_FACTOR = 10.0
#: marks options, and settings of options, that were added after their first version: records leave out their default,
#: so that they change no existing digest
_LATER: Mapping[str, bool] = {"later": True}


@dataclass(frozen=True, slots=True)
class Limits:
    """The accepted values of one setting, and its meaning for users.

    least, most  of numbers; of the numbers in a list for the kind "wholes", of the factors for the kind "blocks"
    names        accepted words, for the kind "name"
    The kind "blocks" has factors by the name of a block.
    """

    kind: Literal["number", "whole", "wholes", "name", "blocks"]
    meaning: str
    least: float = 0.0
    most: float = 0.0
    names: tuple[str, ...] = ()


def _number(default: float, least: float, most: float, meaning: str) -> Any:
    return field(default=default, metadata={"limits": Limits("number", meaning, least, most)})


def _whole(default: int, least: int, most: int, meaning: str) -> Any:
    return field(default=default, metadata={"limits": Limits("whole", meaning, least, most)})


def _wholes(default: tuple[int, ...], meaning: str) -> Any:
    return field(default=default, metadata={"limits": Limits("wholes", meaning, 0, _MAX_BLOCK)})


def _blocks(meaning: str) -> Any:
    return field(default=(), metadata={"limits": Limits("blocks", meaning, -_MAX_FACTOR, _MAX_FACTOR)})


def _later(setting: Any) -> Any:
    return field(default=setting.default, metadata={**setting.metadata, **_LATER})


def _name(default: str, names: tuple[str, ...], meaning: str) -> Any:
    return field(default=default, metadata={"limits": Limits("name", meaning, names=names)})


def _start(default: float = 0.0) -> Any:
    return _number(default, 0.0, 1.0, "share of the steps before it acts")


def _end(default: float = 1.0) -> Any:
    return _number(default, 0.0, 1.0, "share of the steps after which it no longer acts")


class _Timed:
    """An option that acts during a part of the schedule."""

    __slots__ = ()

    start: float
    end: float

    def acts(self, step: int, steps: int) -> bool:
        """Return whether it acts in step number `step`, from 0, of a schedule of `steps`."""
        return begins_within(step, steps, self.start, self.end)


@dataclass(frozen=True, slots=True)
class FreeU(WireValue):
    """Scales the features of the two deepest levels of a UNet, and the low frequencies of their skip connections.

    Source: Si et al. 2023 ("FreeU"); version 2 scales by the normalized mean over the channels.
    """

    b1: float = _number(1.3, 0.0, 10.0, "factor of the features of the deepest level")
    b2: float = _number(1.4, 0.0, 10.0, "factor of the features of the level above it")
    s1: float = _number(0.9, 0.0, 10.0, "factor of the skip connections of the deepest level")
    s2: float = _number(0.2, 0.0, 10.0, "factor of the skip connections of the level above it")
    version: int = _whole(2, 1, 2, "1 scales half of the channels; 2 scales them by their mean at each position")
    levels: str = _name(
        "channels",
        ("channels", "blocks"),
        "which layers belong to a level: those with 4 and 2 times the channels of the first layer, as in the paper and "
        "ComfyUI, or the first two up blocks, as in diffusers",
    )


@dataclass(frozen=True, slots=True)
class PerturbedAttention(_Timed, WireValue):
    """Perturbed attention guidance (PAG): guides away from a prediction with the identity as self-attention in the
    middle block. Source: Ahn et al. 2024."""

    scale: float = _number(3.0, 0.0, 100.0, "guidance scale")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class SelfAttention(_Timed, WireValue):
    """Self-attention guidance (SAG): guides away from a prediction for a latent that is blurred where the middle block
    attends. Source: Hong et al. 2023."""

    scale: float = _number(0.75, -5.0, 5.0, "guidance scale")
    blur: float = _number(1.0, 0.01, 10.0, "standard deviation of the blur, in cells of the latent")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class SkipLayers(_Timed, WireValue):
    """Skip layer guidance (SLG): guides away from a prediction without some blocks of a transformer.

    Source: Stability AI's sampling of Stable Diffusion 3.5 Medium.
    """

    scale: float = _number(2.8, 0.0, 100.0, "guidance scale")
    layers: tuple[int, ...] = _wholes((7, 8, 9), "skipped blocks, from 0")
    single: tuple[int, ...] = _wholes((), "skipped blocks among those that read text and image together, from 0")
    start: float = _start(0.01)
    end: float = _end(0.2)
    rescale: float = _later(
        _number(0.0, 0.0, 10.0, "share of the result that has the standard deviation of the prompt's")
    )


@dataclass(frozen=True, slots=True)
class CfgZero(WireValue):
    """CFG-Zero*: scales the negative prediction by its projection on the positive one, and predicts nothing in the
    first steps. Source: Fan et al. 2025."""

    zero_steps: int = _whole(1, 0, _MAX_INTERVAL, "steps at the start of the schedule that leave the latent as it is")


@dataclass(frozen=True, slots=True)
class RescaleCfg(WireValue):
    """Scales guided predictions to the standard deviation of those for the prompt. Source: Lin et al. 2024, section
    3.4."""

    factor: float = _number(0.7, 0.0, 1.0, "share of the rescaled prediction in the result")


@dataclass(frozen=True, slots=True)
class CfgNorm(WireValue):
    """Scales guided predictions, as clean latents, down to the length of those for the prompt at each position, where
    they are longer. Source: "CFGNorm" of ComfyUI, after the pipeline of Qwen-Image-Edit."""

    strength: float = _number(1.0, 0.0, 100.0, "factor of the result")


@dataclass(frozen=True, slots=True)
class FrequencyScale(WireValue):
    """Scales low and high spatial frequencies of what guidance adds, each by its factor: those within `cutoff` indices
    of the transform from frequency 0 are low. Source: Huang et al. 2025 ("FreSca: Scaling in Frequency Space Enhances
    Diffusion Models")."""

    low: float = _number(1.0, 0.0, 10.0, "factor of low frequencies")
    high: float = _number(1.25, 0.0, 10.0, "factor of high frequencies")
    cutoff: int = _whole(20, 1, 10_000, "indices of the transform from frequency 0 that are low")


@dataclass(frozen=True, slots=True)
class ProjectedGuidance(WireValue):
    """Adaptive projected guidance (APG): the prediction for the prompt plus cfg - 1 times its difference to the one for
    the negative prompt, in which the part along the prediction for the prompt has a factor, as clean latents. Source:
    Sadat et al. 2024 ("Eliminating Oversaturation and Artifacts of High Guidance Scales in Diffusion Models")."""

    eta: float = _number(0.0, -10.0, 10.0, "factor of the parallel part; 1 is guidance without projection")
    norm: float = _number(15.0, 0.0, 10_000.0, "largest norm of the difference; 0: any")
    momentum: float = _number(-0.5, -5.0, 1.0, "factor of earlier differences, which are added; 0: none")


@dataclass(frozen=True, slots=True)
class TangentialDamping(WireValue):
    """Guides from the part of the negative prediction along the main direction of both predictions (TCFG). Source: Kwon
    et al. 2025 ("TCFG: Tangential Damping Classifier-free Guidance")."""

    strength: float = _number(1.0, 0.0, 1.0, "share of the other part that is removed")


@dataclass(frozen=True, slots=True)
class PerpendicularNegative(WireValue):
    """Guides from the prediction for an empty text: to the prompt, and away from the part of the negative prompt that
    is perpendicular to it. Source: Armandpour et al. 2023 ("Re-imagine the Negative Prompt Algorithm")."""

    scale: float = _number(1.0, 0.0, 100.0, "weight of the negative prompt")


@dataclass(frozen=True, slots=True)
class CfgOverride(_Timed, WireValue):
    """Guides with another scale during a part of the run; outside of it the scale is cfg, also in the last steps of
    models that are guided less there. Source: the presets of Ideogram 4."""

    cfg: float = _number(3.0, 0.0, 100.0, "guidance scale")
    shares_of: str = _name("steps", ("steps", "noise"), "what start and end are shares of: the steps, or noise levels")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class EpsilonScaling(WireValue):
    """Divides the noise that a step predicts by a factor, against the growing error of predictions for latents that are
    predictions themselves. Source: Ning et al. 2024 ("Elucidating the Exposure Bias in Diffusion Models"), uniform
    schedule."""

    factor: float = _number(1.005, 0.5, 1.5, "divisor of the noise: above 1 predicts less of it")


@dataclass(frozen=True, slots=True)
class DifferentialMask(WireValue):
    """Regenerates each part of a soft mask from another step on: at the first step where the mask is white, at the last
    one wherever it is not black. Source: Levin and Fried 2023 ("Differential Diffusion")."""

    strength: float = _number(1.0, 0.0, 1.0, "share of the mask of each step in the mask; the rest is the mask itself")


@dataclass(frozen=True, slots=True)
class AttentionScale(_Timed, WireValue):
    """Scales what the attention of some blocks of a UNet adds to the image. Blocks are named as for LoRAs: IN01, MID,
    OUT05; IN and OUT are all of them."""

    image: tuple[tuple[str, float], ...] = _blocks("factors of the attention of the image to itself, by block")
    text: tuple[tuple[str, float], ...] = _blocks("factors of the attention to the text, by block")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class BlockScale(_Timed, WireValue):
    """Scales what some blocks of a transformer add to the tokens of image and text. Blocks are named as for LoRAs: D07
    (or B07 in models with blocks of one kind) and S12; D and S are all of them."""

    blocks: tuple[tuple[str, float], ...] = _blocks("factors by block")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class HyperTile(WireValue):
    """Computes the self-attention of the upper levels of a UNet in tiles. Source: HyperTile of tfernd, as in ComfyUI
    with a swap size of 1."""

    tile: int = _whole(256, 32, _MAX_SIDE, "least side of a tile, in pixels")
    depth: int = _whole(0, 0, 3, "levels of the UNet with tiles below the first")


#: how features are scaled
_SCALING = ("bicubic", "nearest-exact", "bilinear", "area")


@dataclass(frozen=True, slots=True)
class DeepShrink(_Timed, WireValue):
    """Computes the deep layers of a UNet on smaller features in the first steps, against repeated objects in large
    images. Source: Kohya 2023 ("Deep Shrink Hires.fix")."""

    block: int = _whole(3, 1, 32, "input block behind which features are smaller")
    factor: float = _number(2.0, 1.0, 9.0, "divisor of their height and width")
    after_skip: int = _whole(1, 0, 1, "1: the skip connection of the block keeps its size; 0: it is smaller too")
    down: str = _name("bicubic", _SCALING, "how features are made smaller")
    up: str = _name("bicubic", _SCALING, "how they get the size of a skip connection")
    shares_of: str = _name("steps", ("steps", "noise"), "what start and end are shares of: the steps, or noise levels")
    start: float = _start()
    end: float = _end(0.35)


@dataclass(frozen=True, slots=True)
class TiledDiffusion(WireValue):
    """Predicts overlapping tiles of the latent one after the other and averages them. Sources: Bar-Tal et al. 2023
    ("MultiDiffusion"); Jimenez 2023 ("Mixture of Diffusers") for the Gaussian weights."""

    tile: int = _whole(512, 64, _MAX_SIDE, "side of a tile, in pixels")
    overlap: int = _whole(128, 0, _MAX_SIDE, "pixels that neighbours share")
    weights: str = _name("equal", ("equal", "gaussian"), "weights of the average: equal (MultiDiffusion), or gaussian")


@dataclass(frozen=True, slots=True)
class DeepCache(_Timed, WireValue):
    """Computes the deep layers of a UNet in some steps only. Source: Ma et al. 2024 ("DeepCache")."""

    interval: int = _whole(3, 1, _MAX_INTERVAL, "every how many steps the deep layers are computed")
    layers: int = _whole(1, 0, 8, "residual layers of the first level that are computed in every step")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class ReferenceCache(WireValue):
    """Computes the keys and values of reference images once in a run: their tokens attend to each other alone, and have
    a fixed time. For models that were trained so. Source: Flux2KleinKVPipeline of diffusers, for FLUX.2 klein KV of
    Black Forest Labs."""

    time: float = _number(0.0, 0.0, 1.0, "time that reference images have: 0 is without noise, 1 is noise alone")


@dataclass(frozen=True, slots=True)
class FrameWindows(WireValue):
    """Predicts overlapping windows of a video one after the other and averages them, for videos that are longer than in
    training. Lengths are in latent frames: in models of Wan, one for the first frame and one for each 4 frames behind
    it. Sources: Bar-Tal et al. 2023 ("MultiDiffusion"); animatediff-cli for looped windows; Qiu et al. 2023
    ("FreeNoise") for the noise."""

    length: int = _whole(21, 1, _MAX_FRAMES, "latent frames of a window")
    overlap: int = _whole(7, 0, _MAX_FRAMES, "latent frames that neighbours share; batched windows share none")
    schedule: str = _name(
        "standard_static",
        ("standard_static", "standard_uniform", "looped_uniform", "batched"),
        "windows: at equal distances, shifted in each step, shifted and going on at the beginning, or side by side",
    )
    fuse: str = _name(
        "pyramid",
        ("pyramid", "relative", "flat", "overlap-linear"),
        "weights in the average: rising to the middle of a window, falling with the distance from it, equal, or rising "
        "and falling where windows overlap",
    )
    stride: int = _whole(1, 1, 16, "of uniform windows: 2 has windows of each second frame, too, 3 of each fourth one")
    closed: int = _whole(0, 0, 1, "1: the last of looped windows overlaps the first one")
    freenoise: int = _whole(1, 0, 1, "1: a window has the noise of the window before it, in another order")
    retain: int = _whole(0, 0, 1, "1: each window begins with the image that the video begins with")
    anchor: int = _whole(1, 0, 1, "1: windows behind the beginning are predicted with the latent frame before them")


@dataclass(frozen=True, slots=True)
class FirstBlockCache(_Timed, WireValue):
    """Skips the blocks of a transformer after the first in steps in which the first changes little. Source: First
    Block Cache of ParaAttention, as in diffusers."""

    threshold: float = _number(0.1, 0.0, 10.0, "relative change of what the first block adds, below which it skips")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class TeaCache(_Timed, WireValue):
    """Skips the blocks of a transformer in steps in which the modulated input of the first has changed little since
    the last step that did not. Families are those for which its authors published how the change of the output follows
    from the input's. Source: Liu et al. 2024 ("TeaCache")."""

    threshold: float = _number(
        0.0, 0.0, 10.0, "accumulated relative change of the output, below which it skips; 0: the published one"
    )
    start: float = _start()
    end: float = _end()


def _scale(axis: str) -> Any:
    return _number(1.0, 0.0, 100.0, f"factor of the {axis}")


def _shift(axis: str) -> Any:
    return _number(0.0, -256.0, 256.0, f"added to the scaled {axis}, in patches")


@dataclass(frozen=True, slots=True)
class RotaryPositions(WireValue):
    """Scales and shifts the rotary positions of the image or video, with its reference images: position * scale +
    shift. Source: "ScaleROPE" of ComfyUI; factors below 1 are position interpolation, Chen et al. 2023."""

    scale_x: float = _scale("columns")
    shift_x: float = _shift("columns")
    scale_y: float = _scale("rows")
    shift_y: float = _shift("rows")
    scale_t: float = _scale("frames of a video; of images, the coordinate that numbers reference images")
    shift_t: float = _shift("coordinate of time")

    @property
    def is_plain(self) -> bool:
        """Whether all positions are the model's."""
        return self == RotaryPositions()


@dataclass(frozen=True, slots=True)
class Isolation(_Timed, WireValue):
    """Guides videos with sound away from a prediction in which frames and audio do not read each other.

    Source: the modality guidance of diffusers' LTX2Pipeline; 1 is no guidance.
    """

    scale: float = _number(3.0, 1.0, 100.0, "guidance scale of the frames")
    audio: float = _number(3.0, 1.0, 100.0, "guidance scale of the audio")
    start: float = _start()
    end: float = _end()


@dataclass(frozen=True, slots=True)
class SoundScale(WireValue):
    """The guidance of the audio of a video, where it has a scale of its own, and how much of guided predictions, of
    frames and audio, is scaled to the standard deviation of those for the prompt.

    Source: `audio_guidance_scale`, `guidance_rescale` and `audio_guidance_rescale` of diffusers' LTX2Pipeline.
    """

    cfg: float = _number(7.0, 0.0, 100.0, "guidance scale of the audio")
    rescale: float = _number(0.7, 0.0, 1.0, "share of the rescaled predictions in the result")


RunOption: TypeAlias = (
    FreeU
    | PerturbedAttention
    | SelfAttention
    | SkipLayers
    | CfgZero
    | RescaleCfg
    | HyperTile
    | TiledDiffusion
    | DeepCache
    | FirstBlockCache
    | TeaCache
    | RotaryPositions
    | AttentionScale
    | BlockScale
    | Isolation
    | CfgNorm
    | DifferentialMask
    | FrequencyScale
    | ProjectedGuidance
    | TangentialDamping
    | EpsilonScaling
    | PerpendicularNegative
    | DeepShrink
    | SoundScale
    | CfgOverride
    | ReferenceCache
    | FrameWindows
)


@dataclass(frozen=True, slots=True)
class RunOptions(WireValue):
    """The options of one run; None for those that are off."""

    freeu: FreeU | None = None
    pag: PerturbedAttention | None = None
    sag: SelfAttention | None = None
    slg: SkipLayers | None = None
    cfg_zero: CfgZero | None = None
    rescale_cfg: RescaleCfg | None = None
    hypertile: HyperTile | None = None
    tiled: TiledDiffusion | None = None
    deepcache: DeepCache | None = None
    fbcache: FirstBlockCache | None = None
    teacache: TeaCache | None = None
    rope: RotaryPositions | None = field(default=None, metadata=_LATER)
    attention_scale: AttentionScale | None = field(default=None, metadata=_LATER)
    block_scale: BlockScale | None = field(default=None, metadata=_LATER)
    isolation: Isolation | None = field(default=None, metadata=_LATER)
    cfg_norm: CfgNorm | None = field(default=None, metadata=_LATER)
    differential: DifferentialMask | None = field(default=None, metadata=_LATER)
    fresca: FrequencyScale | None = field(default=None, metadata=_LATER, repr=False)
    apg: ProjectedGuidance | None = field(default=None, metadata=_LATER, repr=False)
    tcfg: TangentialDamping | None = field(default=None, metadata=_LATER, repr=False)
    epsilon_scaling: EpsilonScaling | None = field(default=None, metadata=_LATER, repr=False)
    perp_neg: PerpendicularNegative | None = field(default=None, metadata=_LATER, repr=False)
    deep_shrink: DeepShrink | None = field(default=None, metadata=_LATER, repr=False)
    sound: SoundScale | None = field(default=None, metadata=_LATER, repr=False)
    cfg_override: CfgOverride | None = field(default=None, metadata=_LATER, repr=False)
    kv_cache: ReferenceCache | None = field(default=None, metadata=_LATER, repr=False)
    windows: FrameWindows | None = field(default=None, metadata=_LATER, repr=False)

    def used(self) -> Iterator[tuple[str, RunOption]]:
        """Yield the name and the value of each option that is on, in the order of the table."""
        for name in () if self is NO_OPTIONS else RUN_OPTIONS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the options that are on."""
        return tuple(name for name, _ in self.used())

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return all settings of the options that are on, by name; later ones only if they are not the default."""
        return {name: _recorded(value) for name, value in self.used()}

    def recorded(self) -> dict[str, dict[str, Any] | None]:
        """Return what seeds of job files are derived from: `settings`, and None for options of the first version that
        are off."""
        values = {each.name: (each, getattr(self, each.name)) for each in dataclasses.fields(self)}
        return {
            name: None if value is None else _recorded(value)
            for name, (each, value) in values.items()
            if value is not None or "later" not in each.metadata
        }

    @property
    def is_empty(self) -> bool:
        """Whether all are off."""
        return self == NO_OPTIONS

    @property
    def extra_predictions(self) -> int:
        """Predictions of a step besides those for the texts."""
        return sum(option is not None for option in (self.pag, self.sag, self.slg, self.isolation))

    @property
    def skips_layers(self) -> bool:
        """Whether some calls of the model run some of its layers only."""
        return self.skips_by_content or self.slg is not None or self.isolation is not None

    @property
    def skips_by_content(self) -> bool:
        """Whether it depends on the latents which steps are computed in full: such a run has one image, so that others
        do not change it, and no state between two steps from which another run could continue."""
        return self.fbcache is not None or self.teacache is not None


def _recorded(option: RunOption) -> dict[str, Any]:
    return {
        each.name: value
        for each in dataclasses.fields(option)
        if (value := getattr(option, each.name)) != each.default or "later" not in each.metadata
    }


NO_OPTIONS = RunOptions()

#: the class of each option by its name
RUN_OPTIONS: Mapping[str, type[RunOption]] = MappingProxyType(
    {
        "freeu": FreeU,
        "pag": PerturbedAttention,
        "sag": SelfAttention,
        "slg": SkipLayers,
        "cfg_zero": CfgZero,
        "rescale_cfg": RescaleCfg,
        "hypertile": HyperTile,
        "tiled": TiledDiffusion,
        "deepcache": DeepCache,
        "fbcache": FirstBlockCache,
        "teacache": TeaCache,
        "rope": RotaryPositions,
        "attention_scale": AttentionScale,
        "block_scale": BlockScale,
        "isolation": Isolation,
        "cfg_norm": CfgNorm,
        "differential": DifferentialMask,
        "fresca": FrequencyScale,
        "apg": ProjectedGuidance,
        "tcfg": TangentialDamping,
        "epsilon_scaling": EpsilonScaling,
        "perp_neg": PerpendicularNegative,
        "deep_shrink": DeepShrink,
        "sound": SoundScale,
        "cfg_override": CfgOverride,
        "kv_cache": ReferenceCache,
        "windows": FrameWindows,
    }
)
#: the setting that a single number sets: `options={"pag": 3}`
MAIN_SETTING: Mapping[str, str] = MappingProxyType(
    {
        "pag": "scale",
        "sag": "scale",
        "slg": "scale",
        "isolation": "scale",
        "sound": "cfg",
        "cfg_zero": "zero_steps",
        "rescale_cfg": "factor",
        "cfg_norm": "strength",
        "differential": "strength",
        "apg": "eta",
        "tcfg": "strength",
        "perp_neg": "scale",
        "cfg_override": "cfg",
        "epsilon_scaling": "factor",
        "hypertile": "tile",
        "deep_shrink": "factor",
        "tiled": "tile",
        "deepcache": "interval",
        "fbcache": "threshold",
        "teacache": "threshold",
        "kv_cache": "time",
        "windows": "length",
    }
)


def limits_of(option: type[RunOption]) -> dict[str, Limits]:
    """Return the accepted values of each setting of `option`."""
    return {each.name: each.metadata["limits"] for each in dataclasses.fields(option)}
