"""Every kind of file that a task reads is named with the SHA-256 of its reference, so that each node can verify it."""

from __future__ import annotations

from dataclasses import replace

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.refs import ImagePromptRef
from modelpool.pool.values.core.stage_params import SampleParams, control_key, image_prompt_key
from modelpool.pool.values.specs.spec import ComponentUse, JobId, Stage
from tests.actors.fakes import UPSCALER, FakeCatalog, sha


def built(**fields: object) -> JobGraph:
    request = GenerateRequest.model_validate({"model": "shapes", "prompt": "p", "seed": 1, **fields})
    return build_graph(request, JobId("job"), FakeCatalog())[1]


def test_all_kinds_of_files_have_the_hash_of_their_reference() -> None:
    graph = built(prompt="a <worn> circle, embedding:worn", loras=["words", "light"], upscale=UPSCALER)
    found = {}
    for task in graph.job.tasks:
        work = graph.works[task.task_id]
        if isinstance(work, SampleParams):
            control = FakeCatalog.controls.find("canny", 1.0, 0.0, 1.0)
            prompt = ImagePromptRef("style", "/prompts/style.safetensors", sha("style"), 1.0)
            work = replace(work, conditions=(control, prompt))
            added = (ComponentUse(control_key(control), 1), ComponentUse(image_prompt_key(prompt), 1))
            task = replace(task, uses=(*task.uses, *added))
        files = task_files(task, work)
        assert set(files) == {key for use in task.uses for key in (use.component, *use.adapters)}
        found |= {part.path: part.sha256 for part in files.values()}
    assert found == {
        "/models/shapes.safetensors": sha("shapes"),
        "/loras/words.safetensors": sha("words"),
        "/loras/light.safetensors": sha("light"),
        "/worn.safetensors": sha("worn"),
        "/controls/canny.safetensors": sha("canny"),
        "/prompts/style.safetensors": sha("style"),
        f"/upscalers/{UPSCALER}.pth": sha(UPSCALER),
    }


def test_a_textual_inversion_is_a_file_of_the_texts_that_name_it() -> None:
    """A node with another one of that name encodes these texts wrongly, and no others."""
    plain, named = built(), built(prompt="p embedding:worn")
    uses = [
        [use.adapters for task in graph.job.tasks if task.stage is Stage.ENCODE for use in task.uses]
        for graph in (plain, named)
    ]
    assert all(not adapters for adapters in uses[0])
    (key,) = {key for adapters in uses[1] for key in adapters}
    assert key in {spec.key for spec in named.components}
