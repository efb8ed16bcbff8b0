"""Families that no node knows by name, through nodes of ComfyUI: what they make is what a request makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.control_video_fields import read_frames
from tests.actors.http.comfy import test_videos_of_users as of_users
from tests.actors.http.comfy.comfy_examples import basic, node
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.definitions import test_lucy_edit, test_sana_video
from tests.pool.families.tiny_pairs import write_tokenizers

TINY = {"lucy": test_lucy_edit.TINY, "sana": test_sana_video.CASES["sana_video"].tiny}
SIZE: dict[str, Any] = {"width": 64, "height": 96}


def test_videos_of_new_families_are_those_of_requests(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads")
    uploads.add("", "clip.mp4", of_users.clip())
    for name, tiny in TINY.items():
        (tmp_path / "models" / name).mkdir(parents=True)
        save_file(tiny.file(), tmp_path / "models" / name / f"{name}.safetensors")
        write_tokenizers(tmp_path / "models" / name, tiny)
    known = replace(of_users.names(uploads), models={"lucy": "Lucy Edit", "sana": "Sana Video"})
    edited = of_users.following("Wan22FunControlToVideo", "lucy", control_video=["parts", 0])
    edited["blank"]["inputs"] |= SIZE
    plain = basic("sana", steps=2, cfg=5.0)
    plain["blank"] = node("EmptyHunyuanLatentVideo", **SIZE, length=5, batch_size=1)
    plain["made"] = node("CreateVideo", images=["decoded", 0], fps=16.0)
    plain["saved"] = node("SaveVideo", video=["made", 0], filename_prefix="v", format="auto", codec="auto")
    made = []
    for graph in (edited, plain):
        (output,) = outputs_of(graph, known)
        assert output.warnings == ()
        made += requests_of(output, known, lambda name: Image.new("RGB", (64, 48)))
    frames = np.stack(list(read_frames("video", uploads.video("", "clip.mp4").path, False)))
    fields = {
        "prompt": "a red circle", "negative": "blurry", "steps": 2, "frames": 5, "cfg": 5.0, "seed": 5, **SIZE,
        "schedule": "normal",
    }  # fmt: skip
    wanted = [GenerateRequest(model="lucy", video=frames, **fields), GenerateRequest(model="sana", **fields)]
    config = PoolConfig.load(of_users.CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    with open_real_pool(config) as pool:
        found = {each.index: each for each in pool.submit([*wanted, *made], output=tmp_path / "out").videos()}
    for place in range(2):
        np.testing.assert_array_equal(found[place].frames, found[place + 2].frames)
    assert np.ptp(found[0].frames) > 0
    assert np.ptp(found[1].frames) > 0
