"""comfy-api-simplified and a plain web socket against a real pool."""

from __future__ import annotations

import asyncio
import copy
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import websockets
from comfy_api_simplified import ComfyApiWrapper, ComfyWorkflowWrapper
from PIL import Image

from examples.shapes.checker import matches, read_image
from modelpool import ModelPool
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.graph.recipe_request import differing_fields, requests_of
from modelpool.actors.http.application import application
from modelpool.actors.outputs.image_metadata import RECIPE_KEY, texts_in
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.pool import load_checkpoint
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.results import Latent
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.conftest import ROOT

GRAPH: dict[str, Any] = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "shapes.safetensors"}},
    "2": {
        "class_type": "LoraLoader",
        "inputs": {
            "model": ["1", 0], "clip": ["1", 1], "lora_name": "light.safetensors", "strength_model": 0.0,
            "strength_clip": 0.0,
        },
    },
    "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red circle", "clip": ["2", 1]}},
    "4": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["2", 1]}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 2}},
    "6": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["2", 0], "seed": 11, "steps": 8, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal",
            "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0], "denoise": 1.0,
        },
    },
    "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2]}},
    "8": {
        "class_type": "SaveImage",
        "inputs": {"images": ["7", 0], "filename_prefix": "test"},
        "_meta": {"title": "Save Image"},
    },
}  # fmt: skip

for _node in GRAPH.values():  # the client reads a title of every node
    _node.setdefault("_meta", {"title": _node["class_type"]})


def changed(**inputs: Any) -> dict[str, Any]:
    """The workflow with other inputs of its sampler."""
    graph = copy.deepcopy(GRAPH)
    graph["6"]["inputs"].update(inputs)
    return graph


def opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def test_the_simple_client_gets_the_images_of_a_workflow(server: str) -> None:
    client = ComfyApiWrapper(server)
    found = client.queue_and_wait_images(ComfyWorkflowWrapper(copy.deepcopy(GRAPH)), "Save Image")
    images = [opened(content) for content in found.values()]
    assert len(images) == 2
    assert all(matches(read_image(np.asarray(image)), "a red circle") for image in images)


def test_the_simple_client_uploads_an_image_to_start_from(server: str, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "start.png")
    client = ComfyApiWrapper(server)
    uploaded = client.upload_image(tmp_path / "start.png", "mine")
    graph = changed(latent_image=["10", 0], denoise=0.25)
    name = f"{uploaded['subfolder']}/{uploaded['name']}"
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": name}, "_meta": {"title": "Load"}}
    inputs = {"pixels": ["9", 0], "vae": ["1", 2]}
    graph["10"] = {"class_type": "VAEEncode", "inputs": inputs, "_meta": {"title": "Encode"}}
    (content,) = client.queue_and_wait_images(graph, "Save Image").values()
    pixel = opened(content).convert("RGB").getpixel((2, 2))
    assert pixel[2] > max(pixel[:2]), "the image is still blue"


def test_a_socket_hears_of_progress_and_of_the_images(server: str) -> None:
    async def talk() -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []
        async with websockets.connect(server.replace("http", "ws") + "/ws?clientId=me") as socket:
            heard.append(json.loads(await socket.recv()))
            body = {"prompt": changed(steps=12, seed=12), "client_id": "me"}
            answer = await asyncio.to_thread(requests.post, f"{server}/prompt", json=body, timeout=60)
            prompt_id = answer.json()["prompt_id"]
            while True:
                heard.append(json.loads(await socket.recv()))
                if heard[-1]["type"] == "executing" and heard[-1]["data"]["node"] is None:
                    assert heard[-1]["data"]["prompt_id"] == prompt_id
                    return heard

    heard = asyncio.run(talk())
    kinds = [message["type"] for message in heard]
    assert heard[0]["data"]["sid"] == "me"
    assert heard[0]["data"]["status"]["exec_info"]["queue_remaining"] == 0
    assert kinds.index("execution_start") < kinds.index("executed") < kinds.index("execution_success")
    steps = [message["data"] for message in heard if message["type"] == "progress"]
    assert all(data["node"] == "6" and data["value"] <= data["max"] == 12 for data in steps)
    executed = next(message["data"] for message in heard if message["type"] == "executed")
    assert executed["node"] == "8"
    for image in executed["output"]["images"]:
        assert opened(requests.get(f"{server}/view", params=image, timeout=60).content).size == (64, 64)


