"""Reads output files back: their pixels, frames or samples, and whether they are what their manifest entry lists.

Shape legend: T frames, H W pixel height and width, C colour channels (3) or audio channels, S samples.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np
from PIL import Image

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.audio import AudioKind
from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.image_file import read_labels, read_recipe
from modelpool.actors.outputs.output_file import read_video_recipe
from modelpool.actors.outputs.preview_image import read_samples
from modelpool.actors.outputs.video import VideoKind
from modelpool.actors.request.labels import NO_LABELS, Labels
from modelpool.actors.request.video_output_fields import IMAGE_FORMATS
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.stage_params import AudioSamples, FloatArray, PixelArray

#: the last chunk of every complete PNG. Source: PNG specification, section 11.2.5
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_PNG = ".png"
#: full scale of 16-bit samples, as they are written
_LOUDEST = 32767.0


def pixels_sha256(pixels: PixelArray | FloatArray) -> str:
    """Return the SHA-256 of the pixels, independent of the file: of their bytes, row by row, red green blue; of a
    video's frames one after the other, of an audio clip's samples channel by channel.
    """
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def is_lossless(path: Path) -> bool:
    """Whether a file of this name holds exactly the pixels that were generated."""
    return path.suffix.lower() == _PNG


def read_content(path: Path) -> PixelArray | FloatArray:
    """Return the pixels [H, W, C] of an image, the frames [T, H, W, C] of a video, the layers of an image likewise, or
    the samples [S, C], from -1 to 1, of an audio clip. Raises OutputFailed for a file that is missing or damaged.
    """
    ending = path.suffix.lower()
    try:
        if ending in {kind.value for kind in AudioKind}:
            samples_SC: FloatArray = read_samples(path).T.astype(np.float32) / np.float32(_LOUDEST)
            return samples_SC
        if ending == VideoKind.GIF.value:
            return _gif_frames(path)
        if ending in {kind.value for kind in VideoKind}:
            return _video_frames(path)
        with Image.open(path) as image:
            if ending == _PNG and image.mode == "RGBA":  # images of ours have no transparency
                return _frames(image, "RGBA")
            if getattr(image, "n_frames", 1) > 1:
                return _frames(image, "RGB")
            return np.array(image.convert("RGB"))
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OutputFailed(f"{path}: cannot be read ({reason})") from error


def read_sound(path: Path) -> AudioSamples | None:
    """Return the audio track of a video; None if it has none. Raises OutputFailed for a file that is missing or
    damaged."""
    import av  # imported late: it is slow, and most programs read no audio

    if path.suffix.lower() == VideoKind.GIF.value:
        return None
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                return None
            rate = int(container.streams.audio[0].codec_context.sample_rate)
            resampler = av.AudioResampler(format="fltp")
            frames = [own for frame in container.decode(audio=0) for own in resampler.resample(frame)]
            parts = [np.asarray(frame.to_ndarray(), np.float32) for frame in frames]
            return AudioSamples(np.concatenate(parts, axis=1).T.clip(-1.0, 1.0), rate)
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise OutputFailed(f"{path}: cannot be read ({error})") from error


def samples_per_second(path: Path) -> int:
    """Return the sample rate of an audio file. Raises OutputFailed for a file that is missing or damaged."""
    import av  # imported late: it is slow, and most programs read no audio

    try:
        with av.open(str(path)) as container:
            return int(container.streams.audio[0].codec_context.sample_rate)
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise OutputFailed(f"{path}: cannot be read ({error})") from error


def unlisted_output(path: Path) -> Recipe | None:
    """Return the recipe in a complete output file of ours; None for any other file."""
    recipe = recipe_of_file(path)
    if recipe is None:
        return None
    try:
        read_content(path)
    except UserError:
        return None
    return recipe


def recipe_of_file(path: Path) -> Recipe | None:
    """Return the recipe in an output file of ours, which may be damaged otherwise; None for any other file."""
    ending = path.suffix.lower()
    try:
        if ending.removeprefix(".") in IMAGE_FORMATS:
            return read_recipe(path)
        return read_video_recipe(path) if ending in {kind.value for kind in (*AudioKind, *VideoKind)} else None
    except UserError:
        return None


def labels_in(path: Path) -> Labels:
    """Return the labels in an output file; none for a file that has none, as videos and audio."""
    try:
        return read_labels(path) if path.suffix.lower().removeprefix(".") in IMAGE_FORMATS else NO_LABELS
    except UserError:
        return NO_LABELS


def size_problem(path: Path, entry: ManifestEntry) -> str:
    """Return why the file cannot be the one that `entry` lists, without reading it; "" if it can. Of entries that list
    no size, a PNG must have an end, and another file must not be empty.
    """
    try:
        found = path.stat()
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "not a file"
    if entry.file_bytes is not None:
        expected = f"expected {entry.file_bytes}"
        return "" if found.st_size == entry.file_bytes else f"damaged: found {found.st_size} bytes, {expected}"
    if not found.st_size:
        return "damaged: empty"
    return "damaged: truncated" if path.suffix.lower() == _PNG and not _has_png_end(path) else ""


def content_problem(path: Path, entry: ManifestEntry) -> str:
    """Return why the file is not the one that `entry` lists; "" if it is. Reads the file: compares its hash, or decodes
    it if the entry lists none.
    """
    problem = size_problem(path, entry)
    if problem:
        return problem
    try:
        if entry.file_sha256:
            return "" if file_sha256(path) == entry.file_sha256 else "damaged: other content than was written"
        pixels = read_content(path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except OutputFailed as error:
        return f"damaged: {error}"
    if is_lossless(path) and pixels_sha256(pixels) != entry.pixels_sha256:
        return "damaged: other pixels than were written"
    return ""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_png_end(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-len(_PNG_END), os.SEEK_END)
            return file.read() == _PNG_END
    except OSError:  # shorter than that
        return False


def _gif_frames(path: Path) -> PixelArray:
    with Image.open(path) as image:
        return _frames(image, "RGB")


def _frames(image: Image.Image, mode: str) -> PixelArray:
    frames = []
    for place in range(getattr(image, "n_frames", 1)):
        image.seek(place)
        frames.append(np.array(image.convert(mode)))
    return np.stack(frames)


def _video_frames(path: Path) -> PixelArray:
    import av  # imported late: it is slow, and most programs read no videos

    with av.open(str(path)) as container:
        frames = [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in container.decode(video=0)]
    if not frames:
        raise OSError("no frames in this video")
    return np.stack(frames)
