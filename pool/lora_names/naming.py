"""Rules for the names of a diffusion model's weights in LoRA files, for each family. Torch-free.

A rule is a prefix and the source of the base name. The two sources are the checkpoint's keys and the module names of
diffusers; the weights that they mean follow from a key map. `extra_names` of a family adds the few names that are
neither.

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
BaseNames: TypeAlias = "Mapping[NameSource, Mapping[str, Ranges]]"


class NameSource(Enum):
    """Source of the base name of a weight.

    CHECKPOINT  the checkpoint's key without its prefix and without its last part, for weights
    WHOLE_KEY   the checkpoint's key without its prefix, for everything that is no weight: biases, tables, scales
    DIFFUSERS   diffusers' name of a weight, without its last part
    """

    CHECKPOINT = "checkpoint"
    WHOLE_KEY = "whole key"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True)
class NameRule:
    """A rule for names: `prefix`, then the base name from one source.

    joined     with underscores for dots
    transform  applied to the base name first
    """

    prefix: str
    source: NameSource
    joined: bool = False
    transform: Callable[[str], str] = str

    def write(self, base: str) -> str:
        """Return the LoRA name of the weight with the base name `base`."""
        transformed = self.transform(base)
        return self.prefix + (transformed.replace(".", "_") if self.joined else transformed)


@dataclass(frozen=True, slots=True)
class LoraNaming:
    """All rules for names in the LoRAs of one family.

    rules        the first wins if two make the same name
    extra_names  base names that neither source has, made from those of all sources
    """

    rules: tuple[NameRule, ...]
    extra_names: Callable[[BaseNames], Iterator[tuple[NameSource, str, Ranges]]] = field(
        default=lambda names_by_source: iter(())
    )


def naming_of(family: str) -> LoraNaming:
    """Return the naming of LoRAs of `family`; for an unknown one, names made of the checkpoint's keys."""
    return NAMINGS.get(family, GENERIC)


def generate_names(naming: LoraNaming, names_by_source: BaseNames) -> Iterator[tuple[str, Ranges]]:
    """Yield every name that `naming` makes of the base names, and the rows that it means. If several rules make one
    name, the first wins."""
    bases: dict[NameSource, dict[str, Ranges]] = {s: dict(names_by_source.get(s, {})) for s in NameSource}
    for source, base, ranges in list(naming.extra_names(names_by_source)):
        bases[source].setdefault(base, ranges)
    for rule in naming.rules:
        for base, ranges in bases[rule.source].items():
            yield rule.write(base), ranges


def _as_attention_processor(base: str) -> str:
    """Return `base` as diffusers named it when LoRAs were part of attention processors."""
    return base.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")


def _dotted(source: NameSource, *prefixes: str) -> tuple[NameRule, ...]:
    return tuple(NameRule(prefix, source) for prefix in prefixes)


def _joined(source: NameSource, *prefixes: str) -> tuple[NameRule, ...]:
    return tuple(NameRule(prefix, source, joined=True) for prefix in prefixes)


#: names whose prefix shows that a checkpoint's key follows
_CHECKPOINT_KEYS = (
    *_dotted(NameSource.CHECKPOINT, "diffusion_model.", "model.diffusion_model."),
    *_dotted(NameSource.WHOLE_KEY, "diffusion_model.", "model.diffusion_model."),
    *_joined(NameSource.CHECKPOINT, "lora_unet_"),
)
#: the conventions of diffusers, PEFT and others applied to the checkpoint's keys, as trainers of original code do
_BORROWED = (
    *_dotted(NameSource.CHECKPOINT, "transformer.", "base_model.model.", ""),
    *_joined(NameSource.CHECKPOINT, "lycoris_", "lora_transformer_"),
)
_UNET_RULES = (
    *_joined(NameSource.DIFFUSERS, "lora_unet_", "lycoris_"),
    *_dotted(NameSource.DIFFUSERS, "unet.", "base_model.model.", "unet.base_model.model.", ""),
    *(NameRule(b, NameSource.DIFFUSERS, transform=_as_attention_processor) for b in ("unet.", "base_model.model.", "")),
    *_dotted(NameSource.CHECKPOINT, "unet.", "base_model.model.", ""),
    *_joined(NameSource.CHECKPOINT, "lycoris_"),
)
_TRANSFORMER_RULES = (
    *_dotted(
        NameSource.DIFFUSERS, "transformer.", "base_model.model.", "unet.base_model.model.", "", "diffusion_model."
    ),
    *_joined(NameSource.DIFFUSERS, "lycoris_", "lora_transformer_", "lora_unet_"),
)


