"""The options of a run (`pool.values.core.run_options`) that each family of models supports. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.family import OptionFacts
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.run_options import RUN_OPTIONS
from modelpool.pool.values.core.sampling_facts import CfgRescale, Guidance, ImageConcat, Prediction, SamplingFacts

#: the class of diffusers of UNets that are called without a row of their own
_UNET = "UNet2DConditionModel"
#: what needs levels of a UNet
_UNET_OPTIONS = frozenset({"freeu", "pag", "sag", "hypertile", "deepcache", "attention_scale", "deep_shrink"})
#: kinds of guidance by a negative prompt
_GUIDED = frozenset(
    {
        Guidance.CLASSIFIER_FREE,
        Guidance.PROJECTED_LATE,
        Guidance.PROJECTED,
        Guidance.RISING_WITH_FRAMES,
        Guidance.RISING_AND_FALLING,
    }
)


def supported_options(facts: SamplingFacts) -> frozenset[str]:
    """Return the names of the options that models of `facts` support."""
    found = set[str]()
    own = _option_facts().get(facts.model, OptionFacts())
    guidance = Guidance.CLASSIFIER_FREE if facts.defaults is None else facts.defaults.guidance
    if facts.image_concat is ImageConcat.INSTEAD:  # one step, in which nothing is generated
        return frozenset()
    if not facts.model:  # a UNet that is called without a row of its own
        found |= _UNET_OPTIONS
        if facts.image_concat is None:
            found.add("tiled")
        if facts.image_concat is ImageConcat.PIXELS:
            found.discard("sag")  # its noisy image input belongs to the latent that is not blurred
    if own.skips_blocks:
        found |= {"slg", "fbcache", "block_scale"}
    if own.teacache and facts.low_noise is None:  # two experts are Wan 2.2
        found.add("teacache")
    if own.moves_positions:
        found.add("rope")
    if own.caches_references:
        found.add("kv_cache")
    if own.takes_windows:
        found.add("windows")
    has_sound = facts.video is not None and facts.video.sound is not None  # its guidance is of frames and sound
    is_plain = not has_sound and guidance is Guidance.CLASSIFIER_FREE and facts.cfg_rescale is CfgRescale.NOTHING
    if guidance in _GUIDED and not has_sound:
        found.add("rescale_cfg")
    if is_plain:
        found |= {"cfg_norm", "fresca", "apg", "tcfg"}
        if facts.image_concat is None or facts.image_concat.is_inpaint:  # others are guided by their image, too
            found.add("cfg_override")
        if _reads_empty_text(facts):
            found.add("perp_neg")
    if facts.audio is None and not has_sound:
        found.add("differential")
    if facts.prediction in (Prediction.NOISE, Prediction.VELOCITY) and not has_sound:
        found.add("epsilon_scaling")  # a flow predicts no noise alone
    if own.isolates_sound:
        found.add("isolation")
    if facts.video is not None and facts.video.sound is not None and facts.video.sound.cfg:
        found.add("sound")
    if is_plain and facts.prediction is Prediction.FLOW:
        found.add("cfg_zero")
    return frozenset(found)


def _reads_empty_text(facts: SamplingFacts) -> bool:
    """Whether images are made of texts alone, of which one more may be predicted for, as for a region."""
    of_images = facts.video is None and facts.audio is None and not facts.takes_view and not facts.is_prior_stage
    plain_image = facts.image_concat is None or facts.image_concat.is_inpaint
    of_texts = facts.reads_text and not facts.names_images and not facts.learned_negative and not facts.writes_tokens
    return of_images and plain_image and of_texts


def families_with(option: str) -> tuple[str, ...]:
    """Return the names of the families that support `option`, sorted."""
    return _families_by_option()[option]


def family_name(facts: SamplingFacts) -> str:
    """Return the name of the family of `facts`; of several with equal facts, the one that others are variants of."""
    if facts.model:
        return facts.model
    named = [family for family in running_families().values() if family.sampling == facts]
    return min(named, key=lambda family: bool(family.relative)).name if named else _UNET


@cache
def _families_by_option() -> Mapping[str, tuple[str, ...]]:
    supported = {name: supported_options(family.sampling) for name, family in running_families().items()}
    return MappingProxyType(
        {option: tuple(sorted(name for name in supported if option in supported[name])) for option in RUN_OPTIONS}
    )


@cache
def _option_facts() -> Mapping[str, OptionFacts]:
    """Return the facts about options of each transformer, by family."""
    return MappingProxyType({family.name: family.options for family in defined_families()})
