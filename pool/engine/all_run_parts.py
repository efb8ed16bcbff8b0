"""The features that act in a sampling run, in the order in which they change it."""

from __future__ import annotations

from modelpool.pool.inference.conditioning.first_frame import first_frame_part
from modelpool.pool.inference.conditioning.guides import guides_part
from modelpool.pool.inference.conditioning.image_concat import image_inputs_part
from modelpool.pool.inference.conditioning.run_parts import PreparePart
from modelpool.pool.inference.controlnets.controlnet_run import controlnets_part
from modelpool.pool.inference.controlnets.gligen_run import gligen_part
from modelpool.pool.inference.extensions.run_extension import run_options_part
from modelpool.pool.inference.extensions.voice_guidance import voice_part
from modelpool.pool.inference.guidance.call_model import step_levels_part
from modelpool.pool.inference.guidance.prepared_prompts import learned_negative_part, prepared_prompts_part
from modelpool.pool.inference.guidance.sampling_run import partial_run_part
from modelpool.pool.inference.guidance.sound_track_run import sound_track_part
from modelpool.pool.inference.guidance.text_loras import changing_loras_part
from modelpool.pool.inference.image_prompts.prompt_run import image_prompts_part

#: A new feature is its module and a row here: behind the parts that it reads the changes of. ControlNets read the
#: prompt as everything above them leaves it, and are called with the patches and levels of the step; the model prepares
#: its prompts last
RUN_PARTS: tuple[PreparePart, ...] = (
    partial_run_part,
    image_inputs_part,
    first_frame_part,
    guides_part,
    learned_negative_part,
    image_prompts_part,
    gligen_part,
    changing_loras_part,
    step_levels_part,
    controlnets_part,
    run_options_part,
    voice_part,
    sound_track_part,
    prepared_prompts_part,
)
