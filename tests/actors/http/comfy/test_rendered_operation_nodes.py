"""Every node that is an operation renders in a pool with real engines and a tiny model: what it makes of a generated
image is what the operation makes of the same pixels; animations are files that other readers open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool import PoolConfig, VideoResult
from modelpool.actors.http.comfy.comfy_operation_nodes import OPERATION_BUILDERS
from modelpool.actors.request.workflow_fields import DecodeNode, OperationNode, Workflow
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.values.core.stage_params import ImagePixels, VideoFrames
from tests.actors.http.comfy.comfy_examples import basic, node
from tests.actors.http.comfy.test_comfy_operation_nodes import graph_of, requests
from tests.actors.loop_connection import open_real_pool
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PoolConfig:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(folder / "shapes.safetensors", 3, layout=layouts.tiny_sd1())
    return PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1)


def made_of(workflow: Workflow, node_id: str, decoded: ImagePixels) -> Any:
    """The result of a node of a workflow, of which `decoded` is the only decoded image; None if it has latents that are
    changed."""
    found = workflow.nodes[node_id]
    if isinstance(found, DecodeNode):
        return decoded if found.inputs["latent"] == "sampler" else None
    if not isinstance(found, OperationNode):
        return None
    inputs = {name: made_of(workflow, source, decoded) for name, source in found.inputs.items()}
    if any(value is None for value in inputs.values()):
        return None
    operation = operation_named(found.name)
    return operation(operation.params_of(found.settings), inputs)


def test_every_node_renders_what_its_operation_makes(config: PoolConfig, tmp_path: Path) -> None:
    wanted = {name: requests(graph_of(name))[0] for name in OPERATION_BUILDERS}
    animated = [name for name, request in wanted.items() if request.format == "webp"]
    (base,) = requests(basic())
    slow = basic()
    slow["twice"] = node("ImageBatch", image1=["decoded", 0], image2=["turned", 0])
    slow["turned"] = node("ImageInvert", image=["decoded", 0])
    slow["saved"] = node("SaveWEBM", images=["twice", 0], filename_prefix="a", codec="vp9", fps=5.0, crf=32.0)
    with open_real_pool(config) as pool:
        (image,) = pool.submit([base]).images()
        decoded = ImagePixels(image.pixels)
        results = {
            one.index: one for one in pool.submit([*wanted.values(), *requests(slow)], output=tmp_path).results()
        }
    compared, wrong = 0, []
    for place, (name, request) in enumerate(wanted.items()):
        result: Any = results[place]
        assert request.workflow is not None
        expected = made_of(request.workflow, request.workflow.output, decoded)
        if expected is None:
            assert np.ptp(result.pixels) > 0, name
            continue
        compared += 1
        found = result.frames if isinstance(expected, VideoFrames) else result.pixels
        want = expected.frames_THWC if isinstance(expected, VideoFrames) else expected.pixels_HWC
        if not np.array_equal(found, want):
            wrong.append(name)
    assert not wrong
    assert compared >= 25
    assert animated == ["ImageBatch", "RepeatImageBatch"]
    for place, name in enumerate(wanted):
        video = results[place]
        if name in animated:
            assert isinstance(video, VideoResult)
            assert video.path is not None
            with Image.open(str(video.path)) as opened:
                assert (opened.format, opened.size) == ("WEBP", (64, 64))
                assert np.abs(np.asarray(opened.convert("RGB")).astype(int) - video.frames[0]).max() == 0, "lossless"
    import av

    webm = results[len(wanted)]
    assert isinstance(webm, VideoResult)
    with av.open(str(webm.path)) as container:
        (stream,) = container.streams.video
        assert (stream.codec_context.name, stream.average_rate, stream.width) == ("vp9", 5, 64)
