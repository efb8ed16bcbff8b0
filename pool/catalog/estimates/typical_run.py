"""A typical run of each component of a model, with shares of operations per module close to any run's.

Used to plan which weights stay on a device; never executed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from modelpool.pool.catalog.estimates.activation_estimator import empty_conditioning
from modelpool.pool.catalog.estimates.stage_peak_bytes import stage_call
from modelpool.pool.families.control_video_models import takes_control_video, takes_face_video
from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.families.parts.two_stages import prior_cells
from modelpool.pool.models.components.text.connectors import connected, empty_states
from modelpool.pool.models.loading.describe import native_size
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.stage_params import (
    ControlVideoCondition,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    FaceCondition,
    GuidanceParams,
    ImageCondition,
    ModelStageParams,
    OutputShape,
    PriorCondition,
    ReferenceCondition,
    SampleCondition,
    SampleParams,
    SamplingSchedule,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import Role

#: temporal cells of a video after the first; the share of operations does not change with more
_CELLS = 2


def typical_params(opened: OpenModel, role: Role) -> ModelStageParams:
    """Return the parameters of a typical run of the component `role`."""
    model, checkpoint = opened.ref, opened.checkpoint
    width, height = native_size(checkpoint.family, checkpoint.header)
    facts = checkpoint.family.sampling
    video, audio = facts.video, facts.audio
    frames, rate = (0, 0.0) if video is None else (1 + _CELLS * video.multiple, video.rate)
    seconds = 0.0 if audio is None else audio.seconds
    match role:
        case Role.TEXT_ENCODER | Role.TEXT_ENCODER_2 | Role.TEXT_ENCODER_3 | Role.TEXT_ENCODER_4:
            return EncodeParams(model, (), "")
        case Role.VISION_ENCODER:
            return VisionEncodeParams(model, 1, *((0, 0) if facts.reference_mode is None else (width, height)))
        case Role.DIFFUSION_MODEL | Role.DIFFUSION_MODEL_2:
            width, height, frames = opened.extent or (width, height, frames)
            imaged = video is not None and video.begins is not None and video.begins.is_required
            conditions: list[SampleCondition] = [
                *([ImageCondition()] if imaged else []),
                *([PriorCondition(*prior_cells(width, height))] if facts.is_decoder_stage else []),
                *([ControlVideoCondition()] if takes_control_video(facts) else []),
                *([FaceCondition()] if takes_face_video(facts) else []),
                *([ReferenceCondition(width, height)] if facts.needs_reference else []),
            ]
            leading = 1 if takes_face_video(facts) else 0 if video is None else video.leading
            shape = OutputShape(width, height, frames, rate, seconds, leading)
            schedule = SamplingSchedule(1, "euler", "normal", low_noise=role is Role.DIFFUSION_MODEL_2)
            return SampleParams(model, (), shape, schedule, GuidanceParams(5.0), 0, tuple(conditions))
        case Role.VAE if facts.is_prior_stage:  # an encoder alone
            side = opened.latent.encoded_side
            return EncodeImageParams(model, width // side * side, height // side * side)
        case Role.VAE:
            return DecodeParams(model, OutputShape(width, height, frames, rate, seconds))
        case _:
            raise AssertionError(f"a {role.value} has no stage of its own")


def typical_call(opened: OpenModel, role: Role) -> Callable[[nn.Module], object]:
    """Return a call of the component's module with the inputs of `typical_params` on the meta device, for dry runs."""
    dtype, facts = opened.component(role).form.compute_dtype, opened.checkpoint.family.sampling
    if opened.checkpoint.family.architectures[role] is Architecture.TEXT_CONNECTOR:
        tokens = opened.reading(role).reading.least_tokens
        return lambda module: connected(module, (empty_states(module, tokens),), dtype)
    return stage_call(typical_params(opened, role), dtype, opened.latent, facts, text_inputs=empty_conditioning(opened))
