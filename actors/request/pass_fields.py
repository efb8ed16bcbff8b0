"""`Pass`: a sampling run after the first one of a request: a refiner, or a part of the schedule on an enlarged image.

A request with passes is a workflow (`actors.graph.pass_workflow`). Torch-free, ray-free.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from modelpool.actors.request.bounds import MAX_LORAS, MAX_NAME_CHARACTERS, MAX_PROMPT_CHARACTERS, check_entries
from modelpool.actors.request.bounds import check_characters as check_text
from modelpool.actors.request.image_fields import checked_strength
from modelpool.actors.request.lora_fields import LoraChoice, parse_loras
from modelpool.actors.request.number_fields import CFG, STEPS
from modelpool.actors.request.pass_bounds import MAX_PASSES
from modelpool.actors.request.run_option_fields import parse_run_options
from modelpool.actors.request.strict import Strict
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.core.run_options import RunOptions

#: denoising strength of a pass that sets none
DEFAULT_PASS_STRENGTH = 0.5
_Name = Annotated[str | None, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class Pass(Strict):
    """A sampling run on the result of the run before it. What it leaves out is as in the request.

    model, loras, prompt, negative, steps, cfg, sampler, schedule, shift, options, seed  as in a request; a pass with
                a model of its own has no LoRAs, options, shift, ControlNets, image prompts and reference images of the
                request
    strength    denoising strength: the fraction of the schedule that it runs, at its end; default: 0.5
    start_step  instead: the run before it stops before this step, from 0, with its noise, and the pass continues (a
                refiner). Both have the same noise levels, and latents of the same kind
    scale       factor of both sides of the image before the run
    width, height  instead: the size before the run
    via         what is scaled: the "latent", or the decoded "image". Default: the image with an upscaler, or with
                another model; else the latent
    upscaler    name of the upscaler that enlarges the decoded image; without one, it is scaled bilinearly
    """

    model: _Name = None
    loras: tuple[LoraChoice, ...] | None = None
    prompt: str | None = None
    negative: str | None = None
    steps: int | None = None
    cfg: float | None = None
    sampler: _Name = None
    schedule: _Name = None
    shift: Annotated[float | None, Field(ge=0.01, le=100)] = None
    options: RunOptions | None = None
    seed: Annotated[int | None, Field(ge=0, lt=2**64)] = None
    strength: float | None = None
    start_step: Annotated[int | None, Field(ge=1, le=MAX_STEPS)] = None
    scale: Annotated[float | None, Field(ge=0.1, le=8)] = None
    width: Annotated[int | None, Field(ge=8, le=16384)] = None
    height: Annotated[int | None, Field(ge=8, le=16384)] = None
    via: Literal["latent", "image"] | None = None
    upscaler: _Name = None

    @field_validator("loras", mode="before")
    @classmethod
    def _loras(cls, value: Any) -> Any:
        check_entries("passes.loras", value, MAX_LORAS)
        return None if value is None else parse_loras(value)

    @field_validator("prompt", "negative")
    @classmethod
    def _text(cls, value: str | None, info: Any) -> str | None:
        if value is not None:
            check_text(f"passes.{info.field_name}", value, MAX_PROMPT_CHARACTERS)
        return value

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> int | None:
        return None if value is None else STEPS.parse("passes.steps", value)

    @field_validator("cfg", mode="before")
    @classmethod
    def _cfg(cls, value: Any) -> float | None:
        return None if value is None else CFG.parse("passes.cfg", value)

    @field_validator("options", mode="before")
    @classmethod
    def _options(cls, value: Any) -> RunOptions | None:
        return parse_run_options(value)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float | None) -> float | None:
        return None if value is None else checked_strength("passes.strength", value)

    @model_validator(mode="after")
    def _fitting(self) -> Pass:
        if (self.width is None) != (self.height is None):
            raise UnusableField("passes.width, passes.height: expected both, or neither")
        if self.scale is not None and self.width is not None:
            raise unusable_field("passes.scale", self.scale, "a scale, or width and height, not both")
        if self.upscaler is not None and self.via == "latent":
            raise unusable_field("passes.via", self.via, "'image': an upscaler reads the decoded image")
        if self.start_step is not None:
            other = ("strength", "steps", "scale", "width", "upscaler", "schedule", "shift", "seed")
            if found := [name for name in other if getattr(self, name) is not None]:
                raise unusable_field("passes.start_step", self.start_step, f"it without {', '.join(found)}")
            if self.via == "image":
                raise unusable_field("passes.via", "image", "none with start_step: the noise stays in the latent")
        return self


def checked_passes(value: Any) -> Any:
    """Check the number of passes, which may be one alone. Raises UserError."""
    if value is not None and not isinstance(value, list | tuple):
        value = (value,)
    check_entries("passes", value, MAX_PASSES)
    return value
