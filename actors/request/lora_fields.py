"""The `loras` field of a request: LoRAs with their strengths on the text encoders and the diffusion model, over the
steps and by block; parsed from every form that they are written in, and written as text.

Torch-free, ray-free. The catalog knows the blocks of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from modelpool.actors.request.number_fields import finite_number
from modelpool.actors.request.strict import Strict
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.expert_names import EXPERTS
from modelpool.pool.core.refs import LoraRef
from modelpool.pool.lora_names.blocks import EXPECTED as BLOCKS_EXPECTED
from modelpool.pool.lora_names.blocks import BlockFactors, canonical_block, numbered_factors, preset_factors

_SPAN = "the part of the schedule as fractions from 0 to 1, with the start below the end, such as 0-0.5"
_WORDS = "te=, unet=, lbw=, steps=, start=, stop= or step="
_SPAN_FIELDS = frozenset({"start", "end"})
#: a number, perhaps with the part of the schedule: 0.8@0-0.5
_STRENGTH = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?:@([^@]*))?")
#: words for strengths, the part of the schedule and blocks; `start`, `stop` and `step` count steps, as in A1111's
#: extension
_KEYED = re.compile(r"\s*(te|unet|lbw|steps|start|stop|step|dyn)\s*=\s*(.*?)\s*", re.DOTALL)
_MAX_BLOCKS = 200


class LoraChoice(Strict):
    """A LoRA and its strength. Accepts ("light", 0.8), "light:0.8", "light" and {"name":, "strength":}. For models with
    two experts, append "high" or "low", as in "light:0.8:low", to apply it to one expert only.

    text_strength  on the text encoders; default: `strength`. "light:0.5:0.8" is 0.5 on the text encoders and 0.8 on the
                   diffusion model, as A1111 writes it
    start, end     the part of the schedule in which it acts on the diffusion model, as fractions: "light:0.8@0-0.5"
    blocks         factors of the strength by block: {"IN04": 0.5, "OUT": 0}, a list of 12, 17, 20 or 26 numbers, or
                   their text, as in "light:0.8:lbw=IN04*0.5,OUT*0"
    """

    name: Annotated[str, Field(min_length=1)]
    strength: float = 1.0
    noise: str = ""
    text_strength: float | None = None
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        return parse_lora(value)

    @field_validator("noise", mode="before")
    @classmethod
    def _noise(cls, value: Any) -> str:
        return checked_expert(value)

    @field_validator("blocks", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> BlockFactors:
        return parse_blocks(value)

    @model_validator(mode="after")
    def _span(self) -> LoraChoice:
        if not 0 <= self.start < self.end <= 1:
            raise unusable_field("loras.start, loras.end", f"{self.start:g} to {self.end:g}", _SPAN)
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not set: the seeds of job files are derived from this serialization."""
        always, fields = ("name", "strength"), type(self).model_fields
        return {name: value for name, value in plain(self).items() if name in always or value != fields[name].default}

    @property
    def has_effect(self) -> bool:
        """Whether its strength is not 0 on some component."""
        return self.strength != 0 or self.text_strength not in (None, 0)

    def applied(self, found: LoraRef) -> LoraRef:
        """Return the file `found` with the strengths of this choice."""
        if self.model_fields_set <= {"name", "strength"}:
            return found
        return replace(
            found,
            noise=self.noise,
            text_strength=None if self.text_strength == self.strength else self.text_strength,
            start=self.start,
            end=self.end,
            blocks=self.blocks,
        )


def parse_loras(value: Any) -> Any:
    """Parse the mapping form of several LoRAs: {"light": 0.8, "outline": "0.5@0-0.5", "thick": {"strength": 1}}.
    Anything else is returned unchanged. Raises UnusableField."""
    if not isinstance(value, Mapping):
        return value
    found = []
    for name, how in value.items():
        if isinstance(how, Mapping):
            if "name" in how:
                raise unusable_field("loras", f"{name}: {dict(how)}", "the name once, as the key")
            found.append({"name": name, **how})
        elif isinstance(how, str) and finite_number(how) is None:
            found.append(_with_parts(str(name), how.split(":")))
        else:
            found.append({"name": name, "strength": how})
    return tuple(found)


def parse_lora(value: Any, steps: int | None = None) -> Any:
    """Parse the short forms of a LoRA: "light:0.8", "light:0.8@0-0.5", "light:0.5:0.8" (text encoders, diffusion
    model), "light:te=0.5:unet=0.8:lbw=1,0,...", "light:0.8:low", ("light", 0.8), ("light", 0.8, "low"). Anything else
    is returned unchanged.

    `steps` is the length of the schedule, for A1111's start=, stop= and step=, which count steps. Raises UnusableField.
    """
    if isinstance(value, str):
        name, *parts = value.split(":")
        first = len(parts)
        while first and _is_part(parts[first - 1]):
            first -= 1
        if first == len(parts) and parts and name:  # the message names what is no strength
            return {"name": ":".join((name, *parts[:-1])), "strength": parts[-1]}
        return _with_parts(":".join((name, *parts[:first])), parts[first:], steps)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return dict(zip(("name", "strength", "noise"), value, strict=False))
    return value


