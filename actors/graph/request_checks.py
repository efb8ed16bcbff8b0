"""Whether a model can be asked for what a request asks for: all checks that need to know the model, in one place.

Pure. What each field means with which model is the business of the modules that cut it.
"""

from __future__ import annotations

from modelpool.actors.graph.control_video_cut import check_video
from modelpool.actors.graph.decoder_cut import check_decoder
from modelpool.actors.graph.expert_cut import check_low_noise
from modelpool.actors.graph.image_concat_cut import check_shown
from modelpool.actors.graph.reference_cut import check_references
from modelpool.actors.graph.video_output_cut import check_video_output
from modelpool.actors.graph.vision_cut import check_video_numbers
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.sampling_facts import SamplingFacts


def check_request(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UserError naming the field for what no model of `facts` can be asked for."""
    check_video_output(request, facts)
    check_video(request, facts)
    check_video_numbers(request, facts)
    check_shown(request, facts)
    check_references(request, facts)
    check_decoder(request, facts)
    check_low_noise(request, facts)
