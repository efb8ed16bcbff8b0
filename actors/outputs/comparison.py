"""Compares an output with one that was generated again: pixels, and what they depend on. Pure.

Equal software on equal devices gives equal bytes. Other devices, or other versions of the libraries, add and multiply
in another order; then the outputs count as equal within a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.request.gpu_fields import AUTO
from modelpool.pool.values.core.stage_params import FloatArray, PixelArray

#: of the full scale: largest mean difference, and the difference that only `MOST_FAR` of the values may exceed
MOST_MEAN, FAR = 2 / 255, 16 / 255
MOST_FAR = 0.01
_SHA256_DIGITS = 64
#: the number of a device in its name: equal devices compute the same
_INDEX = re.compile(r":\d+$")


class Agreement(Enum):
    """How far two outputs agree."""

    EQUAL = "equal"  #: the same bytes
    WITHIN_TOLERANCE = "within tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class OutputOrigin:
    """What the pixels of an output depend on, other than its request.

    devices   names of the devices that its tasks ran on; empty if the manifest does not list them
    versions  of the libraries, by name
    weights   SHA-256 of each file of weights, by its part in the recipe
    settings  of the pool, where they differ from the defaults, by name
    """

    devices: frozenset[str]
    versions: Mapping[str, str]
    weights: Mapping[str, str]
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """An output and the same one generated again.

    differs    which of devices, versions, weights and settings of the pool differ, with both values
    mean, far  mean difference of the values as a fraction of the full scale, and the share of them that differ by more
               than `FAR`
    """

    agreement: Agreement
    differs: tuple[str, ...]
    mean: float = 0.0
    far: float = 0.0


def origin_of(recipe: Recipe, tasks: Any) -> OutputOrigin:
    """Return the origin of an output with these tasks, as the manifest lists them."""
    listed = tasks if isinstance(tasks, Sequence) else ()
    devices = (_INDEX.sub("", str(task.get("device") or "")) for task in listed if isinstance(task, Mapping))
    weights = {"model": recipe.model_sha256}
    weights |= {f"LoRA {lora.name}": lora.sha256 for lora in recipe.loras}
    weights |= {f"embedding {name}": sha256 for name, sha256 in recipe.embeddings}
    if recipe.decoder is not None:
        weights["decoder"] = recipe.decoder.sha256
    for control in recipe.pictures.controls if recipe.pictures is not None else ():
        weights[f"ControlNet {control.name}"] = control.sha256
    for prompt in recipe.pictures.image_prompts if recipe.pictures is not None else ():
        weights[f"image prompt adapter {prompt.name}"] = prompt.sha256
        if prompt.encoder_sha256:
            weights[f"vision encoder {prompt.encoder}"] = prompt.encoder_sha256
    names = frozenset(name for name in devices if name)
    return OutputOrigin(names, dict(recipe.versions), weights, dict(recipe.computed_by))


def differences(listed: OutputOrigin, again: OutputOrigin) -> tuple[str, ...]:
    """Return in which of devices, versions, weights and settings two origins differ, as text with both values."""
    found = []
    if listed.devices != again.devices:
        found.append(f"device ({_names(listed.devices)}; now {_names(again.devices)})")
    for kind, one, other, missing in (
        ("versions", listed.versions, again.versions, "none"),
        ("weights", listed.weights, again.weights, "none"),
        ("settings", listed.settings, again.settings, "default"),
    ):
        changed = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
        if changed:
            texts = [f"{name} {_text(one, name, missing)}; now {_text(other, name, missing)}" for name in changed]
            found.append(f"{kind} ({', '.join(texts)})")
    return tuple(found)


def gpus_used(tasks: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the numbers of GPUs of each task with bytes that depend on them, in order, as the manifest lists them;
    None if they are not known."""
    listed = [task for task in tasks if isinstance(task, Mapping)] if isinstance(tasks, Sequence) else []
    found = tuple([tuple(gpus) for task in listed if isinstance(gpus := task.get("gpus"), Sequence) and gpus])
    are_known = all(type(number) is int and number > 0 for each in found for number in each)
    return found if found and are_known else None


def repeated_gpus(recipe: Recipe, tasks: Any) -> int | None:
    """Return the number of GPUs with which a request repeats an output of this recipe and these tasks; None if the
    request leaves it to the scheduler."""
    numbers = {number for each in gpus_used(tasks) or () for number in each} if recipe.gpus == AUTO else set()
    (number,) = numbers if len(numbers) == 1 else (1,)
    return number if number > 1 else None  # 1 in a request is another computation: all texts in one call


def left_open(recipe: Recipe, tasks: Any, again: Any) -> tuple[str, ...]:
    """Return what the scheduler chose otherwise when an output with this recipe and these tasks was generated again by
    the tasks `again`, as text."""
    if recipe.gpus != AUTO:
        return ()
    listed, now = gpus_used(tasks), gpus_used(again)
    if listed is None:
        return ("numbers of GPUs, perhaps, which the scheduler chooses",)
    return () if listed == now else (f"numbers of GPUs ({_counts(listed)}; now {_counts(now or ())})",)


def _counts(used: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(" then ".join(map(str, each)) for each in used) or "unknown"


def compare(
    listed_sha256: str,
    again_sha256: str,
    read_listed: Callable[[], PixelArray | FloatArray],
    again: PixelArray | FloatArray,
    differs: tuple[str, ...],
    is_lossless: bool,
) -> Comparison:
    """Compare an output with the one that was generated again; the hashes are of the pixels as generated, and
    `read_listed` reads the pixels of its file if they are needed.

    Where nothing `differs` and the hash is known, only equal bytes will do; otherwise, and for what a file does not
    keep exactly, the tolerance decides.
    """
    if listed_sha256 == again_sha256:
        return Comparison(Agreement.EQUAL, differs)
    listed = read_listed()
    if listed.shape != again.shape:
        return Comparison(Agreement.DIFFERENT, (*differs, f"size ({listed.shape}; now {again.shape})"), 1.0, 1.0)
    scale = 255.0 if again.dtype == np.uint8 else 2.0
    distance = np.abs(listed.astype(np.float32) - again.astype(np.float32)) / scale
    mean, far = float(distance.mean()), float((distance > FAR).mean())
    must_be_equal = not differs and (is_lossless or bool(listed_sha256))
    is_near = mean <= MOST_MEAN and far <= MOST_FAR
    agreement = Agreement.WITHIN_TOLERANCE if is_near and not must_be_equal else Agreement.DIFFERENT
    return Comparison(agreement, differs, mean, far)


def _names(devices: frozenset[str]) -> str:
    return ", ".join(sorted(devices)) or "not listed"


def _text(values: Mapping[str, str], name: str, missing: str) -> str:
    """Return a value for messages: of a hash its first digits."""
    value = values.get(name, missing)
    return value[:10] if len(value) == _SHA256_DIGITS else value
