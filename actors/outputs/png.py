"""Encodes an image as a PNG with its recipe, and reads recipes and A1111 parameters from PNGs.

Two texts are written: `parameters`, as the A1111 web UI writes it and many viewers read it, and `modelpool`, the
complete recipe as JSON, which is authoritative. Knows recipes and PNG; not folders, manifests or where anything ran.

The form of `parameters` (facts from files that the web UI wrote): the prompt, with LoRAs as <lora:name:strength>; a
line "Negative prompt: ..." unless it is empty; one line of "Key: value" pairs joined by ", ". A value with a comma, a
colon or a line end is in JSON quotes. Model hash: 10 digits of the file's SHA-256; LoRA hashes: 12.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, PngImagePlugin

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import PixelArray
from modelpool.pool.sampling.names import display_name

PARAMETERS_KEY = "parameters"
RECIPE_KEY = "modelpool"

_NEGATIVE = "Negative prompt: "
_PAIR = re.compile(r'\s*([A-Za-z][\w /\-]*): ("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
_FEWEST_PAIRS = 3  # a line with fewer is part of the prompt


@dataclass(frozen=True, slots=True)
class Parameters:
    """A parsed A1111 `parameters` text: names are A1111's ("Steps", "CFG scale"), values are text."""

    prompt: str
    negative: str
    values: Mapping[str, str]


def encode_png(pixels_HWC: PixelArray, recipe: Recipe) -> bytes:
    """Encode exactly these pixels (uint8 RGB) as a PNG with both texts."""
    texts = PngImagePlugin.PngInfo()
    texts.add_text(PARAMETERS_KEY, _storable(parameters_text(recipe)))
    texts.add_text(RECIPE_KEY, json.dumps(recipe.as_json()))
    buffer = io.BytesIO()
    Image.fromarray(pixels_HWC).save(buffer, format="PNG", pnginfo=texts)
    return buffer.getvalue()


def parameters_text(recipe: Recipe) -> str:
    """Return the A1111 `parameters` text of `recipe`."""
    lines = [recipe.prompt + "".join(f" <lora:{lora.name}:{lora.strength:g}>" for lora in recipe.loras)]
    if recipe.negative:
        lines.append(_NEGATIVE + recipe.negative)
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in _pairs(recipe).items()))
    return "\n".join(lines)


def parse_parameters(text: str) -> Parameters:
    """Parse an A1111 `parameters` text. Without a line of pairs at its end, all of it is prompt."""
    lines = text.split("\n")
    values = _parsed_pairs(lines[-1])
    if len(values) < _FEWEST_PAIRS:
        values = {}
    else:
        lines = lines[:-1]
    at = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    negative = "\n".join(lines[at:]).removeprefix(_NEGATIVE)
    return Parameters("\n".join(lines[:at]), negative, values)


def read_parameters(path: str | Path) -> Parameters:
    """Read the `parameters` text of a PNG. Raises UserError if the file has none or is not an image."""
    text = _texts(Path(path)).get(PARAMETERS_KEY)
    if text is None:
        raise UserError(f"{path}: no {PARAMETERS_KEY!r} text in this image")
    return parse_parameters(text)


def read_recipe(path: str | Path) -> Recipe:
    """Read the recipe in a PNG. Raises UserError if it has none, or an unreadable one."""
    text = _texts(Path(path)).get(RECIPE_KEY)
    if text is None:
        raise UserError(f"{path}: no {RECIPE_KEY!r} text in this image (not from modelpool, or stripped)")
    try:
        return recipe_from_text(text)
    except UserError as error:
        raise UserError(f"{path}: the recipe in this image cannot be read ({error})") from error


def _pairs(recipe: Recipe) -> dict[str, str]:
    sampler, schedule = display_name(recipe.sampler, recipe.schedule)
    pairs = {
        "Steps": str(recipe.steps),
        "Sampler": sampler,
        "Schedule type": schedule,
        "CFG scale": f"{recipe.cfg:g}",
        "Seed": str(recipe.seed),
        "Size": f"{recipe.width}x{recipe.height}",
        "Model hash": recipe.model_sha256[:10],
        "Model": recipe.model,
    }
    if (noise := recipe.noise) is not None:
        pairs |= {} if noise.eta is None else {"Eta": f"{noise.eta:g}"}
        pairs |= {"Sigma churn": f"{noise.s_churn:g}", "Sigma noise": f"{noise.s_noise:g}"}
    pairs |= {"Sigmas": " ".join(f"{level:g}" for level in recipe.sigmas)} if recipe.sigmas else {}
    pairs |= _image_pairs(recipe)
    if (second := recipe.decoder) is not None:
        pairs |= {"Decoder": second.model, "Decoder hash": second.sha256[:10], "Decoder steps": str(second.steps)}
        pairs["Decoder CFG scale"] = f"{second.cfg:g}"
    if (low := recipe.low_noise) is not None:
        pairs |= {"Low noise CFG scale": f"{low.cfg:g}", "Low noise below": f"{low.boundary:g}"}
    if recipe.loras:
        pairs["Lora hashes"] = ", ".join(f"{lora.name}: {lora.sha256[:12]}" for lora in recipe.loras)
    if "modelpool" in recipe.versions:
        pairs["Version"] = f"modelpool {recipe.versions['modelpool']}"
    return pairs


def _image_pairs(recipe: Recipe) -> dict[str, str]:
    """Return the inputs of an image under the names of the A1111 web UI. The strength is the share of steps that
    were run.
    """
    pairs: dict[str, str] = {}
    made = recipe.pictures
    if made is None:
        return pairs
    if made.image_sha256:
        pairs["Denoising strength"] = f"{1 - made.first_step / recipe.steps:.4g}"
    if made.image_cfg:
        pairs["Image CFG scale"] = f"{made.image_cfg:g}"
    if made.hires:
        pairs.setdefault("Denoising strength", f"{made.hires['strength']:g}")
        pairs |= {"Hires upscale": f"{made.hires['scale']:g}", "Hires steps": str(made.hires["steps"] or recipe.steps)}
        pairs["Hires upscaler"] = "Latent" if made.hires["via"] == "latent" else "Lanczos"
    return pairs


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if any(c in value for c in ",:\n") else value


def _parsed_pairs(line: str) -> dict[str, str]:
    """Parse a line of pairs; {} if any part of the line is something else."""
    values: dict[str, str] = {}
    position = 0
    while position < len(line):
        match = _PAIR.match(line, position)
        if match is None:
            return {}
        try:
            values[match[1]] = parse_json(match[2].encode()) if match[2].startswith('"') else match[2]
        except NotJson:
            return {}
        position = match.end()
    return values


def _storable(text: str) -> str:
    """Remove what no encoding can hold (half a surrogate pair)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _texts(path: Path) -> dict[str, str]:
    try:
        with Image.open(path) as image:
            if image.format != "PNG":
                raise UserError(f"{path}: found a {image.format} file, expected a PNG")
            image.load()  # texts may be located after the pixels
            return {str(key): value for key, value in image.info.items() if isinstance(value, str)}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError:
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise UserError(f"{path}: cannot be read as an image ({error})") from error
