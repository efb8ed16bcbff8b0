"""Encodes an image as a PNG, WebP, JPEG or AVIF file with its recipe, and reads recipes and A1111 parameters back.

Two texts are written: `parameters`, as the A1111 web UI writes it and many viewers read it, and `modelpool`, the
complete recipe as JSON, which is authoritative; a third one, `modelpool-request`, has the labels of the request as
JSON, if there are any. Knows recipes; not folders, manifests or where anything ran.

The form of `parameters` (facts from files that the web UI wrote): the prompt, with LoRAs as <lora:name:strength>; a
line "Negative prompt: ..." unless it is empty; one line of "Key: value" pairs joined by ", ". A value with a comma, a
colon or a line end is in JSON quotes. Model hash: 10 digits of the file's SHA-256; LoRA hashes: 12.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from modelpool.actors.graph.features.recipe import IMAGE_FORMAT, Recipe
from modelpool.actors.outputs.atomic_write import write_output
from modelpool.actors.outputs.image_metadata import LABELS_KEY as LABELS_KEY
from modelpool.actors.outputs.image_metadata import PARAMETERS_KEY as PARAMETERS_KEY
from modelpool.actors.outputs.image_metadata import RECIPE_KEY as RECIPE_KEY
from modelpool.actors.outputs.image_metadata import check_jpeg_metadata, exif_of, texts_of_image, xmp_of
from modelpool.actors.outputs.recipe_json import recipe_in
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.actors.request.labels import NO_LABELS, Labels, labels_from_json
from modelpool.actors.request.lora_fields import lora_text
from modelpool.actors.request.number_fields import number_text
from modelpool.actors.request.video_output_fields import DEFAULT_QUALITY, MAX_QUALITY
from modelpool.pool.inference.sampling.sampler_names import display_name
from modelpool.pool.values.core.errors import UserError, unknown_name
from modelpool.pool.values.core.stage_params import PixelArray

#: keys of modelpool alone: layers of CLIP that are skipped besides those that the model skips by itself, and the names
#: of what determines the image and is not in the text
SKIPPED_KEY, UNLISTED_KEY = "CLIP layers skipped", "Not listed"
#: fields of a recipe, and of its images, that the text has, or that change no pixels of the image in a PNG
_LISTED = frozenset(
    {
        *("model", "model_sha256", "prompt", "negative", "loras", "steps", "cfg", "sampler", "schedule", "width"),
        *(
            "height",
            "seed",
            "format",
            "quality",
            "clip_skip",
            "embeddings",
            "decoder",
            "sigmas",
            "low_noise",
            "upscale",
        ),
        *("shift", "batch", "gpus"),  # these change how an image is computed, not its content
    }
)
_LISTED_OF_IMAGES = frozenset({"image_sha256", "first_step", "paste", "hires", "image_cfg"})
_NEGATIVE = "Negative prompt: "
_PAIR = re.compile(r'\s*([A-Za-z][\w /\-]*): ("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
#: a value that is a JSON table or list, as extensions and sites write it
_JSON_PAIR = re.compile(r"\s*([A-Za-z][\w /\-]*): ([{\[])")
_BEGINS = re.compile(r"\s*Steps: \d")
_THUMBNAIL_QUALITY = 80
#: how long viewers show each layer of an image
_LAYER_MILLISECONDS = 1000
_FEWEST_PAIRS = 3  # a line with fewer is part of the prompt


@dataclass(frozen=True, slots=True)
class Parameters:
    """A parsed A1111 `parameters` text: names are A1111's ("Steps", "CFG scale"), values are text."""

    prompt: str
    negative: str
    values: Mapping[str, str]


