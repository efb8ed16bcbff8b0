"""A run of a usual size of each component of a model, whose share of work by module is much as that of any run.

Planning which weights stay on a device looks at it; nothing runs it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from modelpool.pool.core.stage_params import DecodeWork, EncodeWork, SampleWork, SeeImageWork, Work
from modelpool.pool.estimates.activation_estimator import empty_told_of
from modelpool.pool.estimates.stage_peak_bytes import stage_call
from modelpool.pool.families.cascade_families import prior_cells
from modelpool.pool.families.control_video_form import follows_video
from modelpool.pool.loading.describe import native_size
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.specs.spec import Role

#: cells of time of a video after the first; more share their work between modules as these do
_CELLS = 2


def usual_work(opened: OpenModel, role: Role) -> Work:
    """What a run of the component `role` does."""
    model, checkpoint = opened.ref, opened.checkpoint
    width, height = native_size(checkpoint.family, checkpoint.header)
    facts = checkpoint.family.sampling
    video, audio = facts.video, facts.audio
    frames, rate = (0, 0.0) if video is None else (1 + _CELLS * video.multiple, video.rate)
    seconds = 0.0 if audio is None else audio.seconds
    match role:
        case Role.TEXT_ENCODER | Role.TEXT_ENCODER_2 | Role.TEXT_ENCODER_3 | Role.TEXT_ENCODER_4:
            return EncodeWork(model, (), "")
        case Role.VISION_ENCODER:
            return SeeImageWork(model, 1, *((0, 0) if facts.text_sight is None else (width, height)))
        case Role.DIFFUSION_MODEL | Role.DIFFUSION_MODEL_2:
            imaged = video is not None and video.begins is not None and video.begins.is_always_there
            return SampleWork(
                model, (), width, height, 1, 5.0, "euler", "normal", 0, frames, rate, seconds=seconds,
                imaged=imaged, prior=prior_cells(width, height) if facts.reads_prior else None,
                low_noise=role is Role.DIFFUSION_MODEL_2, follows=follows_video(facts),
                leading=0 if video is None else video.leading,
            )  # fmt: skip
        case Role.VAE:
            return DecodeWork(model, width, height, frames=frames, frame_rate=rate, seconds=seconds)
        case _:
            raise AssertionError(f"no work is made of a {role.value} alone")


def usual_call(opened: OpenModel, role: Role) -> Callable[[nn.Module], object]:
    """A call of the component's module as `usual_work` has it, with inputs on the meta device, for dry runs."""
    dtype, facts = opened.component(role).form.compute_dtype, opened.checkpoint.family.sampling
    return stage_call(usual_work(opened, role), dtype, opened.latent, facts, told=empty_told_of(opened))
