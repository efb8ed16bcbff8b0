"""The `loras` field of a request: LoRAs with their strengths on the text encoders and the diffusion model, over the
steps and by block; parsed from every form that they are written in, and written as text.

Torch-free, ray-free. The catalog knows the blocks of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from modelpool.actors.request.bounds import (
    MAX_ENTRIES,
    MAX_LORA_CHARACTERS,
    MAX_LORAS,
    MAX_NAME_CHARACTERS,
    check_characters,
    check_entries,
)
from modelpool.actors.request.number_fields import finite_number, number_text
from modelpool.actors.request.strict import Strict
from modelpool.pool.models.lora_names.blocks import EXPECTED as BLOCKS_EXPECTED
from modelpool.pool.models.lora_names.blocks import BlockFactors, canonical_block, numbered_factors, preset_factors
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.expert_names import EXPERTS
from modelpool.pool.values.core.lora_texts import EXPECTED as TEXTS_EXPECTED
from modelpool.pool.values.core.lora_texts import NEGATIVE, POSITIVE, is_text_name
from modelpool.pool.values.core.refs import MERGES, LoraRef
from modelpool.pool.values.core.strength_keyframes import MAX_KEYFRAMES, Interpolation, Keyframes, strongest

_SPAN = "the part of the schedule as fractions from 0 to 1, with the start below the end, such as 0-0.5"
_WORDS = "te=, unet=, lbw=, steps=, start=, stop=, step=, keyframes=, interpolation=, only= or merge="
_KEYFRAMES = (
    "strengths with the share of the steps from which each holds, the first from 0, such as 0.2@0,1@0.5 or "
    f"[[0, 0.2], [0.5, 1]], up to {MAX_KEYFRAMES}"
)
_SPAN_FIELDS = frozenset({"start", "end"})
#: a number, perhaps with the part of the schedule: 0.8@0-0.5
_STRENGTH = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?:@([^@]*))?")
#: keyframes: 0.2@0,1@0.5
_STRENGTHS = re.compile(r"[-+.\deE ]+@[.\deE ]+(?:,[-+.\deE ]+@[.\deE ]+)+")
#: words for strengths, the part of the schedule and blocks; `start`, `stop` and `step` count steps, as in A1111's
#: extension
_KEYED = re.compile(r"\s*(te|unet|lbw|steps|start|stop|step|dyn|keyframes|interpolation|only|merge)\s*=(.*)", re.DOTALL)
_MAX_BLOCKS = 200


class LoraChoice(Strict):
    """A LoRA and its strength. Accepts ("light", 0.8), "light:0.8", "light" and {"name":, "strength":}. For models with
    two experts, append "high" or "low", as in "light:0.8:low", to apply it to one expert only.

    text_strength  on the text encoders; default: `strength`. "light:0.5:0.8" is 0.5 on the text encoders and 0.8 on the
                   diffusion model, as A1111 writes it
    start, end     the part of the schedule in which it acts on the diffusion model, as fractions: "light:0.8@0-0.5"
    blocks         factors of the strength by block: {"IN04": 0.5, "OUT": 0}, a list of 12, 17, 20 or 26 numbers, or
                   their text, as in "light:0.8:lbw=IN04*0.5,OUT*0"
    keyframes      strengths on the diffusion model in place of `strength`, each from a share of the steps on:
                   [[0, 0.2], [0.5, 1]], or "light:0.2@0,1@0.5". `strength`, which the text encoders have without
                   `text_strength`, is the strongest of them
    interpolation  of the strength between keyframes: linear, ease_in, ease_out or ease_in_out; empty: none
    only           the texts for which it acts: positive, negative, prompt, regions, region0, ...; empty: all
    merge          mix, add or subtract: it is no LoRA but another model of the same family. Its weights are mixed with
                   this one's (W * (1 - strength) + O * strength), added (W + O * strength), or subtracted ((W - O) *
                   strength); `blocks` are then IN00, MID00, OUT00, ..., TIME, LABEL and HEAD
    """

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    strength: float = 1.0
    noise: str = ""
    text_strength: float | None = None
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()
    keyframes: Keyframes = ()
    interpolation: str = ""
    only: tuple[str, ...] = ()
    merge: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        return _with_strongest(parse_lora(value))

    @field_validator("noise", "blocks", "keyframes", "interpolation", "only", "merge", mode="before")
    @classmethod
    def _parsed(cls, value: Any, field: ValidationInfo) -> Any:
        return _PARSERS[str(field.field_name)](value)

    @model_validator(mode="after")
    def _strengths(self) -> LoraChoice:
        if self.interpolation and len(self.keyframes) < 2:
            raise unusable_field("loras.interpolation", self.interpolation, "two keyframes or more")
        if self.keyframes and self.strength != strongest(self.keyframes):
            expected = "the strengths in keyframes alone; the text encoders have text_strength, or the strongest, "
            raise unusable_field("loras.strength", self.strength, expected + f"{strongest(self.keyframes):g}")
        return self

    @model_validator(mode="after")
    def _whole_run(self) -> LoraChoice:
        if self.merge and (self.noise or self.keyframes or self.only or (self.start, self.end) != (0.0, 1.0)):
            raise unusable_field("loras.merge", self.merge, "a merge for all steps, texts and experts")
        return self

    @model_validator(mode="after")
    def _span(self) -> LoraChoice:
        if not 0 <= self.start < self.end <= 1:
            raise unusable_field("loras.start, loras.end", f"{self.start:g} to {self.end:g}", _SPAN)
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that are not set: the seeds of job files are derived from this serialization."""
        always, fields = ("name", "strength"), type(self).model_fields
        return {name: value for name, value in plain(self).items() if name in always or value != fields[name].default}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show whether it is a merge for merges alone."""
        return ((name, value) for name, value in super().__repr_args__() if name != "merge" or value)

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
            keyframes=self.keyframes,
            interpolation=self.interpolation,
            only=self.only,
            merge=self.merge,
        )

    @property
    def file_kind(self) -> str:
        """What its name names: a LoRA, or a model that is merged."""
        return "model" if self.merge else "lora"


def _with_strongest(fields: Any) -> Any:
    """Return the fields of a LoRA with the strongest of its keyframes as its strength, if it has keyframes only."""
    if not isinstance(fields, Mapping) or not fields.get("keyframes") or fields.get("strength") is not None:
        return fields
    return {**fields, "strength": strongest(parse_keyframes(fields["keyframes"]))}


def parse_loras(value: Any) -> Any:
    """Parse the mapping form of several LoRAs: {"light": 0.8, "outline": "0.5@0-0.5", "thick": {"strength": 1}}, and
    one LoRA in place of a list: "light:0.8", or {"name": "light", "strength": 0.8}. Anything else is returned
    unchanged. Raises UnusableField."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("name"), str) and finite_number(value["name"]) is None and _is_lora(value):
        return (dict(value),)
    check_entries("loras", value, MAX_LORAS)
    found = []
    for name, how in value.items():
        if isinstance(how, Mapping):
            if "name" in how:
                raise unusable_field("loras", f"{name}: {dict(how)}", "the name once, as the key")
            found.append({"name": name, **how})
        elif isinstance(how, str) and finite_number(how) is None:
            check_characters("loras", how, MAX_LORA_CHARACTERS)
            found.append(_with_parts(str(name), how.split(":")))
        else:
            found.append({"name": name, "strength": how})
    return tuple(found)


