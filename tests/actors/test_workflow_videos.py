"""Videos of users are values of workflows: a run follows them as it follows the field of a request, to the last bit,
and operations change their frames before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.graph.workflow_recipe import request_of_workflow
from modelpool.pool.values.core.errors import UserError
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import write_transformer

CONFIG = Path(__file__).parents[2] / "configs" / "laptop.toml"
MODEL, WIDTH, HEIGHT, FRAMES = "wan_vace", 64, 48, 5
VIDEO = np.random.default_rng(3).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)
MASK = np.zeros((FRAMES, HEIGHT, WIDTH), np.uint8)
MASK[:, :, 16:] = 255
REQUEST: dict[str, Any] = {
    "model": MODEL, "prompt": "a red kite", "negative": "blurry", "steps": 2, "frames": FRAMES, "width": WIDTH,
    "height": HEIGHT, "seed": 5,
}  # fmt: skip


def workflow(nodes: dict[str, Any], **inputs: str) -> dict[str, Any]:
    sample = {"kind": "sample", "request": REQUEST, "inputs": inputs}
    decode = {"kind": "decode", "model": MODEL, "inputs": {"latent": "sample"}}
    return {"nodes": {**nodes, "sample": sample, "decode": decode}, "output": "decode"}


def operation(name: str, settings: dict[str, Any], **inputs: str) -> dict[str, Any]:
    return {"kind": "operation", "name": name, "settings": settings, "inputs": inputs}


def test_a_run_follows_a_video_of_a_node_as_one_of_its_request(tmp_path: Path) -> None:
    write_transformer(tmp_path / "models", MODEL)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    given = {"clip": {"kind": "video", "video": VIDEO}}
    inverted = operation("image_invert", {}, image="clip")
    masked = operation("mask_from_image", {"channel": "red"}, image="drawn")
    drawn = {"kind": "video", "video": np.repeat(MASK[..., None], 3, axis=3)}
    workflows = {
        "plain": workflow(given, video="clip"),
        "inverted": workflow({**given, "dark": inverted}, video="dark"),
        "masked": workflow({**given, "drawn": drawn, "area": masked}, video="clip", video_mask="area"),
    }
    requests = {
        "plain": {"video": VIDEO},
        "inverted": {"video": 255 - VIDEO},
        "masked": {"video": VIDEO, "video_mask": MASK},
    }
    with open_real_pool(config) as pool:
        wanted = [GenerateRequest(**REQUEST, **requests[name]) for name in requests]
        made = [GenerateRequest(workflow=workflows[name], seed=1) for name in requests]
        found = {each.index: each for each in pool.submit([*wanted, *made], output=tmp_path / "out").videos()}
        for place, name in enumerate(requests):
            np.testing.assert_array_equal(found[place].frames, found[place + len(requests)].frames, err_msg=name)
        assert not np.array_equal(found[0].frames, found[1].frames)
        assert not np.array_equal(found[0].frames, found[2].frames)
        one = {"clip": {"kind": "image", "image": VIDEO[0]}}
        with pytest.raises(UserError, match=r"node sample: video: found 'one image', expected frames"):
            list(pool.submit([GenerateRequest(workflow=workflow(one, video="clip"), seed=1)]).results())


def test_the_recipe_of_a_workflow_names_its_video(tmp_path: Path) -> None:
    write_transformer(tmp_path / "models", MODEL)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    frames = [tmp_path / f"{place}.png" for place in range(FRAMES)]
    for path, pixels in zip(frames, VIDEO, strict=True):
        Image.fromarray(pixels).save(path)
    gif = tmp_path / "clip.gif"
    first, *others = (Image.open(path) for path in frames)
    first.save(gif, save_all=True, append_images=others, duration=100, disposal=2)
    graph = workflow({"clip": {"kind": "video", "video": str(gif)}}, video="clip")
    with open_real_pool(config) as pool:
        (result,) = pool.submit([GenerateRequest(workflow=graph, seed=1)], output=tmp_path / "out").videos()
        (again,) = pool.submit([request_of_workflow(result.recipe, lambda file: str(tmp_path / file))]).videos()
    recorded = result.recipe.workflow
    assert recorded is not None
    assert list(recorded.nodes["clip"]["video"]) == ["sha256"]
    assert list(recorded.images.values()) == ["clip.gif"]
    np.testing.assert_array_equal(result.frames, again.frames)
