"""The forms in which the editor of today saves workflows: values of subgraphs by the inputs of their definition, one
value for all that an input of a subgraph is linked to, widgets that depend on a choice, and buttons as tables."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.node_errors import WorkflowRejected


def widget(name: str, kind: str, link: int | None = None) -> dict[str, Any]:
    return {"name": name, "type": kind, "link": link, "widget": {"name": name}}


def of_subgraph(values: list[Any] | None, shown: list[dict[str, Any]], proxies: list[Any] | None = None) -> Any:
    """A subgraph with a size, a text, and an image; its width is also shown as a text."""
    definition = {
        "id": "sub",
        "inputs": [
            {"name": "image", "type": "IMAGE"},
            {"name": "width", "type": "INT"},
            {"name": "text", "type": "STRING"},
        ],
        "nodes": [
            {
                "id": 1,
                "type": "EmptyLatentImage",
                "inputs": [widget("width", "INT", 2)],
                "widgets_values": [512, 640],
            },
            {"id": 2, "type": "PreviewAny", "inputs": [{"name": "source", "type": "*", "link": 3}]},
            {"id": 3, "type": "PrimitiveString", "inputs": [widget("value", "STRING", 4)], "widgets_values": ["own"]},
            {"id": 4, "type": "PreviewImage", "inputs": [{"name": "images", "type": "IMAGE", "link": 1}]},
        ],
        "links": [
            {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 4, "target_slot": 0},
            {"id": 3, "origin_id": -10, "origin_slot": 1, "target_id": 2, "target_slot": 0},
            {"id": 2, "origin_id": -10, "origin_slot": 1, "target_id": 1, "target_slot": 0},
            {"id": 4, "origin_id": -10, "origin_slot": 2, "target_id": 3, "target_slot": 0},
        ],
    }
    image = {"name": "image", "type": "IMAGE", "link": 9}
    host = {"id": 5, "type": "sub", "inputs": [image, *shown], "widgets_values": values}
    host["properties"] = {"proxyWidgets": proxies} if proxies else {}
    loader = {"id": 6, "type": "LoadImage", "widgets_values": ["a.png", {"name": "upload", "options": {}}]}
    return {"nodes": [host, loader], "links": [[9, 6, 0, 5, 0, "IMAGE"]], "definitions": {"subgraphs": [definition]}}


def inputs(workflow: Any) -> dict[str, dict[str, Any]]:
    return {node_id: node["inputs"] for node_id, node in api_format(workflow).items()}


def test_values_of_a_subgraph_have_the_names_of_its_definition_whatever_its_node_lists() -> None:
    for shown in ([], [widget("text", "STRING")], [widget("width", "INT"), widget("text", "STRING")]):
        found = inputs(of_subgraph([768, "a fox"], shown))
        assert found["5:1"] == {"width": 768, "height": 640}, shown
        assert found["5:2"] == {"source": 768}, "all that an input is linked to has its value"
        assert found["5:3"] == {"value": "a fox"}
        assert found["5:4"] == {"images": ["6", 0]}
        assert found["6"] == {"image": "a.png"}
    found = inputs(of_subgraph(["a fox"], [widget("text", "STRING")]))
    assert (found["5:1"]["width"], found["5:3"]["value"]) == (512, "a fox"), "files of 2025"


def test_an_input_without_a_value_is_the_first_widget_that_it_stands_for() -> None:
    found = inputs(of_subgraph(None, []))
    assert (found["5:1"]["width"], found["5:2"]["source"]) == (512, 512)
    found = inputs(of_subgraph([896], [], [["1", "width"]]))
    assert (found["5:1"]["width"], found["5:2"]["source"]) == (896, 896)


def test_values_of_a_subgraph_that_have_no_names_are_refused_with_its_id() -> None:
    with pytest.raises(WorkflowRejected) as found:
        api_format(of_subgraph([1, 2, 3], []))
    (error,) = found.value.as_json()["node_errors"]["5"]["errors"]
    assert (error["message"], error["details"]) == (
        "the order of its widgets is not known", "found 3 values, expected values of width, text"
    )  # fmt: skip


def test_a_subgraph_in_a_subgraph_has_the_values_of_the_outer_one() -> None:
    workflow = of_subgraph(None, [])
    (inner,) = workflow["definitions"]["subgraphs"]
    host, loader = workflow["nodes"]
    host["inputs"] = [{"name": "image", "type": "IMAGE", "link": 1}, widget("width", "INT", 2)]
    outer = {
        "id": "outer",
        "inputs": [{"name": "image", "type": "IMAGE"}, {"name": "side", "type": "INT"}],
        "nodes": [host, {"id": 8, "type": "PreviewAny", "inputs": [{"name": "source", "type": "*", "link": 3}]}],
        "links": [
            {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 5, "target_slot": 0},
            {"id": 2, "origin_id": -10, "origin_slot": 1, "target_id": 5, "target_slot": 1},
            {"id": 3, "origin_id": -10, "origin_slot": 1, "target_id": 8, "target_slot": 0},
        ],
    }
    node = {"id": 7, "type": "outer", "inputs": [{"name": "image", "type": "IMAGE", "link": 9}]}
    workflow |= {"nodes": [node, loader], "links": [[9, 6, 0, 7, 0, "IMAGE"]]}
    workflow["definitions"]["subgraphs"] = [inner, outer]
    found = inputs(workflow)
    assert (found["7:5:1"]["width"], found["7:5:2"]["source"], found["7:8"]["source"]) == (512, 512, 512)
    node["widgets_values"] = [320]
    found = inputs(workflow)
    assert (found["7:5:1"]["width"], found["7:5:2"]["source"], found["7:8"]["source"]) == (320, 320, 320)
    assert found["7:5:3"]["value"] == "own"


def test_widgets_that_depend_on_a_choice_have_its_order() -> None:
    cases = {
        ("scale dimensions", 40, 30, "center", "lanczos"): {"width": 40, "height": 30, "crop": "center"},
        ("scale width", 40, "lanczos"): {"width": 40},
        ("scale longer dimension", 50, "lanczos"): {"longer_size": 50},
        ("match size", "disabled", "lanczos"): {"crop": "disabled"},
    }
    for values, wanted in cases.items():
        workflow = {"nodes": [{"id": 1, "type": "ResizeImageMaskNode", "widgets_values": list(values)}], "links": []}
        expected = {"resize_type": values[0], "scale_method": "lanczos"}
        assert inputs(workflow)["1"] == {**expected, **{f"resize_type.{name}": each for name, each in wanted.items()}}
    saved = {
        "id": 1,
        "type": "SaveImageAdvanced",
        "widgets_values": ["a", "avif", "auto", "sRGB", 20, "animated", 6, 0],
    }
    assert inputs({"nodes": [saved], "links": []})["1"] == {
        "filename_prefix": "a", "format": "avif", "format.bit_depth": "auto", "format.input_color_space": "sRGB",
        "format.crf": 20, "format.save_mode": "animated", "format.save_mode.fps": 6, "format.save_mode.loop_count": 0,
    }  # fmt: skip
