"""Splits base names of LoRA files into their prefixes and the name of a weight. Torch-free.

`pool.models.lora_names` lists the usual names of each family. Files also combine the prefixes of trainers, wrappers and
components in other ways, such as `transformer.base_model.model.`; `readings_of` returns what such a name may mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from modelpool.pool.values.core.expert_names import HIGH, LOW


class NamedComponent(Enum):
    """The component that a prefix names."""

    ANY = "any"
    DIFFUSION_MODEL = "diffusion model"
    TEXT_ENCODER = "text encoder"


@dataclass(frozen=True, slots=True)
class NameReading:
    """One meaning of a base name.

    component  that the prefixes name
    expert     "high" or "low" if they name one of two diffusion models, else ""
    names      usual names of the weight, of which at most one is known
    """

    component: NamedComponent
    expert: str
    names: tuple[str, ...]


#: prefixes of wrappers, which name no component
_WRAPPER = re.compile(r"base_model\.model\.|base_model\.|module\.|pipe\.|pipeline\.|model\.(?!layers\.|embed_tokens\.)")
_DIFFUSION = re.compile(r"model\.diffusion_model\.|(?:diffusion_model|transformer|unet|dit|net|denoiser)\.")
_TEXT = re.compile(r"(?:text_encoder(?:_\d)?|te\d?|t5xxl|clip_[lg])\.")
#: diffusion models of two experts: the folders of diffusers and of Wan, and the modules of ai-toolkit
_EXPERTS = {
    HIGH: re.compile(r"(?:(?:transformer|diffusion_model|unet|dit)_?1|high_noise(?:_model|_transformer)?)\."),
    LOW: re.compile(r"(?:(?:transformer|diffusion_model|unet|dit)_?2|low_noise(?:_model|_transformer)?)\."),
}
#: the same with underscores for dots
_JOINED_EXPERTS = {
    HIGH: re.compile(
        r"(lora_(?:unet|transformer)|lycoris|lora)_(?:(?:transformer|diffusion_model)_1|1|high_noise_model|high_noise)_"
    ),
    LOW: re.compile(
        r"(lora_(?:unet|transformer)|lycoris|lora)_(?:(?:transformer|diffusion_model)_2|2|low_noise_model|low_noise)_"
    ),
}
#: kohya's prefixes, which some files put before names with dots
_JOINED_DIFFUSION = re.compile(r"(?:lora_unet|lora_transformer|lycoris|oft_unet)_")
_JOINED_TEXT = re.compile(r"lora_(te\d?)_")
#: kohya's prefix of OFTs for UNets
_JOINED_OFT = ("oft_unet_", "lora_unet_")


def readings_of(name: str) -> Iterator[NameReading]:
    """Yield the meanings of a base name that is no usual one, those with fewer prefixes removed first."""
    for expert, pattern in _JOINED_EXPERTS.items():
        if found := pattern.match(name):
            rest = name[found.end() :]
            names = tuple(f"{prefix}_{rest}" for prefix in dict.fromkeys((found[1], "lora_unet", "lycoris")))
            yield NameReading(NamedComponent.DIFFUSION_MODEL, expert, names)
    if (found := _JOINED_DIFFUSION.match(name)) and "." in name:
        rest = name[found.end() :]
        yield NameReading(NamedComponent.DIFFUSION_MODEL, "", (rest, f"diffusion_model.{rest}"))
    if (found := _JOINED_TEXT.match(name)) and "." in name:
        yield NameReading(NamedComponent.TEXT_ENCODER, "", (f"{found[1]}.{name[found.end() :]}",))
    if name.startswith(_JOINED_OFT[0]):
        usual = _JOINED_OFT[1] + name.removeprefix(_JOINED_OFT[0])
        yield NameReading(NamedComponent.DIFFUSION_MODEL, "", (usual,))
    yield NameReading(NamedComponent.DIFFUSION_MODEL, "", (f"diffusion_model.{name}",))
    component, expert, encoder, rest = NamedComponent.ANY, "", "", name
    while True:
        if found := next((m for p in _EXPERTS.values() if (m := p.match(rest))), None):
            half = next(half for half, p in _EXPERTS.items() if p.match(rest))
            if component is NamedComponent.TEXT_ENCODER or (expert and expert != half):
                return
            component, expert = NamedComponent.DIFFUSION_MODEL, half
        elif found := _DIFFUSION.match(rest):
            if component is NamedComponent.TEXT_ENCODER:
                return
            component = NamedComponent.DIFFUSION_MODEL
        elif found := _TEXT.match(rest):
            if component is not NamedComponent.ANY:
                return
            component, encoder = NamedComponent.TEXT_ENCODER, found[0]
        elif not (found := _WRAPPER.match(rest)):
            return
        rest = rest[found.end() :]
        if component is NamedComponent.TEXT_ENCODER:
            yield NameReading(component, "", (encoder + rest,))
        else:
            yield NameReading(component, expert, (rest, f"diffusion_model.{rest}"))
