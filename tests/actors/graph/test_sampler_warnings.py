"""Samplers that the measurements of benchmarks/RESULTS.md found to render wrong images of flows are warned of."""

from __future__ import annotations

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.schedule_guidance import sampler_warnings
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.sampling.names import NOT_FOR_FLOWS, SAMPLERS
from modelpool.pool.specs.spec import JobId
from tests.actors.fakes import PAIR, SAMPLING, FakeCatalog


def warnings_of(model: str, sampler: str) -> tuple[str, ...]:
    request = GenerateRequest(model=model, prompt="p", seed=1, sampler=sampler)
    return build_graph(request, JobId("job"), FakeCatalog())[1].warnings


def test_samplers_that_do_not_suit_flows_are_warned_of() -> None:
    (warning,) = warnings_of(PAIR, "dpmpp_2m_cfg_pp")
    assert warning == (
        "sampler DPM++ 2M CFG++: model 'pair' predicts a flow, with which this sampler often renders wrong images; "
        "Euler CFG++ suits it"
    )
    assert warnings_of(PAIR, "euler_cfg_pp") == ()
    assert warnings_of("shapes", "dpmpp_2m_cfg_pp") == ()
    for name in SAMPLERS:
        request = GenerateRequest(model=PAIR, prompt="p", sampler=name)
        assert len(list(sampler_warnings(request, SAMPLING[PAIR]))) == (name in NOT_FOR_FLOWS), name
