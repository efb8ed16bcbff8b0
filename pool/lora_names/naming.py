"""How LoRA files write the name of a diffusion model's weight: rules, and which family has which. Torch-free.

A rule is a beginning and a spelling of the weight's place in the model. The two spellings that everything is made of
are the checkpoint's own keys and the module names of diffusers; what they mean is not written here but follows from a
key map. `further` of a family adds the few names that are neither.

Sources of the conventions: the files that kohya's scripts, LyCORIS, OneTrainer, SimpleTuner, diffusers, PEFT and the
trainers of single models publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from modelpool.pool.lora_names.hunyuan import flux_base, original_base

if TYPE_CHECKING:
    from modelpool.pool.keymaps.key_map import RowRange

Ranges: TypeAlias = "tuple[RowRange, ...]"
Spelled: TypeAlias = "Mapping[Spelling, Mapping[str, Ranges]]"


class Spelling(Enum):
    """How the place of a weight in the model is written.

    CHECKPOINT  the checkpoint's key without its prefix and without its last part, for weights
    WHOLE_KEY   the checkpoint's key without its prefix, for everything that is no weight: biases, tables, scales
    DIFFUSERS   diffusers' name of a weight, without its last part
    """

    CHECKPOINT = "checkpoint"
    WHOLE_KEY = "whole key"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to write names: `beginning`, then the base in one spelling.

    joined  with underscores for dots
    turn    what is done to the base first
    """

    beginning: str
    spelling: Spelling
    joined: bool = False
    turn: Callable[[str], str] = str

    def write(self, base: str) -> str:
        """The name of the weight that its spelling calls `base`."""
        turned = self.turn(base)
        return self.beginning + (turned.replace(".", "_") if self.joined else turned)


@dataclass(frozen=True, slots=True)
class Naming:
    """All ways in which the LoRAs of one family write names.

    rules    the earlier counts where two make the same name
    further  bases that neither spelling has, from all that they have
    """

    rules: tuple[Rule, ...]
    further: Callable[[Spelled], Iterator[tuple[Spelling, str, Ranges]]] = field(default=lambda spelled: iter(()))


def naming_of(family: str) -> Naming:
    """The names that LoRAs of `family` use; for an unknown one, those that are made of the checkpoint's keys."""
    return NAMINGS.get(family, GENERIC)


def written_names(naming: Naming, spelled: Spelled) -> Iterator[tuple[str, Ranges]]:
    """Every name that `naming` makes of the bases in `spelled`, and the rows that it means. Several rules may make one
    name; what the first of them says counts."""
    bases: dict[Spelling, dict[str, Ranges]] = {s: dict(spelled.get(s, {})) for s in Spelling}
    for spelling, base, ranges in list(naming.further(spelled)):
        bases[spelling].setdefault(base, ranges)
    for rule in naming.rules:
        for base, ranges in bases[rule.spelling].items():
            yield rule.write(base), ranges


def _as_attention_processor(base: str) -> str:
    """`base` as diffusers spelled it while LoRAs lived in attention processors."""
    return base.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")


def _dotted(spelling: Spelling, *beginnings: str) -> tuple[Rule, ...]:
    return tuple(Rule(beginning, spelling) for beginning in beginnings)


def _joined(spelling: Spelling, *beginnings: str) -> tuple[Rule, ...]:
    return tuple(Rule(beginning, spelling, joined=True) for beginning in beginnings)


#: names that say themselves that a checkpoint's key follows
_CHECKPOINT_KEYS = (
    *_dotted(Spelling.CHECKPOINT, "diffusion_model.", "model.diffusion_model."),
    *_dotted(Spelling.WHOLE_KEY, "diffusion_model.", "model.diffusion_model."),
    *_joined(Spelling.CHECKPOINT, "lora_unet_"),
)
#: the conventions of diffusers, PEFT and others over the checkpoint's keys, as trainers of original code write them
_BORROWED = (
    *_dotted(Spelling.CHECKPOINT, "transformer.", "base_model.model.", ""),
    *_joined(Spelling.CHECKPOINT, "lycoris_", "lora_transformer_"),
)
_UNET_RULES = (
    *_joined(Spelling.DIFFUSERS, "lora_unet_", "lycoris_"),
    *_dotted(Spelling.DIFFUSERS, "unet.", "base_model.model.", "unet.base_model.model.", ""),
    *(Rule(b, Spelling.DIFFUSERS, turn=_as_attention_processor) for b in ("unet.", "base_model.model.", "")),
    *_dotted(Spelling.CHECKPOINT, "unet.", "base_model.model.", ""),
    *_joined(Spelling.CHECKPOINT, "lycoris_"),
)
_TRANSFORMER_RULES = (
    *_dotted(Spelling.DIFFUSERS, "transformer.", "base_model.model.", "unet.base_model.model.", "", "diffusion_model."),
    *_joined(Spelling.DIFFUSERS, "lycoris_", "lora_transformer_", "lora_unet_"),
)


def _unet_labels(spelled: Spelled) -> Iterator[tuple[Spelling, str, Ranges]]:
    """The embedding of labels has two names in diffusers: which one a UNet uses is a matter of its configuration."""
    names = spelled[Spelling.DIFFUSERS]
    for layer in ("linear_1", "linear_2"):
        for name, other in (("add_embedding", "class_embedding"), ("class_embedding", "add_embedding")):
            if f"{name}.{layer}" in names:
                yield Spelling.DIFFUSERS, f"{other}.{layer}", names[f"{name}.{layer}"]