def test_a_workflow_that_runs_is_interrupted_and_one_that_waits_is_removed(server: str) -> None:
    long = changed(steps=900)
    long["5"]["inputs"].update(width=128, height=128, batch_size=1)
    first, second = (
        requests.post(f"{server}/prompt", json={"prompt": graph}, timeout=60).json()["prompt_id"]
        for graph in (long, {**long, "4": {**long["4"], "inputs": {"text": "blue", "clip": ["2", 1]}}})
    )
    while [entry[1] for entry in requests.get(f"{server}/queue", timeout=60).json()["queue_running"]] != [first]:
        pass
    assert requests.get(f"{server}/prompt", timeout=60).json() == {"exec_info": {"queue_remaining": 2}}
    requests.post(f"{server}/queue", json={"delete": [second]}, timeout=60)
    requests.post(f"{server}/interrupt", timeout=60)
    while any(requests.get(f"{server}/queue", timeout=60).json().values()):
        pass
    history = requests.get(f"{server}/api/history", timeout=60).json()
    assert history[first]["status"]["status_str"] == history[second]["status"]["status_str"] == "error"
    requests.post(f"{server}/history", json={"delete": [first, second]}, timeout=60)
    assert first not in requests.get(f"{server}/history", timeout=60).json()


def test_unknown_nodes_are_rejected_by_name(server: str) -> None:
    graph = {**GRAPH, "20": {"class_type": "FancySampler", "inputs": {"model": ["1", 0]}}}
    answer = requests.post(f"{server}/prompt", json={"prompt": graph}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "missing_node_type"
    assert answer.json()["node_errors"]["20"]["class_type"] == "FancySampler"


def test_wrong_values_are_reported_for_their_nodes(server: str) -> None:
    graph = changed(sampler_name="magic", steps=0)
    graph["1"]["inputs"]["ckpt_name"] = "other.safetensors"
    answer = requests.post(f"{server}/prompt", json={"prompt": graph}, timeout=60).json()
    assert answer["error"]["type"] == "prompt_outputs_failed_validation"
    kinds = {node: [error["type"] for error in found["errors"]] for node, found in answer["node_errors"].items()}
    assert kinds == {"1": ["value_not_in_list"], "6": ["value_smaller_than_min", "value_not_in_list"]}
    assert [found["dependent_outputs"] for found in answer["node_errors"].values()] == [["8"], ["8"]]
    (steps, sampler) = (error["extra_info"] for error in answer["node_errors"]["6"]["errors"])
    assert (steps["input_name"], steps["received_value"], steps["input_config"][1]["min"]) == ("steps", 0, 1)
    assert (sampler["received_value"], "euler" in sampler["input_config"][0]) == ("magic", True)


def test_nodes_are_described_with_the_names_of_the_pool(server: str) -> None:
    info = ComfyApiWrapper(server).get_object_info()
    assert info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"][0] == ["shapes"]
    assert info["KSampler"]["output"] == ["LATENT"]
    assert ComfyApiWrapper(server).get_object_info("SaveImage")["SaveImage"]["output_node"] is True
    assert ComfyApiWrapper(server).get_system_stats()["devices"]


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", ".hidden.png", "a/b.png"])
def test_uploads_stay_in_their_folder(server: str, name: str) -> None:
    content = BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    files = {"image": (name, content.getvalue())}
    answer = requests.post(f"{server}/upload/image", files=files, timeout=60)
    assert answer.status_code == 400, answer.text


def test_an_uploaded_image_is_found_under_its_shown_name(server: str, tmp_path: Path) -> None:
    """By the client, by /view, in /object_info, by workflows and in their history."""
    client, folder = ComfyApiWrapper(server), "M\u00e4rz"
    name = "Gr\u00fc\u00dfe \u732b @2x, #1 [2] at 9.44\u202fAM.png"
    Image.new("RGB", (64, 64), "blue").save(tmp_path / name)
    uploaded = client.upload_image(tmp_path / name, folder)
    assert uploaded == {"name": name, "subfolder": folder, "type": "input"}
    params = {"filename": name, "subfolder": folder, "type": "input"}
    assert opened(requests.get(f"{server}/view", params=params, timeout=60).content).size == (64, 64)
    listed = client.get_object_info("LoadImage")["LoadImage"]["input"]["required"]["image"][0]
    assert f"{folder}/{name}" in listed
    graph = started_from(f"{folder}/{name} [input]", denoise=0)
    assert client.queue_and_wait_images(graph, "Save Image")
    entries = requests.get(f"{server}/history", timeout=60).json().values()
    assert graph["9"] in [entry["prompt"][2].get("9") for entry in entries]


def started_from(name: str, **inputs: Any) -> dict[str, Any]:
    """The workflow with an uploaded image to start from."""
    graph = changed(latent_image=["10", 0], **inputs)
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": name}, "_meta": {"title": "Load"}}
    encode = {"pixels": ["9", 0], "vae": ["1", 2]}
    graph["10"] = {"class_type": "VAEEncode", "inputs": encode, "_meta": {"title": "Encode"}}
    return graph


def test_denoise_0_decodes_the_start(server: str) -> None:
    """The image after the VAE, as one step at almost no noise shows it; without an image, what zero latents are."""
    content = BytesIO()
    image = Image.new("RGB", (64, 64), "blue")
    image.paste("red", (16, 16, 48, 48))
    image.save(content, "PNG")
    files = {"image": ("start 0.png", content.getvalue())}
    assert requests.post(f"{server}/upload/image", files=files, timeout=60).status_code == 200

    def pixels(graph: dict[str, Any]) -> Any:
        found = ComfyApiWrapper(server).queue_and_wait_images(graph, "Save Image").values()
        return np.asarray(opened(next(iter(found))).convert("RGB")).astype(int)

    inputs: tuple[dict[str, Any], ...] = ({"denoise": 0}, {"denoise": 0, "seed": 3}, {"denoise": 0.002, "steps": 1})
    first, other_seed, nearly = (pixels(started_from("start 0.png", **each)) for each in inputs)
    assert (first == other_seed).all(), "there is no noise"
    assert abs(first - nearly).mean() < 12
    with load_checkpoint(ROOT / "examples/shapes/models/shapes.safetensors", device="cpu") as model:
        expected = model.decode(Latent(np.zeros((4, 8, 8), np.float32))).astype(int)
    assert abs(pixels(changed(denoise=0)) - expected).max() <= 1


def test_the_recipe_of_denoise_0_leads_to_the_same_output(server: str, real_pool: ModelPool) -> None:
    (content, *_) = ComfyApiWrapper(server).queue_and_wait_images(changed(denoise=0), "Save Image").values()
    recipe = recipe_from_text(texts_in(opened(content))[RECIPE_KEY])
    assert (recipe.pictures.first_step, recipe.steps) == (8, 8)
    (again,) = real_pool.recipes(requests_of(recipe, lambda name: name)[:1])
    assert not isinstance(again, UserError)
    assert differing_fields(recipe, again) == ()


def test_images_are_sent_over_the_web_socket(server: str) -> None:
    """As the example client of ComfyUI reads them: binary messages while the node is executing."""
    graph = changed(seed=21)
    graph["8"] = {"class_type": "SaveImageWebsocket", "inputs": {"images": ["7", 0]}}

    async def talk() -> tuple[str, list[bytes], list[str]]:
        frames, kinds, node = [], [], ""
        async with websockets.connect(server.replace("http", "ws") + "/ws?clientId=images", max_size=None) as socket:
            # previews would be binary messages, too
            body = {"prompt": graph, "client_id": "images", "extra_data": {"preview_method": "auto"}}
            answer = await asyncio.to_thread(requests.post, f"{server}/prompt", json=body, timeout=60)
            prompt_id = answer.json()["prompt_id"]
            while True:
                message = await socket.recv()
                if isinstance(message, bytes):
                    frames += [message] if node == "8" else []
                    continue
                heard = json.loads(message)
                kinds.append(heard["type"])
                if heard["type"] == "executing":
                    if heard["data"]["node"] is None:
                        return prompt_id, frames, kinds
                    node = heard["data"]["node"]

    prompt_id, frames, kinds = asyncio.run(talk())
    assert [frame[:8] for frame in frames] == [b"\0\0\0\x01\0\0\0\x02"] * 2, "an image, a PNG"
    images = [opened(frame[8:]) for frame in frames]
    assert all(matches(read_image(np.asarray(image)), "a red circle") for image in images)
    assert images[0].tobytes() != images[1].tobytes()
    assert "executed" not in kinds
    history = requests.get(f"{server}/history/{prompt_id}", timeout=60).json()[prompt_id]
    assert (history["outputs"], history["status"]["status_str"]) == ({}, "success")


def test_calls_about_the_server(tmp_path: Path) -> None:
    pool = RefusingPool()
    keys = {"ann": "a" * 20, "bob": "b" * 20}

    async def work() -> None:
        app = application(pool, ServeSection(keys=keys), tmp_path)

        async def asked(path: str, body: Any = None, user: str = "ann") -> Answer:
            headers = {"authorization": f"Bearer {keys[user]}"}
            method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
            return await call(app, method, path, content, headers)

        folders = (await asked("/models")).json
        assert {"checkpoints", "loras", "vae", "text_encoders", "clip_vision", "diffusion_models"} <= set(folders)
        for folder in (*folders, "unet", "clip"):
            plain = (await asked(f"/models/{folder}")).json
            with_sizes = (await asked(f"/experiment/models/{folder}")).json
            assert plain == [each["name"] for each in with_sizes], folder
        assert (await asked("/experiment/models")).json[0] == {"name": "checkpoints", "folders": ["checkpoints"]}
        assert [(await asked(f"{path}/nowhere")).status for path in ("/models", "/experiment/models")] == [404] * 2
        assert (await asked("/features")).json["max_upload_size"] == ServeSection().upload_bound_bytes
        assert (await asked("/extensions")).json == []
        assert (await asked("/users")).json["storage"] == "server"
        for body in ({}, {"unload_models": True, "free_memory": True}):
            assert (await asked("/free", body)).status == 200
        system = (await asked("/system_stats")).json["system"]
        wanted = {"os", "ram_total", "ram_free", "comfyui_version", "python_version", "pytorch_version", "argv"}
        assert (wanted <= set(system), system["argv"]) == (True, [])
        # each user has settings of its own
        assert (await asked("/settings", {"Comfy.Theme": "dark", "Comfy.X": 1})).status == 200
        assert (await asked("/settings/Comfy.Y", [1])).status == 200
        assert (await asked("/settings", {"Comfy.X": None})).status == 200
        assert (await asked("/settings")).json == {"Comfy.Theme": "dark", "Comfy.Y": [1]}
        assert (await asked("/settings/Comfy.Theme")).json == "dark"
        assert (await asked("/settings/nothing")).json is None
        assert (await asked("/settings", user="bob")).json == {}
        large = ["x" * 100_000] * 2
        assert [(await asked(f"/settings/{name}", large)).status for name in ("one", "two")] == [200, 413]
        assert (await asked("/settings", ["no object"])).status == 400

    asyncio.run(work())


def test_every_call_of_comfyui_has_the_same_answer_below_api(tmp_path: Path) -> None:
    """ComfyUI's own client calls the paths below /api; the calls of the page and of the native interface do too."""
    pool = RefusingPool()
    queries = {"/view": "filename=x.png"}

    async def answers() -> dict[tuple[str, str], tuple[Answer, Answer]]:
        app = application(pool, ServeSection(), tmp_path)
        paths = (await call(app, "GET", "/openapi.json")).json["paths"]
        listed = [(method.upper(), path) for path, calls in paths.items() for method in calls]
        routes = [(method, path) for method, path in listed if "comfyui" in paths[path][method.lower()]["tags"]]
        found = {}
        for method, path in routes:
            own = path.format(prompt_id="x", folder="loras", name="KSampler")
            both = [
                await call(app, method, prefix + own, b"{}", query=queries.get(path, "")) for prefix in ("", "/api")
            ]
            found[method, path] = both[0], both[1]
        return found

    found = asyncio.run(answers())
    assert len(found) >= 17
    for key, (plain, below) in found.items():
        assert (plain.status, plain.body) == (below.status, below.body), key
    assert found["GET", "/models/{folder}"][1].json == ["light"]
    assert found["GET", "/history/{prompt_id}"][1].json == {}
    assert asyncio.run(heard(pool, tmp_path)) == "status"


async def heard(pool: RefusingPool, folder: Path) -> str:
    """The kind of the first message of a socket below /api."""
    scope = {
        "type": "websocket", "path": "/api/ws", "raw_path": b"/api/ws", "query_string": b"", "root_path": "",
        "scheme": "ws", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "subprotocols": [],
    }  # fmt: skip
    told: list[dict[str, Any]] = [{"type": "websocket.connect"}]
    sent: list[dict[str, Any]] = []
    is_heard = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if told:
            return told.pop()
        await is_heard.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] != "websocket.accept":
            is_heard.set()

    await application(pool, ServeSection(), folder)(scope, receive, send)
    return json.loads(sent[1]["text"])["type"]