def _is_lora(value: Mapping[Any, Any]) -> bool:
    """Whether a table has the fields of one LoRA, and not LoRAs by their names."""
    return all(name in LoraChoice.model_fields for name in value)


def parse_lora(value: Any, steps: int | None = None) -> Any:
    """Parse the short forms of a LoRA: "light:0.8", "light:0.8@0-0.5", "light:0.5:0.8" (text encoders, diffusion
    model), "light:te=0.5:unet=0.8:lbw=1,0,...", "light:0.8:low", ("light", 0.8), ("light", 0.8, "low"). Anything else
    is returned unchanged.

    `steps` is the length of the schedule, for A1111's start=, stop= and step=, which count steps. Raises UnusableField.
    """
    if isinstance(value, str):
        check_characters("loras", value, MAX_LORA_CHARACTERS)
        name, *parts = value.split(":")
        first = len(parts)
        while first and _is_part(parts[first - 1]):
            first -= 1
        if first == len(parts) and parts and name:  # the message names the part that is no strength
            return {"name": ":".join((name, *parts[:-1])), "strength": parts[-1]}
        return _with_parts(":".join((name, *parts[:first])), parts[first:], steps)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        named = zip(("name", "strength", "noise"), value, strict=False)
        return {name: each for name, each in named if each is not None}
    return value


def lora_text(name: str, lora: LoraChoice | LoraRef | Any) -> str:
    """Return the short form of a LoRA, which `parse_lora` reads; A1111 reads it too, except for parts of the schedule,
    blocks by name, keyframes and texts, which it ignores."""
    strengths = [lora.strength] if lora.text_strength is None else [lora.text_strength, lora.strength]
    words = [name, *(number_text(each) for each in strengths)]
    words += (
        [f"steps={number_text(lora.start)}-{number_text(lora.end)}"] if (lora.start, lora.end) != (0.0, 1.0) else []
    )
    words += (
        ["lbw=" + ",".join(f"{block}*{number_text(factor)}" for block, factor in lora.blocks)] if lora.blocks else []
    )
    if lora.keyframes:
        frames = (f"{number_text(strength)}@{number_text(share)}" for share, strength in lora.keyframes)
        words.append("keyframes=" + ",".join(frames))
    words += [f"interpolation={lora.interpolation}"] if lora.interpolation else []
    words += ["only=" + ",".join(lora.only)] if lora.only else []
    words += [f"merge={lora.merge}"] if getattr(lora, "merge", "") else []
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


