"""Group nodes of the editor are the nodes of their group: inputs, outputs, widgets and reroutes in their order."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.node_errors import WorkflowRejected


def given(name: str, link: int | None = None, widget: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "type": "*", "link": link}
    return found | ({"widget": {"name": widget}} if widget else {})


def made(*links: list[int]) -> list[dict[str, Any]]:
    return [{"name": "", "type": "*", "links": each} for each in links]


#: a sampler of parts: noise, a reroute of the model, noise levels, a guider and the sampler
GROUP = {
    "nodes": [
        {"type": "RandomNoise", "outputs": made([]), "widgets_values": [1, "fixed"]},
        {"type": "Reroute", "inputs": [given("")], "outputs": made([])},
        {"type": "BasicScheduler", "inputs": [given("model"), given("steps", widget="steps")], "outputs": made([]),
         "widgets_values": ["normal", 20, 1]},
        {"type": "BasicGuider", "inputs": [given("model"), given("conditioning")], "outputs": made([])},
        {"type": "SamplerCustomAdvanced", "outputs": made([], []),
         "inputs": [given(name) for name in ("noise", "guider", "sampler", "sigmas", "latent_image")]},
    ],
    "links": [
        [None, 0, 1, 0, 4, "MODEL"], [1, 0, 2, 0, 9, "MODEL"], [1, 0, 3, 0, 9, "MODEL"], [0, 0, 4, 0, 8, "NOISE"],
        [3, 0, 4, 1, 8, "GUIDER"], [2, 0, 4, 3, 8, "SIGMAS"],
    ],
    "external": [[2, 0, "SIGMAS"], [4, 0, "LATENT"]],
    "config": {"2": {"input": {"steps": {"name": "number of steps"}}}},
}  # fmt: skip


def workflow(prefix: str = "workflow>") -> dict[str, Any]:
    names = ("MODEL", "conditioning", "sampler", "latent_image")
    group = {
        "id": 9, "type": f"{prefix}parts", "widgets_values": [77, "randomize", "karras", 12, 0.5],
        "inputs": [*(given(name, place) for place, name in enumerate(names, start=1)),
                   given("steps", 8, widget="number of steps")],
        "outputs": made([6], [5], []),
    }  # fmt: skip
    sources = [("CheckpointLoaderSimple", ["m.safetensors"]), ("CLIPTextEncode", ["a fox"]),
               ("KSamplerSelect", ["euler"]), ("EmptyLatentImage", [64, 64, 1])]  # fmt: skip
    nodes = [{"id": place, "type": kind, "widgets_values": values, "outputs": made([place])}
             for place, (kind, values) in enumerate(sources, start=1)]  # fmt: skip
    nodes[1]["inputs"] = [given("clip", 7)]
    steps = {"id": 5, "type": "PrimitiveNode", "widgets_values": [30, "fixed"], "outputs": made([8])}
    decode = {"id": 10, "type": "VAEDecode", "inputs": [given("samples", 5)], "outputs": made([])}
    split = {"id": 11, "type": "SplitSigmas", "inputs": [given("sigmas", 6)], "widgets_values": [2]}
    links = [[place, place, 0, 9, place - 1, "*"] for place in range(1, 5)]
    links += [[5, 9, 1, 10, 0, "*"], [6, 9, 0, 11, 0, "*"], [7, 1, 1, 2, 0, "*"], [8, 5, 0, 9, 4, "*"]]
    return {"nodes": [*nodes, steps, group, decode, split], "links": links, "extra": {"groupNodes": {"parts": GROUP}}}


@pytest.mark.parametrize("prefix", ["workflow>", "workflow/"])
def test_a_group_node_is_the_nodes_of_its_group(prefix: str) -> None:
    """Before: refused as an unknown node. The ids are those that ComfyUI gives them."""
    found = api_format(workflow(prefix))
    assert found["9:0"] == {"class_type": "RandomNoise", "inputs": {"noise_seed": 77}}
    # 12 in the group node; a link sets it
    assert found["9:2"]["inputs"] == {"scheduler": "karras", "steps": 30, "denoise": 0.5, "model": ["1", 0]}
    assert found["9:3"]["inputs"] == {"model": ["1", 0], "conditioning": ["2", 0]}
    assert found["9:4"]["inputs"] == {
        "noise": ["9:0", 0], "guider": ["9:3", 0], "sampler": ["3", 0], "sigmas": ["9:2", 0], "latent_image": ["4", 0],
    }  # fmt: skip
    assert found["10"]["inputs"]["samples"] == ["9:4", 0]
    assert found["11"]["inputs"]["sigmas"] == ["9:2", 0], "an output that is also read inside of the group"
    assert set(found) == {"1", "2", "3", "4", "10", "11", "9:0", "9:2", "9:3", "9:4"}


def test_a_group_node_that_differs_from_its_group_is_refused_by_its_id() -> None:
    changes = {
        "found 4 values, expected 5": lambda host: host["widgets_values"].pop(),
        "found 3 inputs, expected 4": lambda host: host["inputs"].pop(0),
        "other: found 0 widgets": lambda host: host["inputs"][-1].update(widget={"name": "other"}),
    }
    for expected, change in changes.items():
        changed = copy.deepcopy(workflow())
        change(next(node for node in changed["nodes"] if node["id"] == 9))
        with pytest.raises(WorkflowRejected) as refused:
            api_format(changed)
        (error,) = refused.value.errors
        assert (error.node_id, error.class_type) == ("9", "workflow>parts")
        assert expected in error.details
    changed = workflow()
    changed["extra"]["groupNodes"]["parts"] = {"nodes": [{}], "links": []}
    with pytest.raises(WorkflowRejected):
        api_format(changed)