def test_history_takes_every_limit_that_clients_send(server: str) -> None:
    ids = []
    for seed in (31, 32, 33):
        body = {"prompt": changed(steps=1, seed=seed), "prompt_id": f"limits-{seed}"}
        ids.append(requests.post(f"{server}/prompt", json=body, timeout=60).json()["prompt_id"])
    while any(requests.get(f"{server}/queue", timeout=60).json().values()):
        pass
    for query, expected in (
        ("max_items=0", []), ("max_items=-1", ids), ("max_items=5000", ids), ("max_items=2", ids[1:]),
        ("max_items=1&offset=0", None), ("offset=1000", []),
    ):  # fmt: skip
        answer = requests.get(f"{server}/api/history?{query}", timeout=60)
        assert answer.status_code == 200, query
        found = list(answer.json())
        assert len(found) == 1 if expected is None else [each for each in found if each in ids] == expected, query


def test_a_cancelled_workflow_was_interrupted_in_the_history_too(server: str) -> None:
    long = changed(steps=900, seed=41)
    prompt_id = requests.post(f"{server}/prompt", json={"prompt": long}, timeout=60).json()["prompt_id"]
    while not requests.get(f"{server}/queue", timeout=60).json()["queue_running"]:
        pass
    requests.post(f"{server}/interrupt", timeout=60)
    while any(requests.get(f"{server}/queue", timeout=60).json().values()):
        pass
    status = requests.get(f"{server}/history/{prompt_id}", timeout=60).json()[prompt_id]["status"]
    kind, data = status["messages"][-1]
    assert (status["status_str"], status["completed"], kind) == ("error", False, "execution_interrupted")
    assert (data["node_type"], "exception_message" in data) == ("KSampler", False)