#: the layers of a feed-forward, as diffusers calls them in other transformers and in Flux 2
FLUX2_LAYERS = {"0.proj": "linear_in", "2": "linear_out"}


def _flux_fused(spelled: Spelled) -> Iterator[tuple[Spelling, str, Ranges]]:
    """Names for the fused layers of single blocks: queries, keys and values of `linear1` as one, and the names that the
    same layers have in Flux 2, which diffusers keeps whole. Feed-forwards have those of Flux 2 as well."""
    names = spelled[Spelling.DIFFUSERS]
    for base, ranges in names.items():
        block, found, layer = base.rpartition(".net.")
        if found and layer in FLUX2_LAYERS:
            yield Spelling.DIFFUSERS, f"{block}.{FLUX2_LAYERS[layer]}", ranges
    for base, ranges in spelled[Spelling.CHECKPOINT].items():
        _, block, layer = (*base.split("."), "", "")[:3]
        if not base.startswith("single_blocks.") or layer not in ("linear1", "linear2"):
            continue
        attention = f"single_transformer_blocks.{block}.attn"
        if layer == "linear2":
            yield Spelling.DIFFUSERS, f"{attention}.to_out", ranges
        else:
            yield Spelling.DIFFUSERS, f"{attention}.to_qkv_mlp_proj", ranges
            rows = sum(part.rows for q in "qkv" for part in names.get(f"{attention}.to_{q}", ()))
            if rows:
                (whole,) = ranges
                shape = (rows, *whole.source_shape[1:])
                yield Spelling.CHECKPOINT, f"{base}_qkv", (replace(whole, source_shape=shape, rows=rows),)


def _hunyuan_spellings(spelled: Spelled) -> Iterator[tuple[Spelling, str, Ranges]]:
    """HunyuanVideo's keys in the spelling that the file is not in."""
    for base, ranges in spelled[Spelling.CHECKPOINT].items():
        for name in (original_base(base), flux_base(base)):
            if name != base:
                yield Spelling.CHECKPOINT, name, ranges


def _cascade_queries(spelled: Spelled) -> Iterator[tuple[Spelling, str, Ranges]]:
    """Queries, keys and values by themselves, which a published file has in one tensor: as files that have them apart
    call them."""
    for base, ranges in spelled[Spelling.DIFFUSERS].items():
        stem, found, part = base.partition(".attention.to_")
        if found and part in ("q", "k", "v"):
            yield Spelling.CHECKPOINT, f"{stem}.attention.attn.to_{part}", ranges


GENERIC = Naming((*_CHECKPOINT_KEYS, *_BORROWED))
_UNET = Naming((*_CHECKPOINT_KEYS, *_UNET_RULES), _unet_labels)
_TRANSFORMER = Naming((*_CHECKPOINT_KEYS, *_TRANSFORMER_RULES, *_BORROWED))
_HUNYUAN_VIDEO = replace(_TRANSFORMER, further=_hunyuan_spellings)
_FLUX = replace(_TRANSFORMER, further=_flux_fused)
#: the two spellings have the same names for different norms, so each has beginnings of its own
_HUNYUAN_DIT = Naming(
    (
        *_CHECKPOINT_KEYS,
        *_dotted(Spelling.CHECKPOINT, "base_model.model.", ""),
        *_joined(Spelling.CHECKPOINT, "lycoris_"),
        *_dotted(Spelling.DIFFUSERS, "transformer."),
        *_joined(Spelling.DIFFUSERS, "lora_transformer_"),
    )
)
_CASCADE = Naming(
    (
        *GENERIC.rules,
        *_joined(Spelling.CHECKPOINT, "lora_prior_unet_"),
        *_joined(Spelling.DIFFUSERS, "lora_prior_unet_"),
        *_dotted(Spelling.DIFFUSERS, "prior."),
        Rule("prior.", Spelling.DIFFUSERS, turn=_as_attention_processor),
        *_dotted(Spelling.CHECKPOINT, "prior."),
    ),
    _cascade_queries,
)

NAMINGS: Mapping[str, Naming] = {
    "sd1": _UNET,
    "sd2": _UNET,
    "sdxl": _UNET,
    "sdxl_refiner": _UNET,
    "cascade": _CASCADE,
    "sd3": _TRANSFORMER,
    "auraflow": _TRANSFORMER,
    "pixart": _TRANSFORMER,
    "hunyuan_dit": _HUNYUAN_DIT,
    "flux": _FLUX,
    "flux2": _TRANSFORMER,
    "chroma": _FLUX,
    "mochi": _TRANSFORMER,
    "ltxv": _TRANSFORMER,
    "hunyuan_video": _HUNYUAN_VIDEO,
    "hunyuan_video_15": _HUNYUAN_VIDEO,
    "hunyuan_image": _HUNYUAN_VIDEO,
    "cosmos": _TRANSFORMER,
    "lumina2": _TRANSFORMER,
    "z_image": _TRANSFORMER,
    "wan": _TRANSFORMER,
    "hidream": _TRANSFORMER,
    # diffusers has the names of the original code for these
    "ace_step": GENERIC,
    "kandinsky5": GENERIC,
    "omnigen2": GENERIC,
    "qwen_image": GENERIC,
}
