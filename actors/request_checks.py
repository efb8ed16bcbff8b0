"""Whether a model can be asked for what a request asks for: all checks that need to know the model, in one place.

Pure. What each field means with which model is the business of the modules that cut it.
"""

from __future__ import annotations

from actors.decoder_cut import check_decoder
from actors.film_cut import check_film
from actors.pair_cut import check_low_noise
from actors.reference_cut import check_references
from actors.requests import GenerateRequest
from actors.seen_cut import check_film_numbers
from actors.shown_cut import check_shown
from actors.video_cut import check_video
from pool.checkpoints.sampling_facts import SamplingFacts


def check_request(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UserError naming the field for what no model of `facts` can be asked for."""
    check_film(request, facts)
    check_video(request, facts)
    check_film_numbers(request, facts)
    check_shown(request, facts)
    check_references(request, facts)
    check_decoder(request, facts)
    check_low_noise(request, facts)
