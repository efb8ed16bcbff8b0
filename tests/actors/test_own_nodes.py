"""Nodes of users, of an installed distribution, through Python, `/prompt` and `/object_info`, with their errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests

from modelpool import ModelPool, PoolConfig, UserError
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.results.outcomes import JobFailed
from modelpool.pool.inference.operations.own_nodes import open_nodes
from modelpool.pool.values.core.errors import UnusableField
from tests.actors.http.comfy.comfy_examples import basic, node
from tests.actors.http.conftest import CONFIG, served
from tests.actors.loop_connection import open_real_pool
from tests.actors.own_node_distribution import install

WORKFLOW = {
    "nodes": {
        "run": {
            "kind": "sample",
            "request": {"model": "shapes", "prompt": "a red circle", "steps": 4, "width": 64, "height": 64},
        },
        "image": {"kind": "decode", "model": "shapes", "inputs": {"latent": "run"}},
        "framed": {"kind": "operation", "name": "add_frame", "settings": {"pixels": 3}, "inputs": {"image": "image"}},
    },
    "output": "framed",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install(tmp_path_factory.mktemp("installed"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("framing", None)


@pytest.fixture(scope="module")
def pool(installed: Path) -> Iterator[ModelPool]:
    config = PoolConfig.load(CONFIG).override(device="cpu", workers=1)
    section = config.workflows.model_copy(update={"nodes": ("add_frame", "broken_frame")})
    with open_real_pool(config.model_copy(update={"workflows": section})) as opened:
        yield opened


def test_a_node_runs_in_a_workflow_and_its_version_is_in_the_recipe(pool: ModelPool) -> None:
    (framed,) = pool.run(WORKFLOW, seed=5).images()
    (plain,) = pool.run({**WORKFLOW, "output": "image"}, seed=5).images()
    assert framed.pixels.shape == (70, 70, 3)
    assert np.array_equal(framed.pixels[3:-3, 3:-3], plain.pixels)
    assert (framed.pixels[:3] == 128).all()
    recorded = framed.recipe.workflow
    assert recorded is not None
    assert recorded.nodes["framed"]["version"] == "1"
    (again,) = requests_of(framed.recipe, lambda *_: None)
    (repeated,) = pool.submit(again).images()
    assert np.array_equal(repeated.pixels, framed.pixels)
    other = {**WORKFLOW["nodes"]["framed"], "version": "2"}  # type: ignore[index,dict-item]
    with pytest.raises(UserError, match=r"node framed: version: found '?2'?, expected 1, as installed"):
        pool.run({**WORKFLOW, "nodes": {**WORKFLOW["nodes"], "framed": other}})  # type: ignore[dict-item]


def test_wrong_settings_and_what_a_node_does_wrong_name_it(pool: ModelPool) -> None:
    cases = {
        "add_frame": {
            "pixels=0": ({"pixels": 0}, "node framed: add_frame: pixels: found 0, expected 1 to 64"),
            "unknown": ({"size": 3}, "found the settings size, expected pixels, level, side"),
            "choice": ({"side": "left"}, "side: found 'left', expected all, top"),
        },
        "broken_frame": {
            "raises": ({"pixels": 1}, r"broken_frame \(version 1\): ValueError: one pixel is no frame"),
            "dtype": ({"pixels": 2}, "returned an array of float32, expected an array of uint8"),
            "writes": ({"pixels": 3}, "ValueError: assignment destination is read-only"),
            "shape": ({"pixels": 4}, r"returned the shape \(64, 64, 3\), expected \(72, 72, 3\)"),
        },
    }
    wrong = []
    for name, of_node in cases.items():
        for case, (settings, expected) in of_node.items():
            framed = {"kind": "operation", "name": name, "settings": settings, "inputs": {"image": "image"}}
            graph = {**WORKFLOW, "nodes": {**WORKFLOW["nodes"], "framed": framed}}  # type: ignore[dict-item]
            try:
                with pytest.raises((UserError, JobFailed), match=expected):
                    list(pool.run(graph, seed=5))
            except AssertionError as problem:
                wrong.append((case, str(problem)[:500]))
    assert wrong == []


def test_comfyui_clients_see_it_and_run_it(pool: ModelPool, tmp_path: Path) -> None:
    graph = basic(steps=4)
    graph["framed"] = node("add_frame", image=["decoded", 0], pixels=2, level=1.0, side="top")
    graph["saved"]["inputs"]["images"] = ["framed", 0]
    with served(pool, tmp_path) as address:
        info = requests.get(f"{address}/object_info/add_frame", timeout=60).json()["add_frame"]
        assert info["input"]["required"] == {
            "image": ["IMAGE"],
            "pixels": ["INT", {"default": 4, "min": 1, "max": 64}],
            "level": ["FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0}],
            "side": [["all", "top"], {"default": "all"}],
        }
        assert (info["output"], info["output_node"]) == (["IMAGE"], False)
        assert "add_frame" in requests.get(f"{address}/object_info", timeout=60).json()
        answer = requests.post(f"{address}/prompt", json={"prompt": graph}, timeout=60)
        assert answer.status_code == 200, answer.text
        history: dict[str, dict[str, object]] = {}
        while not history:
            history = requests.get(f"{address}/history/{answer.json()['prompt_id']}", timeout=60).json()
        (entry,) = history.values()
        assert entry["status"]["status_str"] == "success", entry  # type: ignore[index]
        (image,) = entry["outputs"]["saved"]["images"]  # type: ignore[index]
        assert requests.get(f"{address}/view", params=image, timeout=60).content.startswith(b"\x89PNG")
        graph["framed"]["inputs"]["pixels"] = 999
        refused = requests.post(f"{address}/prompt", json={"prompt": graph}, timeout=60).json()
        assert refused["node_errors"]["framed"]["errors"][0]["type"] == "value_bigger_than_max"
        graph["framed"]["class_type"] = "not_permitted"
        refused = requests.post(f"{address}/prompt", json={"prompt": graph}, timeout=60).json()
        assert refused["error"]["type"] == "missing_node_type"


def test_only_what_is_listed_is_imported_and_wrong_lists_are_refused_by_name(installed: Path) -> None:
    sys.modules.pop("framing", None)
    assert dict(open_nodes(())) == {}
    assert "framing" not in sys.modules, "nothing is imported that no operator lists"
    assert list(open_nodes(("add_frame",))) == ["add_frame"]
    cases = {
        "missing": "missing: no installed distribution has it",
        "not_there": "not_there: framing:NOT_THERE cannot be imported: AttributeError",
        "image_blur": "image_blur: name: found 'image_blur', expected an identifier that no operation",
    }
    for name, expected in cases.items():
        with pytest.raises(UserError, match=expected):
            open_nodes((name,))


def test_the_version_is_part_of_the_task(pool: ModelPool, tmp_path: Path) -> None:
    """A changed node is computed again: nothing of another version is found."""
    from modelpool.pool.values.core.stage_params import OperationParams, task_id

    (found,) = open_nodes(("add_frame",)).values()
    settings = (("level", 0.5), ("pixels", 3), ("side", "all"))
    work = OperationParams("add_frame", found.work_settings(settings))
    other = OperationParams("add_frame", (("@version", "2"), *settings))
    assert task_id(work, {}) != task_id(other, {})
    with pytest.raises(UnusableField, match="found the settings @version"):
        found.operation.params_of({"@version": "1"})
