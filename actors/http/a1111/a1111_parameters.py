"""Reads the `parameters` text that the A1111 web UI and its relatives write to images as the fields of a request.

Pure. `actors.outputs.image_file` takes the text apart; here, its keys get their meaning. Keys without a meaning here
are named in notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.a1111.a1111_requests import without_loras
from modelpool.actors.http.a1111.a1111_upscalers import scaling_fields, scaling_note, upscaler_name
from modelpool.actors.http.service.clip_layers import skipped_by_layer
from modelpool.actors.http.service.read_fields import ReadFields
from modelpool.actors.outputs.image_file import SKIPPED_KEY, UNLISTED_KEY, Parameters
from modelpool.actors.request.number_fields import finite_number, whole_number
from modelpool.pool.inference.sampling.sampler_names import resolve_sampler
from modelpool.pool.values.core.errors import counted, unusable_field

#: numbers that a field of a request has under another name
_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "Seed": "seed",
        "Steps": "steps",
        "Eta": "eta",
        "Eta DDIM": "eta",
        "Sigma churn": "s_churn",
        "Sigma noise": "s_noise",
        "Image CFG scale": "image_cfg",
        "Shift": "shift",
        "Frames": "frames",
        "FPS": "frame_rate",
    }
)
#: keys that are read here, or are facts that the others imply
_READ = frozenset(
    {
        *_NUMBERS, "Sampler", "Schedule type", "Scheduler", "Schedule", "CFG scale", "Distilled CFG Scale", "Size",
        "Model", "Model hash", "Denoising strength", "Clip skip", "Hires upscale", "Hires steps", "Hires upscaler",
        "Hires resize", "Hires resize-1", "Hires resize-2", "Postprocess upscale by", "Postprocess upscaler",
        "Lora hashes", "Hashes", "Version", "Sigmas", "Civitai resources", "Civitai metadata",
        SKIPPED_KEY, UNLISTED_KEY,
    }
)  # fmt: skip
#: values of other keys that ask for nothing
_NEUTRAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Hires sampler": ("Use same sampler",),
        "Hires schedule type": ("Use same scheduler",),
        "Hires checkpoint": ("Use same checkpoint",),
        "Variation seed strength": ("0",),
        "Emphasis": ("Original",),
        "RNG": ("CPU",),
    }
)
#: up to this version, the web UI had no choice of schedules: a name without one meant the model's
_SCHEDULES_SINCE = (1, 9)
_VERSION = re.compile(r"v(\d+)\.(\d+)")
#: samplers with a schedule of their own in those versions
_OWN_SCHEDULE = ("ddim", "uni_pc", "restart", "lcm", "dpm_fast", "dpm_adaptive")


def fields_of_parameters(text: Parameters, family: str = "") -> ReadFields:
    """Return the fields of a request for `parameters`. `family` is the title of the model's family, which tells the
    layer of CLIP that it reads. Raises UserError that names the key."""
    values = text.values
    steps = _number(values, "Steps")
    prompt, loras = without_loras(text.prompt, 20 if steps is None else int(steps))
    fields: dict[str, Any] = {"prompt": prompt, "negative": text.negative, "loras": loras}
    for key, name in _NUMBERS.items():
        if (number := _number(values, key)) is not None:
            fields[name] = int(number) if name in ("steps", "frames", "seed") else number
    if "Seed" in values:
        fields["seed"] = _whole(values, "Seed")  # a float has too few digits
    fields |= _sampling(values) | _guidance(values) | _size(values)
    if (clip := _number(values, "Clip skip")) is not None:
        fields["clip_skip"] = skipped_by_layer(int(clip), family)
    if SKIPPED_KEY in values:
        fields["clip_skip"] = _whole(values, SKIPPED_KEY)
    if "Sigmas" in values:
        levels = tuple(finite_number(level) for level in values["Sigmas"].split())
        if None in levels:
            raise unusable_field("Sigmas", values["Sigmas"], "numbers with spaces")
        fields |= {"sigmas": levels, "schedule": None}
    scale = _hires_scale(values)
    if scale is not None:
        fields["hires"] = _hires(values, scale)
    elif (strength := _number(values, "Denoising strength")) is not None:
        fields["strength"] = strength
    if upscaler := upscaler_name(values.get("Postprocess upscaler", "")):
        fields["upscale"] = {"model": upscaler, "scale": _number(values, "Postprocess upscale by")}
    return ReadFields(
        fields, values.get("Model", ""), values.get("Model hash", ""), _lora_hashes(values), tuple(_notes(values))
    )


def _sampling(values: Mapping[str, str]) -> dict[str, Any]:
    name = values.get("Sampler", "").strip()
    if not name:
        return {}
    schedule = next((values[key].strip() for key in ("Schedule type", "Scheduler", "Schedule") if key in values), None)
    if schedule is not None and schedule.lower() not in ("automatic", ""):
        return {"sampler": name, "schedule": schedule}
    found = _VERSION.match(values.get("Version", ""))
    if schedule is None and found is not None and (int(found[1]), int(found[2])) < _SCHEDULES_SINCE:
        sampler, of_name = resolve_sampler(name)
        is_named = name.lower().endswith(of_name.replace("_", " "))
        if not is_named and sampler not in _OWN_SCHEDULE:
            return {"sampler": name, "schedule": "normal"}
    return {"sampler": name}


def _guidance(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the guidance scale: the distilled one if there is no other."""
    cfg, distilled = _number(values, "CFG scale"), _number(values, "Distilled CFG Scale")
    if distilled is not None and cfg in (None, 1.0):
        return {"cfg": distilled}
    return {} if cfg is None else {"cfg": cfg}


