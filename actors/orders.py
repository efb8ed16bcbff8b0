"""What a driver wants made, as a tree: a picture is a latent decoded, a latent is a text sampled.

A tree carries everything that its result depends on, so that a stage can be asked for before its input is made, and so
that an input which nobody holds any more is made again. Names are as the driver gave them; `actors.cut` resolves them.
Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from actors.requests import GenerateRequest, LoraChoice
from pool.spec import TaskId


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """Encode one text."""

    model: str
    loras: tuple[LoraChoice, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Denoise one latent. `negative` is None exactly when `cfg` is 1. Sizes left out are the model's own."""

    positive: EncodeOrder
    negative: EncodeOrder | None
    model: str
    loras: tuple[LoraChoice, ...]
    steps: int
    cfg: float
    sampler: str
    schedule: str | None
    width: int | None
    height: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class GivenLatent:
    """A latent that the driver brings itself, under an id of its own making. Sizes are of the picture."""

    task_id: TaskId
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Decode one latent."""

    latent: SampleOrder | GivenLatent
    model: str


Order: TypeAlias = EncodeOrder | SampleOrder | DecodeOrder


def order_for(request: GenerateRequest) -> DecodeOrder:
    """The tree of `request`, whose seed must be set. LoRAs of strength 0 change nothing and are left out."""
    assert request.seed is not None, "the client draws missing seeds"
    loras = tuple(lora for lora in request.loras if lora.strength != 0)
    negative = EncodeOrder(request.model, loras, request.negative) if request.cfg != 1 else None
    sample = SampleOrder(
        positive=EncodeOrder(request.model, loras, request.prompt),
        negative=negative,
        model=request.model,
        loras=loras,
        steps=request.steps,
        cfg=request.cfg,
        sampler=request.sampler,
        schedule=request.schedule,
        width=request.width,
        height=request.height,
        seed=request.seed,
    )
    return DecodeOrder(sample, request.model)