def encode_image(pixels_HWC: PixelArray, recipe: Recipe, labels: Labels = NO_LABELS) -> bytes:
    """Encode pixels (uint8 RGB) in the format and quality of `recipe`, with these texts. Equal pixels and recipes give
    equal bytes. Raises UnusableField if the format cannot hold the texts.
    """
    if recipe.ending == IMAGE_FORMAT:
        return encode_png(pixels_HWC, recipe, labels)
    quality = recipe.quality or DEFAULT_QUALITY[recipe.ending]
    exif, xmp = exif_of(_storable(parameters_text(recipe))), xmp_of(json.dumps(recipe.as_json()), labels.as_text())
    image, buffer = Image.fromarray(pixels_HWC), io.BytesIO()
    match recipe.ending:
        case "jpg":
            check_jpeg_metadata(exif, xmp)
            # colours at full resolution: text and thin lines in saturated colours stay sharp
            image.save(buffer, "JPEG", quality=quality, subsampling="4:4:4", exif=exif, xmp=xmp)
        case "webp":
            image.save(buffer, "WEBP", quality=quality, lossless=quality == MAX_QUALITY, exif=exif, xmp=xmp)
        case "avif":
            # one thread: the bytes depend on no number of cores
            image.save(buffer, "AVIF", quality=quality, subsampling="4:4:4", max_threads=1, exif=exif, xmp=xmp)
        case _:
            raise AssertionError(f"{recipe.ending} is no image format")
    return buffer.getvalue()


def encode_animation(
    frames_THWC: PixelArray, frames_per_second: float, recipe: Recipe, labels: Labels = NO_LABELS
) -> bytes:
    """Encode frames (uint8 RGB) as an animated WebP that repeats without end, in the quality of `recipe`, with these
    texts. Each frame lasts whole milliseconds, and the total is as long as at the exact rate; it has no sound. Equal
    neighbours are one frame that lasts as long as both. Raises UnusableField if the format cannot hold the texts."""
    quality = recipe.quality or DEFAULT_QUALITY["webp"]
    exif, xmp = exif_of(_storable(parameters_text(recipe))), xmp_of(json.dumps(recipe.as_json()), labels.as_text())
    images, buffer = [Image.fromarray(np.ascontiguousarray(pixels_HWC)) for pixels_HWC in frames_THWC], io.BytesIO()
    ends = [round(1000 * place / frames_per_second) for place in range(len(images) + 1)]
    durations = [max(1, end - start) for start, end in itertools.pairwise(ends)]
    options = {"quality": quality, "lossless": quality == MAX_QUALITY, "exif": exif, "xmp": xmp}
    images[0].save(
        buffer, "WEBP", save_all=True, append_images=images[1:], duration=durations, loop=0, method=2, **options
    )
    return buffer.getvalue()


def encode_thumbnail(pixels_HWC: PixelArray, longest_side: int) -> bytes:
    """Encode a smaller copy as WebP, without metadata. An image that is small enough keeps its size."""
    image, buffer = Image.fromarray(pixels_HWC), io.BytesIO()
    image.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    image.save(buffer, "WEBP", quality=_THUMBNAIL_QUALITY)
    return buffer.getvalue()


