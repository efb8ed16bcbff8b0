"""What one task asks of one GPU, and what it gives back.

Values only; torch-free (numpy arrays carry results between processes). A `Work` names files and numbers, never tensors,
so that its digest names its result: equal work is run once.

Shape legend: L tokens, D text width, V width of a pooled text, C latent channels, H W latent or pixel height and width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pool.spec import ComponentKey, Role, RunCost, Stage, TaskId, TaskSpec

FloatArray: TypeAlias = npt.NDArray[np.float32]
PixelArray: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A checkpoint file. `sha256` is of the whole file, in hexadecimal; it, not the path, is the identity."""

    name: str
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class LoraRef:
    """A LoRA file and how strongly it is applied."""

    name: str
    path: str
    sha256: str
    strength: float


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode one text, prompt weights and all. Result: `Encoded`. Reads nothing."""

    model: ModelRef
    #: only those LoRAs that touch the text encoder, so that the others share the result
    loras: tuple[LoraRef, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Denoise one picture's latent. Result: `Latent`. Reads `Encoded` of the prompt, then of the negative prompt unless
    `cfg` is 1."""

    model: ModelRef
    #: only those LoRAs that touch the diffusion model
    loras: tuple[LoraRef, ...]
    width: int
    height: int
    steps: int
    cfg: float
    sampler: str
    schedule: str
    seed: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Turn a latent into pixels. Result: `Picture`. Reads `Latent`, which has the size of the picture."""

    model: ModelRef
    width: int
    height: int


Work: TypeAlias = EncodeWork | SampleWork | DecodeWork


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as the diffusion model reads it. `pooled_V` is all of it in one vector, for models that are told that."""

    context_LD: FloatArray
    pooled_V: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Latent:
    """A denoised latent in the model's own scale (what the VAE reads after un-scaling)."""

    samples_CHW: FloatArray


@dataclass(frozen=True, slots=True)
class Picture:
    """RGB pixels, 0 to 255."""

    pixels_HWC: PixelArray


Result: TypeAlias = Encoded | Latent | Picture


@dataclass(frozen=True, slots=True)
class RunHooks:
    """How a run talks back while it goes on.

    on_step      called after each step with (steps done, steps in all)
    should_stop  asked at each step and tile, and every few milliseconds at layers; True ends the run with `Stopped`.
                 Called in the run's thread, so it must be quick
    """

    on_step: Callable[[int, int], None]
    should_stop: Callable[[], bool]


class Stopped(Exception):
    """A run ended at a step, tile or layer because it was asked to."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of several tasks that are run together: what a run of it alone would be given."""

    task: TaskSpec
    work: Work
    inputs: tuple[Result, ...]
    hooks: RunHooks


#: what a member comes to: a result with its share of the cost, or why there is none
Outcome: TypeAlias = tuple[Result, RunCost] | Exception


def role_of(work: Work) -> Role:
    """The component that `work` runs; of several text encoders the first."""
    match work:
        case EncodeWork():
            return Role.TEXT_ENCODER
        case SampleWork():
            return Role.DIFFUSION_MODEL
        case DecodeWork():
            return Role.VAE


_TEXT_ENCODERS = tuple(role for role in Role if role.is_text_encoder)


def roles_of(work: Work, count: int) -> tuple[Role, ...]:
    """The components that `work` runs, so many of them: text encoders in the order in which their texts follow each
    other."""
    return _TEXT_ENCODERS[:count] if isinstance(work, EncodeWork) else (role_of(work),)


def lora_key(lora: LoraRef) -> ComponentKey:
    """A LoRA's name as a component, whatever its strength."""
    return ComponentKey(f"{lora.name}/lora@{lora.sha256[:10]}")


def stage_of(work: Work) -> Stage:
    """The stage that `work` belongs to."""
    match work:
        case EncodeWork():
            return Stage.ENCODE
        case SampleWork():
            return Stage.SAMPLE
        case DecodeWork():
            return Stage.DECODE


def together_key(work: Work, context_tokens: Sequence[int] = ()) -> str:
    """What works on the same weights must have in common to go through a module at once: all but texts and seeds.

    `context_tokens` are the lengths of the texts that sampling reads. The same as a `pool.spec.TaskSpec.together`.
    """
    match work:
        case EncodeWork():
            return "encode"
        case SampleWork():
            lengths = ",".join(str(length) for length in context_tokens)
            size = f"{work.width}x{work.height}"
            return f"sample {size} {work.steps} {work.cfg!r} {work.sampler} {work.schedule} {lengths}"
        case DecodeWork():
            return f"decode {work.width}x{work.height}"


def task_id(work: Work, needs: tuple[TaskId, ...]) -> TaskId:
    """A digest of all that the result depends on: the work (files by content, not by path or name) and its inputs."""
    content = {field.name: _without_places(getattr(work, field.name)) for field in dataclasses.fields(work)}
    text = json.dumps([type(work).__name__, content, needs], sort_keys=True, separators=(",", ":"))
    return TaskId(f"{stage_of(work).value}-{hashlib.sha256(text.encode()).hexdigest()[:20]}")


def _without_places(value: Any) -> Any:
    """A field of some work with the paths and names of files left out: a renamed copy of a file is the same file.

    Written out for the two kinds of file: this is done for every task that is asked for, and `dataclasses.asdict` of
    all of it takes three times as long."""
    if isinstance(value, ModelRef):
        return {"sha256": value.sha256}
    if isinstance(value, LoraRef):
        return {"sha256": value.sha256, "strength": value.strength}
    if isinstance(value, tuple):
        return [_without_places(v) for v in value]
    return value