def parse_keyframes(value: Any) -> Keyframes:
    """Parse strengths over the steps: pairs of a share of the steps and a strength, a mapping, or text such as
    "0.2@0,1@0.5". Raises UnusableField."""
    if isinstance(value, str):
        words = [word for word in value.split(",", MAX_KEYFRAMES) if word.strip()]
        value = [word.split("@")[::-1] for word in words]
    if isinstance(value, Mapping):
        value = list(value.items())
    if not isinstance(value, list | tuple) or len(value) > MAX_KEYFRAMES:
        raise unusable_field("loras.keyframes", value, _KEYFRAMES)
    found: dict[float, float] = {}
    for each in value:
        numbers = [finite_number(number) for number in each] if isinstance(each, list | tuple) else []
        share, strength = numbers if len(numbers) == 2 else (None, None)
        if share is None or strength is None or not 0 <= share <= 1:
            raise unusable_field("loras.keyframes", each, _KEYFRAMES)
        if share in found:
            raise unusable_field("loras.keyframes", each, f"{share:g} once")
        found[share] = strength
    if found and 0 not in found:
        raise unusable_field("loras.keyframes", value, _KEYFRAMES)
    return tuple(sorted(found.items()))


def parse_texts(value: Any) -> tuple[str, ...]:
    """Parse the names of texts: a list, or words with commas; sorted, and empty if they are all texts. Raises
    UnusableField."""
    words = value.split(",", MAX_ENTRIES) if isinstance(value, str) else value
    check_entries("loras.only", words, MAX_ENTRIES)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise unusable_field("loras.only", value, TEXTS_EXPECTED)
    names = {word.strip().lower() for word in words if word.strip()}
    for name in sorted(names):
        if not is_text_name(name):
            raise unusable_field("loras.only", name, TEXTS_EXPECTED)
    return () if {POSITIVE, NEGATIVE} <= names else tuple(sorted(names))


def _checked_interpolation(value: Any) -> str:
    name = value.strip().lower().replace("-", "_") if isinstance(value, str) else value
    if name in ("", "none", None):
        return ""
    if name not in list(Interpolation):
        raise unusable_field("loras.interpolation", value, f"{', '.join(Interpolation)}, or none")
    return str(name)


def _checked_merge(value: Any) -> str:
    name = value.strip().lower() if isinstance(value, str) else value
    if name not in (*MERGES, "", None):
        raise unusable_field("loras.merge", value, f"{', '.join(MERGES)}, or nothing for a LoRA")
    return str(name or "")


def checked_expert(value: Any) -> str:
    """Validate the expert that a LoRA applies to; "" is both."""
    if not isinstance(value, str) or value.strip().lower() not in (*EXPERTS, ""):
        expected = f"one of {', '.join(map(repr, EXPERTS))}, or nothing for both experts"
        raise unusable_field("loras.noise", value, expected)
    return value.strip().lower()


#: the parsers of fields of `LoraChoice`
_PARSERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "noise": checked_expert,
        "blocks": parse_blocks,
        "keyframes": parse_keyframes,
        "interpolation": _checked_interpolation,
        "only": parse_texts,
        "merge": _checked_merge,
    }
)


def _is_part(part: str) -> bool:
    word = part.strip()
    known = (_STRENGTH.fullmatch(word), _STRENGTHS.fullmatch(word), _KEYED.fullmatch(part))
    return word.lower() in EXPERTS or any(each is not None for each in known)


def _with_parts(name: str, parts: list[str], steps: int | None = None) -> dict[str, Any]:
    """Return the fields that the parts of a short form set."""
    fields: dict[str, Any] = {"name": name}
    numbers: list[str] = []
    keyframes_last = False
    for part in parts:
        word = part.strip()
        if word.lower() in EXPERTS:
            fields["noise"] = word
        elif keyed := _KEYED.fullmatch(part):
            _add_span(fields, _keyed_fields(keyed[1], keyed[2].strip(), steps), name, part)
        elif _STRENGTHS.fullmatch(word):
            fields["keyframes"] = word
            keyframes_last = True
        elif strength := _STRENGTH.fullmatch(word):
            numbers.append(strength[1])
            if strength[2] is not None:
                _add_span(fields, _span_fields(strength[2]), name, part)
        else:
            raise unusable_field("loras", part, f"a strength, {' or '.join(EXPERTS)}, {_WORDS}")
    if len(numbers) > 2:
        raise unusable_field("loras", ":".join(numbers), "up to two strengths: text encoders, diffusion model")
    has_keyframes = "keyframes" in fields
    # the last strength is for the diffusion model, also in the form 0.5:0.2@0,1@0.5
    by_position = ("strength",) if len(numbers) == 1 and not keyframes_last else ("text_strength", "strength")
    fields = {**dict(zip(by_position, numbers, strict=False)), **fields}
    if "strength" not in fields and "text_strength" in fields and not has_keyframes:  # as in A1111: te= alone is both
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
        case "keyframes" | "interpolation" | "only" | "merge":
            return {key: text}
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
