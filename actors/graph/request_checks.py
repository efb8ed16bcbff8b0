"""Checks that a model supports all fields of a request: all checks that depend on the model, in one place. Pure."""

from __future__ import annotations

from modelpool.actors.graph.all_features import FEATURES
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import SamplingFacts


def check_request(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UserError naming the field for a field that models of `facts` do not support."""
    for feature in FEATURES:
        feature.check(request, facts)
