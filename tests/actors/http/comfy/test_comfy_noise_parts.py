"""Parts of noise levels, leftover noise and disabled noise become the steps of runs that ComfyUI's nodes mean."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.request.workflow_fields import SampleNode
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.each_case import each_case

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [])
#: first and last step, whether noise is added, and whether it stays
Run = tuple[int, int, bool, bool]


def runs(graph: Graph) -> list[Run]:
    """The sampling runs that the output depends on, in order."""
    (output,) = outputs_of(graph, NAMES)
    (request,) = requests_of(output, NAMES, lambda name: pytest.fail("no image is read"))
    if request.workflow is None:
        return [(0, 0, True, False)]
    nodes = [each for _, each in request.workflow.in_order if isinstance(each, SampleNode)]
    return [(each.first_step, each.last_step, each.adds_noise, each.keeps_noise) for each in nodes]


def sampler(sigmas: list[Any], latent: list[Any], noise: str) -> dict[str, Any]:
    parts = {"noise": [noise, 0], "guider": ["guider", 0], "sampler": ["chosen", 0]}
    return node("SamplerCustomAdvanced", **parts, sigmas=sigmas, latent_image=latent)


def split(*, step: int, steps: int = 8, denoise: float = 1.0, **more: Any) -> Graph:
    """Two samplers, with the levels before and from a step; `more` are further nodes, or others."""
    graph = basic()
    graph["guider"] = node("CFGGuider", model=["model", 0], positive=["positive", 0], negative=["negative", 0], cfg=4.0)
    graph["chosen"] = node("KSamplerSelect", sampler_name="euler")
    graph["noise"], graph["none"] = node("RandomNoise", noise_seed=5), node("DisableNoise")
    graph["levels"] = node("BasicScheduler", model=["model", 0], scheduler="normal", steps=steps, denoise=denoise)
    graph["split"] = node("SplitSigmas", sigmas=["levels", 0], step=step)
    graph["first"] = sampler(["split", 0], ["blank", 0], "noise")
    graph["sampler"] = sampler(["split", 1], ["first", 0], "none")
    return graph | more


FIRST = {"decoded": node("VAEDecode", samples=["first", 0], vae=["model", 2])}
CLEAN = {"decoded": node("VAEDecode", samples=["first", 1], vae=["model", 2])}
SHARE = {"split": node("SplitSigmasDenoise", sigmas=["levels", 0], denoise=0.25)}
#: the first part is split once more, and both of its parts are run
NESTED = {
    "again": node("SplitSigmas", sigmas=["split", 0], step=2),
    "before": sampler(["again", 0], ["blank", 0], "noise"),
    "first": sampler(["again", 1], ["before", 0], "none"),
}
EMPTY_MIDDLE = NESTED | {"again": node("SplitSigmas", sigmas=["split", 0], step=6)}


@each_case(
    ("graph", "expected"),
    [
        (split(step=3), [(0, 3, True, True), (3, 0, False, False)]),
        (split(step=3, denoise=0.5), [(8, 11, True, True), (11, 0, False, False)]),
        (split(step=0, **SHARE), [(0, 6, True, True), (6, 0, False, False)]),
        (split(step=6, **NESTED), [(0, 2, True, True), (2, 6, False, True), (6, 0, False, False)]),
        # levels without a step change nothing, whichever sampler has them
        (split(step=8), [(0, 0, True, False)]),
        (split(step=100), [(0, 0, True, False)]),
        (split(step=6, **EMPTY_MIDDLE), [(0, 6, True, True), (6, 0, False, False)]),
        # the second output has no noise, though the levels end above 0
        (split(step=3, **FIRST), [(0, 3, True, True)]),
        (split(step=3, **CLEAN), [(0, 3, True, False)]),
    ],
)
def test_parts_of_noise_levels_are_parts_of_a_run(graph: Graph, expected: list[Run]) -> None:
    assert runs(graph) == expected


def advanced(latent: list[Any], **settings: Any) -> dict[str, Any]:
    usual = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    found = basic()["sampler"]["inputs"] | {"noise_seed": 5, "latent_image": latent} | usual | settings
    return node("KSamplerAdvanced", **{name: value for name, value in found.items() if name not in ("seed", "denoise")})


CONTINUED = {"add_noise": "disable", "start_at_step": 5}


@each_case(
    ("first", "second", "expected"),
    [
        # another sampler continues: two runs
        ({"end_at_step": 5, "return_with_leftover_noise": "enable"}, {**CONTINUED, "sampler_name": "dpmpp_2m"},
         [(0, 5, True, True), (5, 0, False, False)]),
        # all noise is removed at step 5, and new noise is added: not one run
        ({"end_at_step": 5}, {"start_at_step": 5}, [(0, 5, True, False), (5, 0, True, False)]),
        ({"end_at_step": 5}, CONTINUED, [(0, 5, True, False), (5, 0, False, False)]),
        # the steps between are left out, as ComfyUI does
        ({"end_at_step": 3, "return_with_leftover_noise": "enable"}, CONTINUED,
         [(0, 3, True, True), (5, 0, False, False)]),
        ({}, {"add_noise": "disable", "start_at_step": 8}, [(0, 0, True, False)]),
    ],
)  # fmt: skip
def test_leftover_noise_is_continued(first: dict[str, Any], second: dict[str, Any], expected: list[Run]) -> None:
    graph = basic() | {"first": advanced(["blank", 0], **first), "sampler": advanced(["first", 0], **second)}
    assert runs(graph) == expected
