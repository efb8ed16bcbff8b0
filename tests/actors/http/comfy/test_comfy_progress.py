"""A client of ComfyUI's web socket against a real pool: what it hears of each node of a workflow."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import websockets

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.worker.gpu_worker import WorkerEngine
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import OperationParams
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.http.conftest import CONFIG, served
from tests.actors.loop_connection import open_real_pool

#: of a node that cannot be computed: a radius that the pool accepts
BROKEN = 3


class BreakingEngine:
    """An engine that cannot blur with one radius."""

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, task: Any, work: Any, *others: Any, **named: Any) -> Any:
        if isinstance(work, OperationParams) and dict(work.settings).get("radius") == BROKEN:
            raise UnusableField("this worker cannot blur")
        return self._engine.run(task, work, *others, **named)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = PoolConfig.load(CONFIG).override(device="cpu", workers=1)
    with (
        open_real_pool(config, wrap=BreakingEngine) as pool,
        served(pool, tmp_path_factory.mktemp("outputs")) as server,
    ):
        yield server


def two_samplers(**blur: Any) -> Graph:
    """Two samplers of different kinds, a change of the image, a saved image and a preview of the first one."""
    second = basic()["sampler"]["inputs"] | {"latent_image": ["sampler", 0], "denoise": 0.5, "sampler_name": "heun"}
    return {
        **basic(),
        "second": node("KSampler", **second),
        "later": node("VAEDecode", samples=["second", 0], vae=["model", 2]),
        "blurred": node("ImageBlur", image=["later", 0], **{"blur_radius": 1, "sigma": 1.0, **blur}),
        "shown": node("PreviewImage", images=["decoded", 0]),
        "saved": node("SaveImage", images=["blurred", 0], filename_prefix="x"),
    }


def run(server: str, graph: Graph, metadata: bool = False) -> tuple[str, list[dict[str, Any]], list[bytes]]:
    """Queue a workflow as ComfyUI's own client does; return its id, the messages about it, and binary ones."""

    async def talk() -> tuple[str, list[dict[str, Any]], list[bytes]]:
        heard, frames = list[dict[str, Any]](), list[bytes]()
        async with websockets.connect(server.replace("http", "ws") + "/ws?clientId=me", max_size=None) as socket:
            await socket.recv()
            if metadata:
                flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
                await socket.send(json.dumps(flags))
                answer = json.loads(await socket.recv())
                assert answer["type"] == "feature_flags"
                assert answer["data"]["supports_preview_metadata"] is True
            body = {"prompt": graph, "client_id": "me", "extra_data": {"preview_method": "auto"}}
            answer = await asyncio.to_thread(requests.post, f"{server}/prompt", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            prompt_id = answer.json()["prompt_id"]
            while True:
                message = await socket.recv()
                if isinstance(message, bytes):
                    frames.append(message)
                    continue
                heard.append(json.loads(message))
                if heard[-1]["type"] == "executing" and heard[-1]["data"]["node"] is None:
                    return prompt_id, [one for one in heard if one["type"] != "status"], frames

    return asyncio.run(asyncio.wait_for(talk(), 120))


def of_kind(heard: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message["data"] for message in heard if message["type"] == kind]


def history_of(server: str, prompt_id: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{server}/history/{prompt_id}", timeout=60).json()[prompt_id]
    return found


def test_a_client_hears_of_every_node_and_what_was_found(address: str) -> None:
    """The second run differs in its last node: the others are found."""
    prompt_id, heard, _ = run(address, two_samplers())
    kinds = [message["type"] for message in heard]
    assert kinds[:2] == ["execution_start", "execution_cached"]
    assert kinds[-2:] == ["execution_success", "executing"]
    assert all(message["data"]["prompt_id"] == prompt_id for message in heard)
    (found,) = of_kind(heard, "execution_cached")
    assert found["nodes"] == []
    executing = [data["node"] for data in of_kind(heard, "executing")]
    assert {"positive", "negative", "sampler", "decoded", "second", "later", "blurred", "saved", "shown"} < {*executing}
    assert executing.index("sampler") < executing.index("second") < executing.index("later") < executing.index("saved")
    steps = {data["node"]: data for data in of_kind(heard, "progress")}
    assert all(data["value"] <= data["max"] for data in steps.values())
    last = of_kind(heard, "progress_state")[-1]["nodes"]
    assert last.keys() == two_samplers().keys()
    assert {state["state"] for state in last.values()} == {"finished"}
    executed = {data["node"]: data["output"]["images"] for data in of_kind(heard, "executed")}
    assert {name: [image["type"] for image in images] for name, images in executed.items()} == {
        "saved": ["output"], "shown": ["temp"],
    }  # fmt: skip

    history = history_of(address, prompt_id)
    assert {name: output["images"] for name, output in history["outputs"].items()} == executed
    assert history["meta"]["saved"]["real_node_id"] == "saved"
    assert [name for name, _ in history["status"]["messages"]] == [
        "execution_start", "execution_cached", "execution_success",
    ]  # fmt: skip
    assert all(data["timestamp"] > 1e12 for _, data in history["status"]["messages"])

    _, again, _ = run(address, two_samplers(blur_radius=2))
    (found,) = of_kind(again, "execution_cached")
    assert {"second", "later", "sampler", "positive", "negative", "blank"} <= {*found["nodes"]}
    assert not {"blurred", "saved"} & {*found["nodes"]}
    assert "second" not in [data["node"] for data in of_kind(again, "executing")]


def test_an_error_names_its_node_with_its_values(address: str) -> None:
    prompt_id, heard, _ = run(address, two_samplers(blur_radius=BROKEN))
    (error,) = of_kind(heard, "execution_error")
    assert (error["node_id"], error["node_type"]) == ("blurred", "ImageBlur")
    assert "cannot blur" in error["exception_message"]
    assert error["current_inputs"]["blur_radius"] == [BROKEN]
    assert any("cannot blur" in line for line in error["traceback"])
    assert {"second", "later"} <= {*error["executed"]}
    assert of_kind(heard, "progress_state")[-1]["nodes"]["blurred"]["state"] == "error"
    status = history_of(address, prompt_id)["status"]
    assert (status["status_str"], status["messages"][-1][0]) == ("error", "execution_error")
    assert status["messages"][-1][1]["node_id"] == "blurred"


def test_all_steps_of_a_node_are_told_as_its_own(address: str) -> None:
    """An image that is redrawn in four tiles: encoded, sampled, decoded and pasted, under the id of one node."""
    graph = basic(steps=2)
    graph["blank"]["inputs"] |= {"width": 128, "height": 128}
    links = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0], "vae": ["model", 2]}
    tiles = {"mode_type": "Linear", "tile_width": 64, "tile_height": 64, "mask_blur": 4, "tile_padding": 8}
    sampling = {"seed": 8, "steps": 2, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.5}
    given = {"upscaled_image": ["decoded", 0], **links, **tiles, **sampling}
    graph["tiled"] = node("UltimateSDUpscaleNoUpscale", **given)
    graph["saved"]["inputs"]["images"] = ["tiled", 0]
    prompt_id, heard, _ = run(address, graph)
    executing = [data["node"] for data in of_kind(heard, "executing") if data["node"]]
    behind = executing[executing.index("decoded") + 1 :]  # its masks wait for nothing
    assert behind == ["tiled", "saved"], "encoding a tile is no encoding of a text"
    assert {*executing} <= {*graph}
    assert {data["node"] for data in of_kind(heard, "progress")} <= {"sampler", "tiled"}
    assert of_kind(heard, "progress_state")[-1]["nodes"].keys() == graph.keys()
    assert [*history_of(address, prompt_id)["outputs"]] == ["saved"]


def test_previews_have_the_names_of_their_node_if_the_client_reads_them(address: str) -> None:
    graph = basic(steps=60, seed=991)
    graph["blank"]["inputs"].update(width=128, height=128)
    prompt_id, _, frames = run(address, graph, metadata=True)
    assert frames
    for frame in frames:
        kind, length = struct.unpack(">II", frame[:8])
        names = json.loads(frame[8 : 8 + length])
        assert (kind, names["node_id"], names["prompt_id"]) == (4, "sampler", prompt_id)
        assert names["image_type"] == "image/jpeg"
        assert frame[8 + length :].startswith(b"\xff\xd8")