def encode_png(pixels_HWC: PixelArray, recipe: Recipe, labels: Labels = NO_LABELS) -> bytes:
    """Encode exactly these pixels (uint8 RGB) as a PNG with these texts."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_HWC).save(buffer, format="PNG", pnginfo=_png_texts(recipe, labels))
    return buffer.getvalue()


def encode_layers(layers_THWC: PixelArray, recipe: Recipe, labels: Labels = NO_LABELS) -> bytes:
    """Encode exactly these layers (uint8 RGB and opacity), the lowest first, as the frames of an animated PNG with
    these texts. Viewers show one after the other."""
    first, *others = [Image.fromarray(layer_HWC) for layer_HWC in layers_THWC]
    buffer, count = io.BytesIO(), len(layers_THWC)
    first.save(
        buffer, format="PNG", pnginfo=_png_texts(recipe, labels), save_all=True, append_images=others,
        duration=[_LAYER_MILLISECONDS] * count, blend=PngImagePlugin.Blend.OP_SOURCE,
        # Pillow joins equal frames that are disposed of alike
        disposal=[PngImagePlugin.Disposal(place % 2) for place in range(count)],
    )  # fmt: skip
    return buffer.getvalue()


def write_layers(path: str | Path, layers_THWC: PixelArray, recipe: Recipe) -> Path:
    """Write layers to `path`, a PNG, atomically, with `recipe`. Returns the path. Raises UnknownName for another
    suffix, OutputFailed naming the file if it cannot be written."""
    whole = Path(path)
    if whole.suffix.lower() != f".{IMAGE_FORMAT}":
        raise unknown_name("format of layers", whole.suffix or str(path), [f".{IMAGE_FORMAT}"])
    return write_output(whole, encode_layers(layers_THWC, recipe))


def write_animation(path: str | Path, frames_THWC: PixelArray, frames_per_second: float, recipe: Recipe) -> Path:
    """Write frames to `path`, an animated WebP, atomically, as `encode_animation` encodes them. Returns the path.
    Raises OutputFailed naming the file if it cannot be written."""
    return write_output(Path(path), encode_animation(frames_THWC, frames_per_second, recipe))


def _png_texts(recipe: Recipe, labels: Labels) -> PngImagePlugin.PngInfo:
    texts = PngImagePlugin.PngInfo()
    texts.add_text(PARAMETERS_KEY, _storable(parameters_text(recipe)))
    texts.add_text(RECIPE_KEY, json.dumps(recipe.as_json()))
    if text := labels.as_text():
        texts.add_text(LABELS_KEY, text)
    return texts


def parameters_text(recipe: Recipe) -> str:
    """Return the A1111 `parameters` text of `recipe`."""
    loras = (lora_text(lora.name, replace(lora, noise="")) for lora in recipe.loras)
    lines = [recipe.prompt + "".join(f" <lora:{lora}>" for lora in loras)]
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
    """Read the `parameters` text of an image. Raises UserError if the file has none or is not an image."""
    text = texts_of_image(Path(path)).get(PARAMETERS_KEY)
    if text is None:
        raise UserError(f"{path}: no {PARAMETERS_KEY!r} text in this image")
    return parse_parameters(text)


def read_recipe(path: str | Path) -> Recipe:
    """Read the recipe in an image. Raises UserError if it has none, or an unreadable one."""
    return recipe_in(path, "image", RECIPE_KEY, texts_of_image(Path(path)).get(RECIPE_KEY))


def read_labels(path: str | Path) -> Labels:
    """Read the labels in a PNG: none if it has none that can be used. Raises UserError if it is not an image."""
    text = texts_of_image(Path(path)).get(LABELS_KEY)
    try:
        return NO_LABELS if text is None else labels_from_json(parse_json(text.encode("utf-8", "surrogatepass")))
    except NotJson:
        return NO_LABELS


def _pairs(recipe: Recipe) -> dict[str, str]:
    pairs: dict[str, str] = {}
    if recipe.sampler:  # a workflow may sample nothing
        sampler, schedule = display_name(recipe.sampler, recipe.schedule)
        pairs = {
            "Steps": str(recipe.steps),
            "Sampler": sampler,
            "Schedule type": schedule,
            "CFG scale": number_text(recipe.cfg),
        }
    pairs |= {
        "Seed": str(recipe.seed),
        "Size": f"{recipe.width}x{recipe.height}",
        "Model hash": recipe.model_sha256[:10],
        "Model": recipe.model,
    }
    if (noise := recipe.noise) is not None:
        pairs |= (
            {} if noise.eta is None else {"Eta DDIM" if recipe.sampler == "ddim" else "Eta": number_text(noise.eta)}
        )
        pairs |= {"Sigma churn": number_text(noise.s_churn), "Sigma noise": number_text(noise.s_noise)}
    pairs |= {"Shift": number_text(recipe.shift)} if recipe.shift else {}
    pairs |= {"Sigmas": " ".join(number_text(level) for level in recipe.sigmas)} if recipe.sigmas else {}
    if recipe.clip_skip:  # the layer, which means little without the model, and how many are skipped
        pairs |= {"Clip skip": str(recipe.clip_skip + 1), SKIPPED_KEY: str(recipe.clip_skip)}
    pairs |= _image_pairs(recipe)
    if (second := recipe.decoder) is not None:
        pairs |= {"Decoder": second.model, "Decoder hash": second.sha256[:10], "Decoder steps": str(second.steps)}
        pairs["Decoder CFG scale"] = number_text(second.cfg)
    if (upscale := recipe.upscale) is not None:
        pairs |= {"Postprocess upscale by": number_text(upscale.scale), "Postprocess upscaler": upscale.model}
    if (low := recipe.low_noise) is not None:
        pairs |= {"Low noise CFG scale": number_text(low.cfg), "Low noise below": number_text(low.boundary)}
    if recipe.loras:
        pairs["Lora hashes"] = ", ".join(f"{lora.name}: {lora.sha256[:12]}" for lora in recipe.loras)
    if unlisted := _unlisted(recipe):
        pairs[UNLISTED_KEY] = ", ".join(unlisted)
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
        pairs["Denoising strength"] = _share_text(recipe.steps - made.first_step, recipe.steps)
    if made.image_cfg:
        pairs["Image CFG scale"] = number_text(made.image_cfg)
    if made.hires:
        pairs.setdefault("Denoising strength", number_text(made.hires["strength"]))
        pairs |= {
            "Hires upscale": number_text(made.hires["scale"]),
            "Hires steps": str(made.hires["steps"] or recipe.steps),
        }
        other = made.hires.get("upscaler", "Lanczos")
        pairs["Hires upscaler"] = "Latent" if made.hires["via"] == "latent" else other
    return pairs


def _unlisted(recipe: Recipe) -> list[str]:
    """Return the fields that determine the image and that the text does not have."""
    found = recipe.determining()
    images, noise = found.pop("pictures", None) or {}, found.pop("noise", None) or {}
    names = [name for name in found if name not in _LISTED]
    names += [name for name in ("beta_alpha", "beta_beta") if noise.get(name) is not None]
    names += [name.removesuffix("_sha256") for name, value in images.items() if value and name not in _LISTED_OF_IMAGES]
    names += ["loras.noise"] if any(lora.noise for lora in recipe.loras) else []
    return sorted(names)


def _share_text(run: int, steps: int) -> str:
    """Return the strength by which `run` of `steps` steps are run, however a family rounds it, with few digits."""
    share = run / steps
    for digits in range(4, 18):
        text = f"{share:.{digits}g}"
        if int(steps * float(text)) == run and int(steps - steps * float(text)) == steps - run:
            return text
    return number_text((run + 0.5) / steps)  # as most families round


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if any(c in value for c in ",:\n") else value


def _parsed_pairs(line: str) -> dict[str, str]:
    """Parse a line of pairs; {} if any part of the line is something else. Of a line that begins as the web UI writes
    it, what extensions write in other forms is left out."""
    values: dict[str, str] = {}
    is_of_ui, position = _BEGINS.match(line) is not None, 0
    while position < len(line):
        match = _JSON_PAIR.match(line, position)
        if match is not None:
            try:
                _, position = json.JSONDecoder().raw_decode(line, match.start(2))
            except (ValueError, RecursionError):
                match = None
            else:
                values[match[1]] = line[match.start(2) : position]
                position += line.startswith(",", position)
                continue
        match = _PAIR.match(line, position)
        try:
            if match is None:
                raise NotJson("no pair")
            values[match[1]] = parse_json(match[2].encode()) if match[2].startswith('"') else match[2].strip()
            position = match.end()
        except NotJson:
            if not is_of_ui:
                return {}
            comma = line.find(",", position)
            position = len(line) if comma < 0 else comma + 1
    return values


def _storable(text: str) -> str:
    """Remove what no encoding can hold (half a surrogate pair)."""
    return text.encode("utf-8", "replace").decode("utf-8")
