"""Nodes of users in files of ComfyUI's editor, by `modelpool run` and `modelpool batch --workflow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_own_nodes import kinds_as_used
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.inference.operations.own_nodes import checked_node
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.node_listing import NodeListing, NodeSettingListing
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, KnownNames
from tests.pool.inference.operations.own_node_declarations import shaded

LISTING = NodeListing(
    "add_frame", "1", "Add a frame", "own", (("image", "image"),), (), "image",
    (
        NodeSettingListing("pixels", "int", 4, 1, 64),
        NodeSettingListing("level", "float", 0.5, 0.0, 1.0),
        NodeSettingListing("seed", "int", 0),
        NodeSettingListing("sides", "tuple[int, ...]", (4, 8)),
    ),
)  # fmt: skip


class Names(KnownNames):
    """Knows a model, and permits a node of users."""

    def check(self, request: GenerateRequest) -> None:
        """Know all models."""

    def family_of(self, name: str) -> str:
        """Return one."""
        return "Stable Diffusion 1"

    def may_be_own_node(self, name: str) -> bool:
        """Whether it is the node."""
        return name == "add_frame"


class PoolWithNode(FakePool):
    """Has the node."""

    def file_names(self) -> FileNames:
        """Return the node."""
        return FileNames(nodes=(LISTING,))


def editor_file(has_widgets: bool = True) -> dict[str, Any]:
    """An image with a frame, as the editor saves it: newer files list the widgets of every node."""
    widgets = [{"name": name, "type": "INT", "link": None, "widget": {"name": name}} for name in (
        "pixels", "level", "seed", "sides")]  # fmt: skip
    image = {"name": "image", "type": "IMAGE", "link": 8}
    clip = {"name": "clip", "type": "CLIP"}
    sampler = [{"name": name, "type": "X", "link": place} for place, name in enumerate(
        ("model", "positive", "negative", "latent_image"), start=1)]  # fmt: skip
    nodes = [
        {"id": 1, "type": "CheckpointLoaderSimple", "widgets_values": ["shapes.ckpt"]},
        {"id": 2, "type": "CLIPTextEncode", "inputs": [{**clip, "link": 5}], "widgets_values": ["a"]},
        {"id": 3, "type": "EmptyLatentImage", "widgets_values": [64, 64, 1]},
        {"id": 4, "type": "KSampler", "inputs": sampler, "widgets_values": [7, "fixed", 4, 4.5, "euler", "normal", 1]},
        {"id": 5, "type": "VAEDecode", "inputs": [{"name": "samples", "link": 6}, {"name": "vae", "link": 7}]},
        {
            "id": 6, "type": "add_frame", "inputs": [image, *(widgets if has_widgets else ())],
            "widgets_values": [9, 0.25, 3, "randomize", "1, 2, 3"],
        },
        {"id": 7, "type": "SaveImage", "inputs": [{"name": "images", "link": 9}], "widgets_values": ["x"]},
    ]  # fmt: skip
    links = [
        [1, 1, 0, 4, 0, "MODEL"], [2, 2, 0, 4, 1, "CONDITIONING"], [3, 2, 0, 4, 2, "CONDITIONING"],
        [4, 3, 0, 4, 3, "LATENT"], [5, 1, 1, 2, 0, "CLIP"], [6, 4, 0, 5, 0, "LATENT"], [7, 1, 2, 5, 1, "VAE"],
        [8, 5, 0, 6, 0, "IMAGE"], [9, 6, 0, 7, 0, "IMAGE"],
    ]  # fmt: skip
    return {"nodes": nodes, "links": links}


def settings_of(request: GenerateRequest) -> dict[str, Any]:
    assert request.workflow is not None
    return dict(request.workflow.nodes["6"].settings)


def test_the_widgets_that_a_file_lists_are_the_settings_of_a_node_of_users() -> None:
    converted = api_format(editor_file(), may_be_own=lambda name: name == "add_frame")
    assert converted["6"] == {
        "class_type": "add_frame",
        "inputs": {"pixels": 9, "level": 0.25, "seed": 3, "sides": "1, 2, 3", "image": ["5", 0]},
    }
    with pytest.raises(WorkflowRejected, match="the order of its widgets is not known"):
        api_format(editor_file(has_widgets=False), may_be_own=lambda name: name == "add_frame")
    with pytest.raises(WorkflowRejected, match="does not have these nodes: add_frame"):
        api_format(editor_file())


def test_run_and_batch_convert_them(command: Command, tmp_path: Path) -> None:
    (tmp_path / "flow.json").write_text(json.dumps(editor_file()))
    (tmp_path / "rows.csv").write_text("id,6.pixels,4.seed\none,2,5\ntwo,3,6\n")
    pool, names = PoolWithNode(), Names("shapes")
    ended = command("run", "flow.json", "--set", "6.pixels=12", pool=pool, names=names)
    assert ended.code == 0, ended.err
    (request,) = pool.submitted
    expected = {"pixels": 12, "level": 0.25, "seed": 3, "sides": "1, 2, 3"}
    assert settings_of(request) == expected
    pool = PoolWithNode()
    ended = command("batch", "rows.csv", "--workflow", "flow.json", "--out", "images", pool=pool, names=names)
    assert ended.code == 0, ended.err
    assert [settings_of(each) for each in pool.submitted] == [{**expected, "pixels": 2}, {**expected, "pixels": 3}]
    assert [request.workflow.nodes["4"].request.seed for request in pool.submitted if request.workflow] == [5, 6]


def test_the_type_of_a_result_is_that_of_what_reads_it() -> None:
    graph = api_format(editor_file(), may_be_own=lambda name: name == "add_frame")
    kind = kinds_as_used(graph)["add_frame"]
    types = {given.name: given.type for given in kind.inputs}
    assert kind.outputs == ("IMAGE",)
    assert types == {"image": "IMAGE", "pixels": "INT", "level": "FLOAT", "seed": "INT", "sides": "STRING"}
    graph["8"] = {"class_type": "other", "inputs": {"image": ["5", 0]}}
    graph["6"]["inputs"]["image"] = ["8", 0]
    assert kinds_as_used(graph)["other"].outputs == ("IMAGE",), "a node that only another one of users reads"
    with pytest.raises(UserError, match="node other: found a result that leads to nothing"):
        kinds_as_used({"8": graph["8"], "5": graph["5"]})


def test_a_tuple_of_numbers_is_a_text_with_commas() -> None:
    """It kept its default in silence, whatever a workflow of ComfyUI said."""
    node = checked_node("shaded", shaded())
    assert node.parsed({"levels": "1, 2.5 3", "sides": "4,8", "name": "1, 2"}) == {
        "levels": (1.0, 2.5, 3.0), "sides": (4, 8), "name": "1, 2",
    }  # fmt: skip
    assert node.parsed({"sides": (3, 4)}) == {"sides": (3, 4)}
    with pytest.raises(UserError, match=r"shaded: sides: found '4\.5', expected numbers with commas"):
        node.parsed({"sides": "4.5"})
