"""Short form of trace lines, for manual writing: models by a few numbers, and jobs with model, LoRAs and steps."""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.specs.spec import ComponentSpec, JobSpec
from modelpool.scheduler.simulator.workloads.fields import MOST_SECONDS, MOST_STEPS, Fields
from modelpool.scheduler.simulator.workloads.models import InventedModel

#: defaults of a model
DEFAULTS = InventedModel("usual")
#: maximum step time that a ControlNet adds, as a multiple of the step
MOST_SHARE = 1000.0


def model_of(fields: Fields) -> InventedModel:
    """The model of a line {"model": "sdxl", "diffusion_bytes": 5140000000, "step_seconds": 0.1, ...}."""
    return InventedModel(
        name=_plain(fields, "model", fields.text("model"), "+/"),
        text_encoder_bytes=fields.whole("text_encoder_bytes", 1, DEFAULTS.text_encoder_bytes),
        diffusion_bytes=fields.whole("diffusion_bytes", 1, DEFAULTS.diffusion_bytes),
        vae_bytes=fields.whole("vae_bytes", 1, DEFAULTS.vae_bytes),
        activation_bytes=fields.whole("activation_bytes", 0, DEFAULTS.activation_bytes),
        scratch_bytes=fields.whole("scratch_bytes", 0, DEFAULTS.scratch_bytes),
        encode_seconds=fields.number("encode_seconds", 0.0, DEFAULTS.encode_seconds, MOST_SECONDS),
        step_seconds=fields.number("step_seconds", 0.0, DEFAULTS.step_seconds, MOST_SECONDS),
        decode_seconds=fields.number("decode_seconds", 0.0, DEFAULTS.decode_seconds, MOST_SECONDS),
        lora_bytes=fields.whole("lora_bytes", 1, DEFAULTS.lora_bytes),
        controlnet_bytes=fields.whole("controlnet_bytes", 1, DEFAULTS.controlnet_bytes),
        patched_share=fields.number("patched_share", 0.0, DEFAULTS.patched_share, most=1.0),
        loras_reach_text=fields.truth("loras_reach_text", DEFAULTS.loras_reach_text),
        controlnet_step_share=fields.number(
            "controlnet_step_share", 0.0, DEFAULTS.controlnet_step_share, most=MOST_SHARE
        ),
    )


def short_job(
    number: int, fields: Fields, models: Mapping[str, InventedModel], at: float
) -> tuple[JobSpec, tuple[ComponentSpec, ...]]:
    """Return the job of line `number`, and the components of its LoRAs and ControlNets. Its deadline counts from `at`.

    Name, prompt and seed of the job default to values from the line number, so that no two lines request the same image
    unless they say so.
    """
    name = fields.text("model")
    if name not in models:
        raise unknown_name(f"model on line {number}", name, models)
    within_seconds = fields.number_or_none("deadline", 0.0, MOST_SECONDS)
    loras, controlnets = (_adapters(fields, field) for field in ("loras", "controlnets"))
    job = models[name].job(
        fields.text("job") if "job" in fields else f"job-{number}",
        fields.text("prompt", f"prompt {number}"),
        fields.whole("seed", 0, number),
        loras=loras,
        controlnets=controlnets,
        steps=fields.whole("steps", 1, 20, MOST_STEPS),
        priority=fields.whole("priority", -(2**31), 0, 2**31),
        user=fields.text("user", ""),
        deadline=None if within_seconds is None else at + within_seconds,
        batch=fields.text("batch", ""),
    )
    longest_seconds = max(task.run_seconds for task in job.tasks)
    if longest_seconds > MOST_SECONDS:
        raise fields.problem("steps", longest_seconds, f"steps that take at most {MOST_SECONDS:g} seconds in all")
    return job, models[name].adapters(loras, controlnets)


def _adapters(fields: Fields, name: str) -> tuple[str, ...]:
    found = tuple(_plain(fields, name, text) for text in fields.texts(name))
    if len(set(found)) < len(found):
        raise fields.problem(name, ", ".join(found), "each name once")
    return found


def _plain(fields: Fields, name: str, found: str, apart: str = "+") -> str:
    """`found`, if it is unambiguous in the names of tasks, patch sets and components."""
    if any(letter.isspace() or letter in apart for letter in found):
        raise fields.problem(name, found, f"a name without blanks and without any of {apart}")
    return found