def test_a_mask_of_the_editor_becomes_the_alpha_channel_of_its_image(server: str) -> None:
    def sent(name: str, image: Image.Image, call: str, **fields: str) -> requests.Response:
        content = BytesIO()
        image.save(content, "PNG")
        files = {"image": (name, content.getvalue())}
        return requests.post(f"{server}/api/upload/{call}", files=files, data=fields, timeout=60)

    photo = sent("photo.png", Image.new("RGB", (8, 8), "blue"), "image").json()
    reference = {"filename": photo["name"], "subfolder": "", "type": "input"}
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    half.paste((0, 0, 0, 0), (0, 0, 4, 8))
    stored = sent("mask.png", half, "mask", subfolder="clipspace", original_ref=json.dumps(reference)).json()
    assert stored == {"name": "mask.png", "subfolder": "clipspace", "type": "input"}
    params = {"filename": "mask.png", "subfolder": "clipspace", "type": "input"}
    image = opened(requests.get(f"{server}/view", params=params, timeout=60).content)
    assert (image.getpixel((1, 1)), image.getpixel((6, 6))) == ((0, 0, 255, 0), (0, 0, 255, 255))
    unknown = json.dumps({**reference, "filename": "no.png"})
    for wrong, status in (("", 400), ("[]", 400), ('{"filename": 3}', 400), (unknown, 404)):
        assert sent("mask.png", half, "mask", original_ref=wrong).status_code == status, wrong
    small = sent("mask.png", half.resize((4, 4)), "mask", original_ref=json.dumps(reference))
    assert (small.status_code, "expected 8x8" in small.text) == (400, True)
