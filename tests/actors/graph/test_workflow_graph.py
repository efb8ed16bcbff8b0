"""Workflows become tasks: equal parts are equal tasks, of requests too; what cannot be computed is refused by name, and
hostile graphs before they cost anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.workflow_graph import MAX_INTERMEDIATE_BYTES
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import MAX_DEPTH, MAX_NODES, MAX_WORKFLOW_STEPS
from modelpool.actors.request.workflow_inputs import inputs_of_texts, with_inputs
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import SampleParams, StepPart
from modelpool.pool.values.specs.spec import ExecutionMode, JobId, Stage, TaskId
from tests.actors.fakes import BEGINS, VIDEOS, FakeCatalog
from tests.each_case import each_case

CATALOG = FakeCatalog()
REQUEST = {"model": "shapes", "prompt": "p", "steps": 8, "width": 64, "height": 64}


def sampling(latent: str = "", **fields: Any) -> dict[str, Any]:
    size = {} if latent else {"width": 64, "height": 64}
    request = {"model": "shapes", "prompt": "p", "steps": 8, **size, **fields.pop("request", {})}
    inputs = {"latent": latent} if latent else {}
    return {"kind": "sample", "request": request, "inputs": inputs, **fields}


def operation(name: str, inputs: Mapping[str, str], **settings: Any) -> dict[str, Any]:
    return {"kind": "operation", "name": name, "settings": settings, "inputs": inputs}


BASE = {"s": sampling(), "d": {"kind": "decode", "model": "shapes", "inputs": {"latent": "s"}}}


def request_of(nodes: Mapping[str, Any], output: str = "d", **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"workflow": {"nodes": nodes, "output": output}, "seed": 3, **fields})


def tasks_of(request: GenerateRequest) -> dict[TaskId, Any]:
    return dict(build_graph(request, JobId("x"), CATALOG)[1].works)


def refused(nodes: Callable[[], Any], output: str = "d") -> str:
    """The message with which a workflow is refused."""
    with pytest.raises(UserError) as found:
        tasks_of(request_of(nodes(), output))
    return str(found.value)


def test_a_workflow_of_one_run_has_the_tasks_of_the_request() -> None:
    assert tasks_of(request_of(BASE)) == tasks_of(GenerateRequest(**REQUEST, seed=3))


def test_graphs_share_their_equal_parts() -> None:
    more = {**BASE, "s2": sampling("s", strength=0.5), "d": {**BASE["d"], "inputs": {"latent": "s2"}}}
    first, second = tasks_of(request_of(BASE)), tasks_of(request_of(more))
    assert len(first.keys() & second.keys()) == 3, "two texts and the first run"
    assert tasks_of(request_of({"other": BASE["s"], "d": {**BASE["d"], "inputs": {"latent": "other"}}})) == first


def test_passes_are_the_same_graph() -> None:
    """A refiner continues the noise levels of the run before it."""
    passes = [{"model": "forms", "start_step": 6}, {"scale": 2.0, "strength": 0.5, "prompt": "q"}]
    first, refiner, last = (
        work for work in tasks_of(GenerateRequest(**REQUEST, seed=3, passes=passes)).values()
        if isinstance(work, SampleParams)
    )  # fmt: skip
    assert (first.part, refiner.part) == (StepPart(6, keeps_noise=True), StepPart(adds_noise=False))
    assert (first.span, refiner.span, refiner.model.name) == ((0, 6), (6, 8), "forms")
    assert (last.span, last.shape.width, last.part, last.model.name) == ((4, 8), 128, None, "shapes")


def test_a_model_of_videos_begins_with_frames_and_without_a_mask() -> None:
    """Both were an internal error of the run."""
    image, mask = np.zeros((64, 64, 3), np.uint8), {"kind": "mask", "mask": np.full((64, 64), 255, np.uint8)}
    frames = {
        "i": {"kind": "image", "image": image},
        "v": operation("image_repeat", {"image": "i"}, amount=5),
        "e": {"kind": "encode", "model": VIDEOS, "inputs": {"image": "i"}},
        "d": {**BASE["d"], "model": VIDEOS},
    }
    run = sampling("e", request={"model": VIDEOS, "width": None, "height": None}, strength=0.5)

    def built(**more: Any) -> int:
        request, _ = InputImages(lambda result: result).bring(request_of({**frames, **more}))
        return len(tasks_of(request))

    with pytest.raises(
        UserError, match=r"^node s: latent: found 'node e, a latent of an image', expected one of frames"
    ):
        built(s=run)
    frames["e"] = {"kind": "encode", "model": VIDEOS, "inputs": {"video": "v"}}
    assert built(s=run)
    with pytest.raises(UserError, match=r"^node s: mask: found 'a mask', expected none"):
        built(m=mask, s={**run, "inputs": {"latent": "e", "mask": "m"}})


def test_runs_read_images_that_other_nodes_make() -> None:
    """As a control image, and as the first frame of a video. Images of the user are brought to the pool, and recipes
    name what other nodes make as inputs alone."""
    black = np.zeros((64, 64, 3), np.uint8)
    made = {"i": {"kind": "image", "image": black}, "v": operation("image_invert", {"image": "i"})}
    cases = {"controls.0": ("shapes", {"controls": [{"model": "canny"}]}), "image": (BEGINS, {"frames": 5})}
    for place, (model, fields) in cases.items():
        run = sampling(request={"model": model, **fields})
        nodes = {**made, "s": {**run, "inputs": {place: "v"}}, "d": {**BASE["d"], "model": model}}
        request, refs = InputImages(lambda result: result).bring(request_of(nodes))
        recipe, graph = build_graph(request, JobId("x"), CATALOG)
        (inverted,) = (task for task in graph.job.tasks if task.stage is Stage.OPERATE)
        assert set(inverted.needs) == refs.keys()
        assert any(inverted.task_id in task.needs for task in graph.job.tasks), place
        assert recipe.workflow is not None
        assert "task" not in str(recipe.workflow.nodes["s"])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a node that is not there": ({**BASE, "s": {**sampling(), "inputs": {"latent": "x"}}}, "node s: latent"),
    "a cycle": ({**BASE, "s": sampling("t"), "t": sampling("s")}, "depends on itself"),
    "another kind of value": ({**BASE, "e": BASE["d"], "d": {**BASE["d"], "inputs": {"latent": "e"}}}, "node d"),
    "an unknown input": ({**BASE, "d": {**BASE["d"], "inputs": {"latent": "s", "x": "s"}}}, "node d: inputs"),
    "an unknown kind": ({**BASE, "x": {"kind": "shell"}}, "kind"),
    "an unknown model": ({**BASE, "s": sampling(request={"model": "../../etc/passwd"})}, "node s: unknown model"),
    "an unknown operation": ({**BASE, "d": operation("rm -rf", {"image": "s"})}, "node d: unknown operation"),
    "a file in a name": ({**BASE, "i": {"kind": "image", "image": "/etc/passwd"}}, "image"),
    "1e9 steps": ({**BASE, "s": sampling(request={"steps": 10**9})}, "steps"),
    "a step after the last": ({**BASE, "s": sampling(first_step=9)}, "node s: first_step"),
    "an outer field": ({**BASE, "s": sampling(request={"n": 4})}, "n"),
    "a latent as output": ({**BASE, "d": sampling()}, "workflow.output"),
    "noise kept by a sampler with own steps": (
        {**BASE, "s": sampling(last_step=4, request={"sampler": "dpm_adaptive"})}, "places its own steps",
    ),
    "a huge latent": ({**BASE, "s": sampling(request={"width": 16384 * 8, "height": 64})}, "width"),
    "an empty latent decoded": (
        {**BASE, "e": operation("latent_empty", {}, channels=4, width=8, height=8),
         "d": {**BASE["d"], "inputs": {"latent": "e"}}}, "node d: latent: found 'an empty latent, of no model'",
    ),
    "an empty latent as the start": (
        {**BASE, "s": sampling("e"), "e": operation("latent_empty", {}, channels=4, width=8, height=8)},
        "node s: latent: found 'an empty latent, of no model'",
    ),
    "frames that the start latent does not have": (
        {**BASE, "v": sampling(request={"model": VIDEOS, "frames": 9}),
         "s": sampling("v", strength=0.5, request={"model": VIDEOS, "frames": 5}),
         "d": {**BASE["d"], "model": VIDEOS}}, "node s: frames: found 5, expected 9",
    ),
    "steps that a model with a first frame cannot leave out": (
        {**BASE, "i": operation("image_solid", {}, width=64, height=64),
         "s": {**sampling(request={"model": BEGINS, "frames": 5}, strength=0.5), "inputs": {"image": "i"}},
         "d": {**BASE["d"], "model": BEGINS}}, f"node s: strength: found 0.5, expected none: model '{BEGINS}' reads",
    ),
    "an enlarged latent": (
        {**BASE, "u": operation("latent_upscale_by", {"samples": "s"}, factor=1e6), "d": sampling("u")},
        "node u: factor",
    ),
}  # fmt: skip


@each_case("nodes, message", list(BAD.values()), ids=list(BAD))
def test_what_cannot_be_computed_is_refused_by_name(nodes: dict[str, Any], message: str) -> None:
    assert message in refused(lambda: nodes)


def enlargements() -> dict[str, Any]:
    """Images that are large together, none of them alone."""
    inputs = [{"image": "d"}, *({"image": f"u{place}"} for place in range(40))]
    large = {f"u{place}": operation("image_scale", inputs[place], width=16000, height=16000) for place in range(41)}
    return {**BASE, **large}


def test_hostile_graphs_are_refused_before_they_cost_something() -> None:
    many = {str(place): object() for place in range(100_000)}  # nodes that nobody looks at
    assert f"up to {MAX_NODES}" in refused(lambda: {**many, **BASE})
    chain = {f"s{place}": sampling(f"s{place - 1}" if place else "s") for place in range(MAX_DEPTH)}
    assert f"more than {MAX_DEPTH} nodes behind one another" in refused(lambda: {**BASE, **chain}, f"s{MAX_DEPTH - 1}")
    long = {f"s{place}": sampling(f"s{place - 1}" if place else "s", request={"steps": 999}) for place in range(30)}
    assert f"up to {MAX_WORKFLOW_STEPS}" in refused(lambda: {**BASE, **long}, "s29")
    assert f"up to {MAX_INTERMEDIATE_BYTES}" in refused(enlargements, "u40")


class CountingCatalog(FakeCatalog):
    """Counts the estimates, which take most of the time of a graph."""

    estimates = 0

    def execution_modes(self, *args: Any) -> tuple[ExecutionMode, ...]:
        self.estimates += 1
        return super().execution_modes(*args)


def test_a_workflow_of_60_nodes_estimates_each_work_once() -> None:
    """Tasks that differ in their inputs or their seed alone need the same; operations are not estimated."""
    nodes = dict(BASE)
    for place in range(15):
        nodes[f"i{place}"] = operation("image_invert", {"image": f"d{place - 1}" if place else "d"})
        nodes[f"e{place}"] = {"kind": "encode", "model": "shapes", "inputs": {"image": f"i{place}"}}
        nodes[f"s{place}"] = sampling(f"e{place}", strength=0.5, request={"seed": place})
        nodes[f"d{place}"] = {"kind": "decode", "model": "shapes", "inputs": {"latent": f"s{place}"}}
    request, catalog = request_of({**nodes, "again": nodes["d13"]}, "d14"), CountingCatalog()
    graph = build_graph(request, JobId("x"), catalog)[1]
    # two texts, the first run and the others, encoding and decoding
    assert (len(graph.job.tasks), catalog.estimates) == (64, 6)
    alone = build_graph(request_of(BASE), JobId("x"), CountingCatalog())[1]
    shared = [task for task in graph.job.tasks if task.task_id in alone.works]
    assert shared == list(alone.job.tasks), "a task has the same sizes, whatever else is in the graph"


def test_inputs_of_nodes_are_set_by_name() -> None:
    graph = {"nodes": BASE, "output": "d"}
    given = inputs_of_texts(("s.steps=5", "s.prompt=a red circle", "d.model=forms", 's.loras=["light"]'))
    nodes = GenerateRequest(workflow=with_inputs(graph, given)).workflow.nodes
    assert (nodes["s"].request.steps, nodes["s"].request.prompt, nodes["d"].model) == (5, "a red circle", "forms")
    assert graph["nodes"]["s"]["request"]["steps"] == 8, "the workflow itself is as it was"
    comfy = {"3.1": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 2}}}
    assert with_inputs(comfy, {"3.1.seed": 7})["3.1"]["inputs"] == {"seed": 7, "steps": 2}
    for name, message in (("4.seed", "with one of the nodes 3.1"), ("3.1.sede", "it has seed, steps")):
        with pytest.raises(UserError, match=message):
            with_inputs(comfy, {name: 1})


def test_a_request_with_a_workflow_has_nothing_that_its_nodes_have() -> None:
    shown = request_of(BASE)
    assert (shown.model, shown.prompt, shown.steps) == ("shapes", "p", 8)
    assert GenerateRequest.model_validate_json(shown.model_dump_json(exclude_unset=True)) == shown
    with pytest.raises(UserError, match="none beside workflow"):
        request_of(BASE, cfg=3.0)
    with pytest.raises(UserError, match="passes cannot be combined with hires"):
        GenerateRequest(**REQUEST, passes=[{"scale": 2}], hires=2)


def test_a_workflow_in_a_job_file_has_no_batch_size() -> None:
    """Job files leave the batch size of all their lines to the pool."""
    assert tasks_of(request_of(BASE, batch="auto")) == tasks_of(request_of(BASE))
    with pytest.raises(UserError, match="batch"):
        request_of(BASE, batch=8)


def test_errors_of_the_fields_of_a_node_name_it_and_wrong_inputs_are_suggested() -> None:
    """A new user saw "unknown field of GenerateRequest" without the node, and no near name."""
    run = {"kind": "sample", "request": {"model": "shapes", "prompt": "a cat", "seed": 4}}
    nodes = {"run": run, "image": {"kind": "decode", "model": "shapes", "inputs": {"latent": "run"}}}
    graph = {"nodes": nodes, "output": "image"}
    comfy = {"3": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 2}}}
    cases = {
        "run.stepz": (graph, "node run: unknown field of GenerateRequest 'stepz'; did you mean 'steps'"),
        "run.steps": (graph, "node run: steps: found 'many', expected a whole number"),
        "ruun.steps": (graph, "did you mean 'run'"),
        "3.stepz": (comfy, "node 3 has no input 'stepz'; it has seed, steps; did you mean 'steps'"),
    }
    for name, (given, expected) in cases.items():
        with pytest.raises(UserError, match=expected):
            GenerateRequest(workflow=with_inputs(given, {name: "many"}))
    assert with_inputs(graph, inputs_of_texts(("seed=7",)))["seed"] == 7
    with pytest.raises(UserError, match=r"expected NODE\.INPUT"):
        with_inputs(comfy, {"seed": 7})


def test_a_workflow_whose_runs_have_seeds_has_the_last_one() -> None:
    """Its file had another name at each call, so that it was not found again."""
    run = {"kind": "sample", "request": {"model": "shapes", "prompt": "a cat"}}
    decode = {"kind": "decode", "model": "shapes", "inputs": {"latent": "run"}}
    for seed in (None, 4):
        seeded = {**run, "request": {**run["request"], **({} if seed is None else {"seed": seed})}}  # type: ignore[dict-item]
        request = GenerateRequest(workflow={"nodes": {"run": seeded, "image": decode}, "output": "image"})
        assert request.workflow is not None
        assert request.workflow.own_seed == seed


def test_masks_with_frames_are_refused_and_masks_of_another_shape_are_told_of() -> None:
    """A mask of two images ended with an error of the worker; one of another shape lost its sides in silence."""
    image = operation("image_solid", {}, width=64, height=64)
    two = {"a": image, "b": operation("image_batch", {"first": "a", "second": "a"})}
    masks = {**BASE, **two, "m": operation("mask_from_image", {"image": "b"}, channel="red")}
    start = {"kind": "encode", "model": "shapes", "inputs": {"image": "a"}}
    hidden = {**start, "inputs": {"image": "a", "mask": "m"}}
    run = {**sampling("e"), "inputs": {"latent": "e", "mask": "m"}, "strength": 0.5}
    for nodes in ({**masks, "e": hidden, "s": sampling("e")}, {**masks, "e": start, "s": run}):
        assert "mask: found '2 frames', expected one mask" in refused(lambda nodes=nodes: nodes)
    for width, height, expected in (
        (64, 64, False),
        (32, 32, False),
        (128, 136, False),
        (128, 64, True),
        (64, 96, True),
    ):
        solid = operation("mask_solid", {}, width=width, height=height)
        request = request_of({**BASE, "a": image, "e": start, "m": solid, "s": run})
        warnings = build_graph(request, JobId("x"), CATALOG)[1].warnings
        found = any("it is scaled to cover the image, and cut at its sides" in each for each in warnings)
        assert found == expected, (width, height, warnings)
