"""Warnings about texts that a request sets and no model reads."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.actors.cli.run.run_workflow import workflow_requests
from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.features.vision_graph import unread_text_warnings, with_unguided_warning
from modelpool.actors.http.comfy import comfy_workflow
from modelpool.actors.http.service.submissions import JobEnd, warnings_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import Guidance, SamplingDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ModelRef
from modelpool.pool.values.specs.spec import JobId, Stage
from modelpool.pool.values.specs.wire_value import evolve
from tests.actors.fakes import FakeCatalog
from tests.actors.http.comfy.comfy_examples import basic

POOL: Any = SimpleNamespace(
    models=lambda: [SimpleNamespace(name="shapes", family="Stable Diffusion 1", problem="")],
    loras=list,
    file_names=lambda: SimpleNamespace(nodes=()),
)


def _warnings(reads: tuple[str, ...], cfg: float, reads_negative: bool = True) -> list[str]:
    run: Any = SimpleNamespace(model=SimpleNamespace(name="m"), facts=SamplingFacts(reads=frozenset(reads)), cfg=cfg)
    return list(unread_text_warnings(run, "a cat", "a dog", reads_negative))


def test_a_negative_prompt_that_a_second_model_replaces_is_told() -> None:
    ignored = ["negative: ignored, model 'm' reads no negative prompt with these settings"]
    assert _warnings(("context", "unconditional"), 7.0) == ignored
    assert _warnings(("context",), 7.0) == []
    assert _warnings(("context",), 7.0, reads_negative=False) == ignored
    # without guidance, a negative prompt is a usual default that nobody misses
    assert _warnings(("context", "unconditional"), 1.0) == []


def _of_request(model: str = "shapes", **fields: Any) -> tuple[str, ...]:
    request = GenerateRequest(**{"model": model, "prompt": "a cat", "seed": 1, **fields})
    return build_graph(request, JobId("job"), FakeCatalog())[1].warnings


def test_a_negative_prompt_without_guidance_is_told() -> None:
    """Found in a review: with cfg 1, nothing said that a negative prompt has no effect."""
    told = ("negative: ignored without guidance: cfg is 1; with any other it is read",)
    assert _of_request(negative="a dog", cfg=1) == told
    assert _of_request(negative="a dog", cfg=1, passes=[{"strength": 0.5}]) == told
    assert _of_request(negative="a dog", cfg=1, passes=[{"strength": 0.5, "cfg": 3}]) == ()
    assert _of_request(negative="a dog", cfg=3) == ()
    assert _of_request(cfg=1) == _of_request(negative=" ", cfg=1) == ()
    assert _of_request(negative="a dog", cfg=1, sampler="euler_cfg_pp") == (), (
        "it reads the prediction without guidance"
    )
    stage = StageRequest(Stage.SAMPLE, GenerateRequest(model="shapes", prompt="a", negative="b", cfg=1, seed=1))
    assert build_stage_graph(stage, JobId("job"), FakeCatalog()).warnings == told


def test_the_usual_negative_prompt_of_a_model_is_no_text_of_a_user() -> None:
    """Wan has one, and is run without guidance where a LoRA makes it fast."""
    facts = SamplingFacts(
        defaults=SamplingDefaults(4, 5.0, "euler", "simple", Guidance.CLASSIFIER_FREE, negative="ugly")
    )
    _, graph = build_graph(GenerateRequest(model="shapes", prompt="a", seed=1, cfg=1), JobId("job"), FakeCatalog())
    model = ModelRef("m", "m.safetensors", "00")
    assert with_unguided_warning(graph, model, facts, "ugly").warnings == ()
    assert len(with_unguided_warning(graph, model, facts, "worn").warnings) == 1


def test_a_model_without_such_guidance_is_named() -> None:
    facts = SamplingFacts(defaults=SamplingDefaults(4, 1.0, "euler", "simple", Guidance.NONE))
    _, graph = build_graph(GenerateRequest(model="shapes", prompt="a", seed=1, cfg=1), JobId("job"), FakeCatalog())
    found = with_unguided_warning(graph, ModelRef("m", "m.safetensors", "00"), facts, "a dog")
    assert found.warnings == ("negative: ignored without guidance: model 'm' reads no negative prompt",)
    again = evolve(graph, warnings=("negative: ignored, model 'm' reads no negative prompt with these settings",))
    assert with_unguided_warning(again, ModelRef("m", "m.safetensors", "00"), facts, "a dog") == again, "told once"


def test_programs_with_one_negative_prompt_for_all_models_are_not_told() -> None:
    """A1111's clients and ComfyUI's workflows send it with cfg 1, too, and their own programs say nothing."""
    (told,) = _of_request(negative="a dog", cfg=1)
    ends = [JobEnd(0, 0, "done", facts={"warnings": [told, "another one"]})]
    assert warnings_of(ends) == ["another one", told]
    assert warnings_of(ends, tells_unguided=False) == ["another one"]


def test_a_workflow_of_comfyui_on_the_command_line_is_not_told() -> None:
    """Workflows for models without guidance have a negative text, as the nodes need one."""
    (told,) = _of_request(negative="a dog", cfg=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn(told, UserWarning, stacklevel=1)
        assert workflow_requests(basic(), Path("workflow.json"), POOL)
        warnings.warn(told, UserWarning, stacklevel=1)
    assert len(seen) == 1


def test_a_warning_of_a_workflow_is_told_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: each row hid the warning of negative prompts anew, upon which Python forgot the others."""
    read = comfy_workflow.outputs_of

    def told(*given: Any) -> Any:
        return [replace(output, warnings=("node 3: told",)) for output in read(*given)]

    monkeypatch.setattr(comfy_workflow, "outputs_of", told)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            assert workflow_requests(basic(), Path("workflow.json"), POOL)
    assert [str(each.message) for each in seen] == ["workflow.json: node 3: told"]
