"""`StageRequest` and `UpscaleRequest`: one stage, for a driver that composes stages itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.values.specs.spec import Stage, TaskId


@dataclass(frozen=True, slots=True)
class InputLatent:
    """A latent that the driver provides under its own task id. `cells` is its shape after the channels: height and
    width; for a video frames, height and width; for an audio clip its length."""

    task_id: TaskId
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A stage of `request`: its encoded prompt, its latent, or its decoded output. It contains all that its result
    depends on, so a stage can be requested before its inputs exist, and an evicted input can be computed again.

    positive, negative  their prompts are read as prompt and negative prompt; None: the prompts of `request` are
    vae_model           the model that decodes; "" is the model of `request`, or its decoder if it has two stages
    latent              decoded instead of one that is sampled
    """

    stage: Stage
    request: GenerateRequest
    positive: GenerateRequest | None = None
    negative: GenerateRequest | None = None
    vae_model: str = ""
    latent: InputLatent | None = None

    @property
    def positive_request(self) -> GenerateRequest:
        """The request with the text, model and LoRAs of the prompt."""
        return self.positive or self.request

    @property
    def negative_prompt(self) -> str:
        """The negative prompt."""
        return self.request.negative if self.negative is None else self.negative.prompt


@dataclass(frozen=True, slots=True)
class UpscaleRequest:
    """An image that the driver provides is enlarged."""

    image: InputImage
    upscale: Upscale

    @property
    def stage(self) -> Stage:
        """Upscaling is a stage of the kind that makes pixels."""
        return Stage.DECODE


StageLike: TypeAlias = StageRequest | UpscaleRequest