def _size(values: Mapping[str, str]) -> dict[str, Any]:
    text = values.get("Size")
    if text is None:
        return {}
    width, height = _sides("Size", text)
    return {"width": width, "height": height}


def _sides(key: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    if found is None:
        raise unusable_field(key, text, "WIDTHxHEIGHT in pixels")
    return int(found[1]), int(found[2])


def _hires_scale(values: Mapping[str, str]) -> float | None:
    """Return the factor of the second pass; None without one. Raises UnusableField for a size of other proportions."""
    scale = _number(values, "Hires upscale")
    if scale is not None or "Hires resize" not in values:
        return scale
    after, before = _sides("Hires resize", values["Hires resize"]), _sides("Size", values.get("Size", ""))
    scales = [new / old for new, old in zip(after, before, strict=True) if new]
    if not scales or max(scales) - min(scales) > 0.01:
        raise unusable_field("Hires resize", values["Hires resize"], f"the proportions of {values['Size']}")
    return scales[0]


def _hires(values: Mapping[str, str], scale: float) -> dict[str, Any]:
    steps, strength = _number(values, "Hires steps"), _number(values, "Denoising strength")
    found: dict[str, Any] = {"scale": scale, "steps": int(steps) if steps else None}
    found |= {} if strength is None else {"strength": strength}
    return found | scaling_fields(values.get("Hires upscaler"))


def _lora_hashes(values: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes of LoRAs by name."""
    pairs = (pair.rpartition(":") for pair in values.get("Lora hashes", "").split(","))
    return {name.strip(): digits.strip() for name, colon, digits in pairs if colon}


def _notes(values: Mapping[str, str]) -> Iterator[str]:
    """Yield the unused values by their keys; the keys of one extension together."""
    unused = [
        key
        for key, value in values.items()
        if key not in _READ and value not in _NEUTRAL.get(key, ()) and not key.startswith("Civitai")
    ]
    # several keys that begin with the same word belong to one extension: "ADetailer model", "ControlNet 0"
    groups: dict[str, list[str]] = {}
    for key in unused:
        groups.setdefault(key.split()[0], []).append(key)
    for first, keys in groups.items():
        name = keys[0] if len(keys) == 1 else f"{first} ({counted(len(keys), 'key')})"
        yield f"{name}: not used"
    if unlisted := values.get(UNLISTED_KEY):
        yield f"the image was made with {unlisted}, which the parameters do not have"
    cfg, distilled = _number(values, "CFG scale"), _number(values, "Distilled CFG Scale")
    if distilled is not None and cfg not in (None, 1.0):
        yield f"Distilled CFG Scale: not used, since CFG scale is {cfg:g}"
    if (note := scaling_note(values.get("Hires upscaler"))) and _hires_scale(values) is not None:
        yield f"Hires upscaler: {note}"


def _number(values: Mapping[str, str], key: str) -> float | None:
    """Return a number. Raises UnusableField for another value."""
    text = values.get(key)
    if text is None:
        return None
    number = finite_number(text)
    if number is None:
        raise unusable_field(key, text, "a number")
    return number


def _whole(values: Mapping[str, str], key: str) -> int:
    """Return a whole number of any size. Raises UnusableField for another value."""
    return whole_number(key, values[key].strip(), "a whole number")