def _unet_labels(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """The label embedding has two names in diffusers: its configuration determines which one a UNet uses."""
    names = names_by_source[NameSource.DIFFUSERS]
    for layer in ("linear_1", "linear_2"):
        for name, other in (("add_embedding", "class_embedding"), ("class_embedding", "add_embedding")):
            if f"{name}.{layer}" in names:
                yield NameSource.DIFFUSERS, f"{other}.{layer}", names[f"{name}.{layer}"]


#: the layers of a feed-forward in diffusers' other transformers -> in its Flux 2
FLUX2_LAYERS = {"0.proj": "linear_in", "2": "linear_out"}


def _flux_fused(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """Names for the fused layers of single blocks: queries, keys and values of `linear1` as one, and the names of the
    same layers in Flux 2, which diffusers keeps fused. Feed-forwards have those of Flux 2 as well."""
    names = names_by_source[NameSource.DIFFUSERS]
    for base, ranges in names.items():
        block, found, layer = base.rpartition(".net.")
        if found and layer in FLUX2_LAYERS:
            yield NameSource.DIFFUSERS, f"{block}.{FLUX2_LAYERS[layer]}", ranges
    for base, ranges in names_by_source[NameSource.CHECKPOINT].items():
        _, block, layer = (*base.split("."), "", "")[:3]
        if not base.startswith("single_blocks.") or layer not in ("linear1", "linear2"):
            continue
        attention = f"single_transformer_blocks.{block}.attn"
        if layer == "linear2":
            yield NameSource.DIFFUSERS, f"{attention}.to_out", ranges
        else:
            yield NameSource.DIFFUSERS, f"{attention}.to_qkv_mlp_proj", ranges
            rows = sum(part.rows for q in "qkv" for part in names.get(f"{attention}.to_{q}", ()))
            if rows:
                (whole,) = ranges
                shape = (rows, *whole.source_shape[1:])
                yield NameSource.CHECKPOINT, f"{base}_qkv", (replace(whole, source_shape=shape, rows=rows),)


def _hunyuan_aliases(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """HunyuanVideo's keys in the naming that the file does not use."""
    for base, ranges in names_by_source[NameSource.CHECKPOINT].items():
        for name in (original_base(base), flux_base(base)):
            if name != base:
                yield NameSource.CHECKPOINT, name, ranges


def _cascade_queries(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """Separate names for queries, keys and values, which a published file has in one tensor: the names in files that
    have them separately."""
    for base, ranges in names_by_source[NameSource.DIFFUSERS].items():
        stem, found, part = base.partition(".attention.to_")
        if found and part in ("q", "k", "v"):
            yield NameSource.CHECKPOINT, f"{stem}.attention.attn.to_{part}", ranges


GENERIC = LoraNaming((*_CHECKPOINT_KEYS, *_BORROWED))
_UNET = LoraNaming((*_CHECKPOINT_KEYS, *_UNET_RULES), _unet_labels)
_TRANSFORMER = LoraNaming((*_CHECKPOINT_KEYS, *_TRANSFORMER_RULES, *_BORROWED))
_HUNYUAN_VIDEO = replace(_TRANSFORMER, extra_names=_hunyuan_aliases)
_FLUX = replace(_TRANSFORMER, extra_names=_flux_fused)
#: the two sources have the same names for different norms, so each has separate prefixes
_HUNYUAN_DIT = LoraNaming(
    (
        *_CHECKPOINT_KEYS,
        *_dotted(NameSource.CHECKPOINT, "base_model.model.", ""),
        *_joined(NameSource.CHECKPOINT, "lycoris_"),
        *_dotted(NameSource.DIFFUSERS, "transformer."),
        *_joined(NameSource.DIFFUSERS, "lora_transformer_"),
    )
)
_CASCADE = LoraNaming(
    (
        *GENERIC.rules,
        *_joined(NameSource.CHECKPOINT, "lora_prior_unet_"),
        *_joined(NameSource.DIFFUSERS, "lora_prior_unet_"),
        *_dotted(NameSource.DIFFUSERS, "prior."),
        NameRule("prior.", NameSource.DIFFUSERS, transform=_as_attention_processor),
        *_dotted(NameSource.CHECKPOINT, "prior."),
    ),
    _cascade_queries,
)

NAMINGS: Mapping[str, LoraNaming] = {
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
    # diffusers uses the names of the original code for these
    "ace_step": GENERIC,
    "kandinsky5": GENERIC,
    "omnigen2": GENERIC,
    "qwen_image": GENERIC,
}
