"""Formats a recipe as lines: what `modelpool inspect` shows of an image, video or audio file.

Shows every field that the digest covers, so that two files with different recipes never look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import (
        Recipe,
        RecipeControl,
        RecipeImagePrompt,
        RecipeImages,
        RecipeRegion,
    )

Fact = tuple[str, str]


def recipe_facts(recipe: Recipe) -> list[Fact]:
    """Return the lines of `recipe`: names and values."""
    return [
        ("prompt", recipe.prompt),
        ("negative", recipe.negative),
        ("model", f"{recipe.model}  (sha256 {recipe.model_sha256})"),
        *_added_facts(recipe),
        ("sampler", f"{recipe.sampler}, {recipe.schedule} schedule, {recipe.steps} steps"),
        ("guidance", f"{recipe.cfg:g}"),
        *_extent_facts(recipe),
        *_music_facts(recipe),
        *((("quality", str(recipe.quality)),) if recipe.quality else ()),
        *(_image_facts(recipe.pictures, recipe.steps) if recipe.pictures is not None else ()),
        ("seed", str(recipe.seed)),
        ("recipe", recipe.digest),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(recipe.versions.items()))),
        *((f"pool {name}", value) for name, value in recipe.computed_by.items()),
        *(("warning", warning) for warning in recipe.warnings),
    ]


def _added_facts(recipe: Recipe) -> Iterator[Fact]:
    """Yield rows for components that run in addition to the model, or change how it encodes the texts."""
    if (noise := recipe.noise) is not None:
        eta = "the sampler's" if noise.eta is None else f"{noise.eta:g}"
        yield "noise", f"eta {eta}, s_noise {noise.s_noise:g}, s_churn {noise.s_churn:g}"
    if recipe.shift:
        yield "shift", f"{recipe.shift:g}"
    if recipe.sigmas:
        yield "sigmas", ", ".join(f"{level:g}" for level in recipe.sigmas)
    if recipe.decoder is not None:
        decoder = recipe.decoder
        parts = f"{decoder.steps} steps, guidance {decoder.cfg:g}  (sha256 {decoder.sha256})"
        yield "decoder", f"{decoder.model}, {parts}"
    if (upscale := recipe.upscale) is not None:
        tiles = f", tiles of {upscale.tile}" if upscale.tile else ""
        yield "upscaler", f"{upscale.model}, scale {upscale.scale:g}{tiles}  (sha256 {upscale.sha256})"
    if recipe.low_noise is not None:
        yield "low noise", f"below {recipe.low_noise.boundary:g}, guidance {recipe.low_noise.cfg:g}"
    for name, settings in recipe.options.items():
        yield f"option {name}", ", ".join(f"{setting} {value}" for setting, value in settings.items())
    for lora in recipe.loras:
        where = f" on the {lora.noise}-noise expert" if lora.noise else ""
        on_text = "" if lora.text_strength is None else f", {lora.text_strength:g} on the text encoders"
        span = "" if (lora.start, lora.end) == (0.0, 1.0) else f", from {lora.start:g} to {lora.end:g} of the schedule"
        blocks = ", ".join(f"{name} {factor:g}" for name, factor in lora.blocks)
        how = on_text + span + (f", by block: {blocks}" if blocks else "")
        if lora.keyframes:
            steps = ", ".join(f"{strength:g} from {share:g}" for share, strength in lora.keyframes)
            how += f", over the steps: {steps}" + (f" ({lora.interpolation})" if lora.interpolation else "")
        how += f", only for {', '.join(lora.only)}" if lora.only else ""
        yield f"LoRA {lora.name}", f"strength {lora.strength:g}{where}{how}  (sha256 {lora.sha256})"
    for name, sha256 in recipe.embeddings:
        yield f"embedding {name}", f"(sha256 {sha256})"
    if recipe.clip_skip:
        yield "clip skip", str(recipe.clip_skip)


def _extent_facts(recipe: Recipe) -> Iterator[Fact]:
    """Yield size and length."""
    if recipe.seconds:
        yield "length", f"{recipe.seconds:g} seconds"
        return
    yield "size", f"{recipe.width}x{recipe.height}"
    if recipe.view is not None:
        names = ("azimuth", "elevation", "camera_distance", "image_elevation")
        numbers = ((name.replace("_", " "), getattr(recipe.view, name)) for name in names)
        yield "view", ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)
    if not recipe.frames:
        return
    if recipe.is_layers:
        yield "layers", str(recipe.frames)
        return
    yield "frames", f"{recipe.frames}, {recipe.frame_rate:g} per second"
    extras = (("motion", recipe.motion), ("image noise", recipe.image_noise), ("elevation", recipe.elevation))
    yield from ((name, f"{value:g}") for name, value in extras if value)


def _music_facts(recipe: Recipe) -> Iterator[Fact]:
    """Yield the music fields of a recipe; lyrics in one line."""
    for name in ("lyrics", "lyrics_language", "bpm", "key_scale", "time_signature"):
        if value := getattr(recipe, name):
            yield name.replace("_", " "), str(value).replace("\n", " / ")


def _image_facts(pictures: RecipeImages, steps: int) -> Iterator[Fact]:
    """Yield the inputs other than texts. Hashes are of pixels, as they were used."""
    if pictures.image_sha256:
        first = pictures.first_step
        since = f", from step {first} of {steps}" if first else ""
        yield "image", _image(pictures.image_file, pictures.image_sha256, since)
    if pictures.mask_sha256:
        kept = ", unmasked area pasted back" if pictures.paste else ""
        yield "mask", _image(pictures.mask_file, pictures.mask_sha256, kept)
    if pictures.hires:
        yield "second pass", _second_pass(pictures.hires)
    yield from ((f"ControlNet {control.name}", _control(control)) for control in pictures.controls)
    for prompt in pictures.image_prompts:
        yield f"image prompt {prompt.name}", _image_prompt(prompt)
    yield from (("region", _region(region)) for region in pictures.regions)
    if pictures.reference_sha256:
        note = f", read {pictures.reference_as}" if pictures.reference_as else ""
        yield "reference", _image(pictures.reference_file, pictures.reference_sha256, note)
    for place, sha256 in enumerate(pictures.more_references):
        files = pictures.more_reference_files
        yield "reference", _image(files[place] if place < len(files) else "", sha256)
    others = (
        ("last image", pictures.last_image_file, pictures.last_image_sha256),
        ("video", pictures.video_file, pictures.video_sha256),
        ("video mask", pictures.video_mask_file, pictures.video_mask_sha256),
        ("face video", pictures.face_video_file, pictures.face_video_sha256),
    )
    yield from ((name, _image(file, sha256)) for name, file, sha256 in others if sha256)
    if pictures.image_cfg:
        yield "image guidance", f"{pictures.image_cfg:g}"
    if pictures.noise_level:
        yield "noise level", str(pictures.noise_level)


def _image(file: str, sha256: str, more: str = "") -> str:
    return f"{file or 'from memory'}{more}  (sha256 of its pixels {sha256})"


def _second_pass(hires: Mapping[str, Any]) -> str:
    """Format the fields as in a request; unset ones are left out."""
    known = {name: value for name, value in hires.items() if value is not None}
    if (sha256 := known.pop("upscaler_sha256", None)) is not None:
        known["upscaler"] = f"{known['upscaler']} (sha256 {sha256})"
    scale = f"scale {known.pop('scale'):g}" if "scale" in known else ""
    return ", ".join(filter(None, (scale, *(f"{name} {value}" for name, value in known.items()))))


def _control(control: RecipeControl) -> str:
    parts = [f"strength {control.strength:g}"]
    if (control.start, control.end) != (0.0, 1.0):
        parts.append(f"from {control.start:g} to {control.end:g} of the steps")
    if control.mode is not None:
        parts.append(f"mode {control.mode}")
    parts += [f"{name} {'yes' if value else 'no'}" for name, value in control.said.items()]
    if control.mask_sha256:
        parts.append(f"inpaint mask (sha256 of its pixels {control.mask_sha256})")
    control_image = _image(control.image_file, control.image_sha256)
    return f"{', '.join(parts)}; control image {control_image}  (sha256 {control.sha256})"


def _image_prompt(prompt: RecipeImagePrompt) -> str:
    parts = [f"strength {prompt.strength:g}"]
    if (prompt.start, prompt.end) != (0.0, 1.0):
        parts.append(f"from {prompt.start:g} to {prompt.end:g} of the steps")
    parts += [f"{name} {factor:g}" for name, factor in prompt.blocks]
    parts += [f"encoder {prompt.encoder}"] if prompt.encoder else []
    images = [_image(file, sha256) for file, sha256 in zip(prompt.image_files, prompt.image_sha256, strict=True)]
    faces = (
        [f"faces {prompt.faces_file or 'from memory'} (sha256 {prompt.faces_sha256})"] if prompt.faces_sha256 else []
    )
    masks = [f"mask {_image(file, sha256)}" for file, sha256 in zip(prompt.mask_files, prompt.mask_sha256, strict=True)]
    return f"{', '.join(parts)}; {', '.join((*images, *faces, *masks))}  (sha256 {prompt.sha256})"


def _region(region: RecipeRegion) -> str:
    place = "x".join(map(str, region.box[2:])) + f" at {region.box[0]},{region.box[1]}" if region.box else ""
    masked = f"a mask (sha256 of its pixels {region.mask_sha256})" if region.mask_sha256 else ""
    return f"{region.prompt!r}, strength {region.strength:g}, {place or masked}"