def lora_text(name: str, lora: LoraChoice | LoraRef | Any) -> str:
    """Return the short form of a LoRA, which `parse_lora` reads; A1111 reads it too, except for parts of the schedule
    and blocks by name, which it ignores."""
    strengths = [lora.strength] if lora.text_strength is None else [lora.text_strength, lora.strength]
    words = [name, *(f"{each:g}" for each in strengths)]
    words += [f"steps={lora.start:g}-{lora.end:g}"] if (lora.start, lora.end) != (0.0, 1.0) else []
    words += ["lbw=" + ",".join(f"{block}*{factor:g}" for block, factor in lora.blocks)] if lora.blocks else []
    return ":".join((*words, *([lora.noise] if lora.noise else [])))


def parse_blocks(value: Any) -> BlockFactors:
    """Parse factors by block: a mapping, a list of numbers for the blocks of an architecture, pairs, the name of a
    preset, or text such as "IN04*0.5,OUT*0". Raises UnusableField."""
    if isinstance(value, str):
        preset = preset_factors(value)
        if preset is not None:
            return preset
        words = [word.strip() for word in value.split(",", _MAX_BLOCKS) if word.strip()]
        value = [pair if len(pair := word.split("*")) == 2 else word for word in words]
    if isinstance(value, Mapping):
        value = [list(pair) for pair in value.items()]
    if not isinstance(value, list | tuple) or len(value) > _MAX_BLOCKS:
        raise unusable_field("loras.blocks", value, BLOCKS_EXPECTED)
    if value and not any(isinstance(each, list | tuple) for each in value):
        return numbered_factors([_factor(each) for each in value])
    found: dict[str, float] = {}
    for each in value:
        if not isinstance(each, list | tuple) or len(each) != 2 or not isinstance(each[0], str):
            raise unusable_field("loras.blocks", each, BLOCKS_EXPECTED)
        found[canonical_block(each[0])] = _factor(each[1])
    return tuple(sorted(found.items()))


def checked_expert(value: Any) -> str:
    """Validate the expert that a LoRA applies to; "" is both."""
    if not isinstance(value, str) or value.strip().lower() not in (*EXPERTS, ""):
        expected = f"one of {', '.join(map(repr, EXPERTS))}, or nothing for both experts"
        raise unusable_field("loras.noise", value, expected)
    return value.strip().lower()


def _is_part(part: str) -> bool:
    word = part.strip()
    return word.lower() in EXPERTS or _STRENGTH.fullmatch(word) is not None or _KEYED.fullmatch(part) is not None


def _with_parts(name: str, parts: list[str], steps: int | None = None) -> dict[str, Any]:
    """Return the fields that the parts of a short form set."""
    fields: dict[str, Any] = {"name": name}
    numbers: list[str] = []
    for part in parts:
        word = part.strip()
        if word.lower() in EXPERTS:
            fields["noise"] = word
        elif keyed := _KEYED.fullmatch(part):
            _add_span(fields, _keyed_fields(keyed[1], keyed[2], steps), name, part)
        elif strength := _STRENGTH.fullmatch(word):
            numbers.append(strength[1])
            if strength[2] is not None:
                _add_span(fields, _span_fields(strength[2]), name, part)
        else:
            raise unusable_field("loras", part, f"a strength, {' or '.join(EXPERTS)}, {_WORDS}")
    if len(numbers) > 2:
        raise unusable_field("loras", ":".join(numbers), "up to two strengths: text encoders, diffusion model")
    by_position = ("strength",) if len(numbers) == 1 else ("text_strength", "strength")
    fields = {**dict(zip(by_position, numbers, strict=False)), **fields}
    if "strength" not in fields and "text_strength" in fields:  # as in A1111, te= alone is for both
        fields["strength"] = fields["text_strength"]
    return fields


def _add_span(fields: dict[str, Any], found: dict[str, Any], name: str, part: str) -> None:
    """Add fields to `fields`. Raises UnusableField for a second part of the schedule, which would replace the first."""
    if _SPAN_FIELDS & fields.keys() & found.keys():
        expected = f'one part of the schedule for each use of a LoRA: name it twice, as in "{name}:0.8@0-0.3" and '
        raise unusable_field("loras", part.strip(), f'{expected}"{name}:0.4@0.3-1"')
    fields |= found


def _keyed_fields(key: str, text: str, steps: int | None) -> dict[str, Any]:
    match key:
        case "te":
            return {"text_strength": text}
        case "unet":
            return {"strength": text}
        case "lbw":
            return {"blocks": text}
        case "steps":
            return _span_fields(text)
        case "dyn":
            raise unusable_field("loras", f"dyn={text}", _WORDS)
    if steps is None:
        raise unusable_field("loras", f"{key}={text}", "steps= with fractions of the schedule, such as steps=0-0.5")
    first, dash, last = text.partition("-")
    if key == "step":
        return {"start": _share(first, steps), "end": _share(last, steps) if dash else 1.0}
    return {"start" if key == "start" else "end": _share(text, steps)}


def _share(text: str, steps: int) -> float:
    number = finite_number(text)
    if number is None or number < 0:
        raise unusable_field("loras", text, "a number of steps from 0")
    return min(number / steps, 1.0)


def _span_fields(text: str) -> dict[str, Any]:
    start, _, end = text.partition("-")
    numbers = finite_number(start or "0"), finite_number(end or "1")
    if None in numbers or "-" not in text:
        raise unusable_field("loras", text, _SPAN)
    return {"start": numbers[0], "end": numbers[1]}


def _factor(value: Any) -> float:
    number = finite_number(value)
    if number is None:
        raise unusable_field("loras.blocks", value, BLOCKS_EXPECTED)
    return number
