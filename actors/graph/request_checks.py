"""Checks that a model supports all fields of a request: all checks that depend on the model, in one place.

Pure. Each module of this folder implements the checks of its fields.
"""

from __future__ import annotations

from modelpool.actors.graph.features.control_video_graph import check_video
from modelpool.actors.graph.features.decoder_graph import check_decoder
from modelpool.actors.graph.features.expert_graph import check_low_noise
from modelpool.actors.graph.features.image_concat_graph import check_image_concat
from modelpool.actors.graph.features.music_graph import check_music
from modelpool.actors.graph.features.option_checks import check_options
from modelpool.actors.graph.features.reference_graph import check_references
from modelpool.actors.graph.features.schedule_guidance import check_shift
from modelpool.actors.graph.features.upscale_graph import check_upscale
from modelpool.actors.graph.features.video_output_graph import check_video_output
from modelpool.actors.graph.features.vision_graph import check_video_numbers
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import SamplingFacts


def check_request(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UserError naming the field for a field that models of `facts` do not support."""
    check_video_output(request, facts)
    check_video(request, facts)
    check_video_numbers(request, facts)
    check_image_concat(request, facts)
    check_references(request, facts)
    check_decoder(request, facts)
    check_low_noise(request, facts)
    check_upscale(request, facts)
    check_options(request, facts)
    check_shift(request, facts)
    check_music(request, facts)
