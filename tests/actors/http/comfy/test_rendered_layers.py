"""References in workflows are read: a ComfyUI workflow that splits an image into layers makes the layers of the plain
request, byte for byte. Before, images that nodes of a workflow lead to `reference` were left out without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode
from tests.actors.http.comfy.test_public_kinds import CONFIG, photo, requests, small
from tests.actors.http.comfy.written_workflows import written_workflows
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.definitions.test_qwen_image_layered import TINY
from tests.pool.families.tiny_pairs import write_tokenizers

NAME = "qwen_image_layered"


def test_layers_of_a_workflow_are_the_layers_of_a_request(tmp_path: Path) -> None:
    save_file(TINY.file(), tmp_path / f"{NAME}.safetensors")
    write_tokenizers(tmp_path, TINY)
    (written,) = [each for each in written_workflows() if each.name == "layers_of_an_image_editor"]
    names = PoolNames({NAME: "Qwen-Image layered"}, [], image_size=lambda name: (64, 64))
    made = requests(small(api_format(written.prompt)), names)
    assert [_operation(each).settings for each in made] == [{"start": 0, "length": 1}, {"start": 1, "length": 1}]
    (run,) = made[0].workflow.samplings if made[0].workflow else ()
    fields = ("model", "prompt", "negative", "seed", "steps", "cfg", "sampler", "schedule", "shift", "frames")
    shown = photo("a.png").convert("RGB")
    plain = {name: getattr(run.request, name) for name in fields}
    wanted = [GenerateRequest(**plain, width=64, height=64, reference=shown), *made]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        found: dict[int, Any] = {one.index: one for one in pool.submit(wanted).results()}
    whole = found[0].frames
    for place in (0, 1):
        np.testing.assert_array_equal(found[1 + place].pixels, whole[place])


def _operation(request: GenerateRequest) -> OperationNode:
    assert request.workflow is not None
    node = request.workflow.nodes[request.workflow.output]
    assert isinstance(node, OperationNode)
    return node
