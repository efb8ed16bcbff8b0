"""Samplers that the measurements of benchmarks/RESULTS.md found to render wrong images of flows are warned of."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.schedule_guidance import sampler_warnings
from modelpool.actors.http.a1111.a1111_parameters import fields_of_parameters
from modelpool.actors.outputs.image_file import parameters_text, parse_parameters
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.sampling.sampler_names import NOT_FOR_FLOWS, OWN_STEPS, SAMPLERS, SCHEDULES
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, SamplingFacts, VideoFacts
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import PAIR, SAMPLING, FakeCatalog


def warnings_of(model: str, sampler: str, **fields: Any) -> tuple[str, ...]:
    request = GenerateRequest(model=model, prompt="p", seed=1, sampler=sampler, **fields)
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


@pytest.mark.parametrize(
    ("sampler", "fields", "warning"),
    [
        ("euler", {"eta": 0.5}, "eta 0.5: sampler Euler does not read it: it draws no noise again"),
        ("lcm", {"eta": 0.0}, "eta 0: sampler LCM does not read it: it always draws the same share of noise"),
        (
            "dpmpp_2m",
            {"s_churn": 2},
            "s_churn 2: sampler DPM++ 2M does not read it, but DDIM, DPM2, Euler",
        ),
        ("ddim", {"s_noise": 0.9}, "s_noise 0.9: without eta, sampler DDIM draws no noise"),
        ("heun", {"s_noise": 0.9}, "s_noise 0.9: without s_churn, sampler Heun draws no noise"),
        ("uni_pc", {"s_noise": 0.9}, "s_noise 0.9: sampler UniPC draws no noise"),
        ("euler_a", {"s_noise": 0.9, "eta": 0.0}, "s_noise 0.9: without eta, sampler Euler a draws no noise"),
        ("euler", {"eta": 0.0}, ""),
        ("ddim", {"eta": 0.5, "s_noise": 0.9, "s_churn": 1}, ""),
        ("euler", {"s_churn": 2, "s_noise": 0.9}, ""),
        ("lcm", {"s_noise": 0.9}, ""),
    ],
)
def test_noise_fields_that_a_sampler_does_not_read_are_warned_of(
    sampler: str, fields: dict[str, Any], warning: str
) -> None:
    found = warnings_of("shapes", sampler, **fields)
    assert len(found) == bool(warning)
    assert "".join(found).startswith(warning)


def test_eta_of_ddim_has_the_key_of_a1111() -> None:
    """It writes "Eta DDIM" for DDIM, and "Eta" for samplers that add noise; both are read back."""
    for sampler, key in (("ddim", "Eta DDIM"), ("euler_ancestral", "Eta")):
        request = GenerateRequest(model="shapes", prompt="p", seed=1, sampler=sampler, eta=0.4)
        recipe, _ = build_graph(request, JobId("job"), FakeCatalog())
        read = parse_parameters(parameters_text(recipe))
        assert {name for name in read.values if name.startswith("Eta")} == {key}
        assert fields_of_parameters(read).fields["eta"] == 0.4
        assert not [note for note in fields_of_parameters(read).notes if "Eta" in note]


def test_listed_levels_are_refused_by_samplers_that_place_their_own() -> None:
    """A recipe with the list would claim levels that the run has not stepped through."""
    for sampler in SAMPLERS:
        fields: dict[str, Any] = {"sigmas": (14.0, 7.0, 1.0), "steps": 3}
        if sampler not in OWN_STEPS:
            assert not warnings_of("shapes", sampler, **fields)
            continue
        with pytest.raises(UnusableField, match=f"sampler: found '{sampler} with sigmas', expected a sampler that"):
            warnings_of("shapes", sampler, **fields)


def test_levels_published_for_stable_diffusion_are_warned_of_on_models_with_others() -> None:
    """Stable Video Diffusion has levels up to 700, the schedules' begin at 14.6."""
    svd = SamplingFacts(noise=NoiseFacts(NoiseKind.EDM, 0.002, 700.0), video=VideoFacts(14, 1, 7.0))
    for schedule in SCHEDULES:
        request = GenerateRequest(model="m", prompt="p", sampler="euler", schedule=schedule)
        assert len(list(sampler_warnings(request, svd))) == (schedule in ("gits", "ays_sd1", "ays_sdxl")), schedule
        assert not list(sampler_warnings(request, SamplingFacts()))
