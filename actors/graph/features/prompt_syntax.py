"""Warnings about notations of other programs in prompts, which are text here: the image shows nothing of them.

Pure. Words that a prompt may contain anyway cause no warning: brackets around words, smileys, texts in capitals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.text.prompt_weights import parse_weights

#: weights beyond this are no emphasis: the image shows noise, or nothing of the rest
USUAL_WEIGHT = 10.0
#: characters of a notation in a warning
_MOST_SHOWN = 80
_WEIGHTS = "a weight is a number such as 1.2 before the closing bracket"
#: settings that Midjourney, and A1111's script for prompts from a file, read in a line of a prompt
_SETTINGS = (
    *("ar", "aspect", "chaos", "cref", "cw", "iw", "niji", "no", "q", "quality", "s", "seed", "sref", "stop", "style"),
    *("stylize", "sw", "tile", "v", "version", "weird", "prompt", "negative_prompt", "steps", "cfg_scale", "width"),
    *("height", "sampler_name", "sampler_index", "sd_model", "batch_size", "n_iter", "tiling", "restore_faces"),
    *("subseed", "subseed_strength", "outpath_samples", "negative", "cfg", "sampler", "size", "model", "lora"),
)
#: by what is not read, and what to write instead. Every pattern takes time that is linear in the length of a prompt:
#: repeated parts have a bound
_NOTATIONS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "LoRAs are in the field loras (--lora NAME:STRENGTH)": re.compile(
            r"(?i:<\s{0,9}(?:lora|lyco|locon|loha|lokr|dora)\s{0,9}:(?:[^<>]{1,200}>|[^<>\s]{1,200}))"
        ),
        "hypernetworks are not supported": re.compile(r"(?i:<\s{0,9}hypernet\s{0,9}:(?:[^<>]{1,200}>|[^<>\s]{1,200}))"),
        "settings are fields of the request": re.compile(
            rf"(?<!\S)--(?:{'|'.join(_SETTINGS)})(?![\w-])(?:[ =]{{1,3}}[^\s,-]\S{{0,30}})?"
        ),
        "prompts do not change or alternate over the steps": re.compile(
            r"\[[^\[\]]{0,200}:\s{0,9}\d{1,9}(?:\.\d{0,9})?\s{0,9}\]|\[[^\[\]|]{1,200}\|[^\[\]]{1,200}\]"
        ),
        "wildcards are not replaced": re.compile(r"(?<!\w)__[A-Za-z0-9/*-]+(?:_[A-Za-z0-9/*-]+){0,9}__(?!\w)"),
        "no alternative is chosen": re.compile(r"\{[^{}|\"]{1,200}\|[^{}\"]{1,200}\}"),
        _WEIGHTS: re.compile(r"\([^()\n:]{1,200}:\s{0,9}[+-]?(?:\d{1,9}\.?\d{0,9}|\.\d{1,9})(?![^()]*\))"),
    }
)
#: patterns that may be meant as a weight, and the pattern of a weight
_LIKE_A_WEIGHT = re.compile(
    r"\([^()\n:]{1,200}:\s{0,9}((?=[.,eE+-]{0,30}\d)[\d.,eE+-]{1,30}|[+-]?(?i:nan|inf(?:inity)?))\s{0,9}\)"
)
_WEIGHT = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
#: the word between the parts of a prompt that A1111 predicts apart; BREAK is read
_WORDS = re.compile(r"(?<!\w)AND(?!\w)")


def prompt_warnings(request: GenerateRequest) -> Iterator[str]:
    """Yield a warning for each notation in the texts of `request` that is not read, and for weights that no image
    survives."""
    texts = {"prompt": request.prompt, "negative": request.negative}
    texts |= {f"regions.{number}.prompt": region.prompt for number, region in enumerate(request.regions)}
    for name, text in texts.items():
        found = [(instead, match[0]) for instead, pattern in _NOTATIONS.items() if (match := pattern.search(text))]
        found += [(_WEIGHTS, match[0]) for match in _LIKE_A_WEIGHT.finditer(text) if not _WEIGHT.fullmatch(match[1])]
        # in a text in capitals they are words
        if text != text.upper():
            found += [("parts of the image are regions", match[0]) for match in _WORDS.finditer(text)]
        for instead, notation in dict(found).items():
            yield f"{name}: found {notation[:_MOST_SHOWN]!r}, which is read as text: {instead}"
        if "(" in text:
            # brackets around nothing have no parts
            part = max(parse_weights(text), key=lambda part: abs(part.weight), default=None)
            if part is not None and abs(part.weight) > USUAL_WEIGHT:
                shown = part.text[:_MOST_SHOWN]
                yield f"{name}: found the weight {part.weight:g} of {shown!r}, expected up to {USUAL_WEIGHT:g}"
