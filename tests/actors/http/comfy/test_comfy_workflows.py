"""A set of workflows in the layouts of common public ones (`workflows/*.json`, written for these tests): most are
accepted, and the others are refused by node and reason."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames

FOLDER = Path(__file__).parent / "workflows"
NAMES = PoolNames(
    {
        "sd15": "Stable Diffusion 1", "other": "Stable Diffusion 1", "sdxl": "Stable Diffusion XL",
        "sdxl_refiner": "the Stable Diffusion XL refiner", "sd3": "Stable Diffusion 3", "flux_dev": "Flux dev",
        "flux_schnell": "Flux schnell", "flux_fill": "Flux fill", "flux_kontext": "Flux dev",
        "qwen_image": "Qwen-Image", "qwen_edit": "Qwen-Image", "hidream": "HiDream I1", "z_image": "Z-Image",
        "lumina2": "Lumina 2", "chroma": "Chroma", "wan_t2v": "Wan text-to-video",
        "wan_i2v": "Wan 2.2 image-to-video", "wan_flf": "Wan 2.2 image-to-video",
        "hunyuan": "Hunyuan Video", "ltx": "LTX-Video", "mochi": "Mochi", "cosmos": "Cosmos text-to-video",
        "svd": "Stable Video Diffusion",
    },
    ["style", "light"],
    None,
    FileNames(controlnets=("canny", "depth"), upscalers=("4x",), image_prompts=("redux",), embeddings=()),
)  # fmt: skip
#: what the pool does not have, by workflow: the nodes that are named
REFUSED = {
    "unclip": {"12"},
}


def requests(path: Path) -> list[GenerateRequest]:
    prompt = json.loads(path.read_text())
    read = lambda name: Image.new("RGBA", (512, 512), (90, 60, 30, 128))  # noqa: E731
    return [one for output in outputs_of(prompt, NAMES) for one in requests_of(output, NAMES, read)]


def test_workflows_are_accepted_or_refused_by_node() -> None:
    """80 of 81 here; 39 before requests had workflows, and nodes were operations."""
    accepted, refused, unexplained = [], dict[str, set[str]](), []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            found = requests(path)
        except WorkflowRejected as rejected:
            unexplained += [(path.stem, error.node_id) for error in rejected.errors if not error.details]
            refused[path.stem] = {error.node_id for error in rejected.errors}
        else:
            assert found, path.stem
            accepted.append(path.stem)
    assert refused == REFUSED
    assert len(accepted) >= 80
    assert not unexplained


def test_one_request_where_it_suffices_and_a_workflow_elsewhere() -> None:
    """Ids of what requests could always say stay what they were."""
    with_workflow = {
        path.stem
        for path in FOLDER.glob("*.json")
        if path.stem not in REFUSED and any(one.workflow is not None for one in requests(path))
    }
    plain = {"text_to_image", "lora", "hires_latent", "inpaint", "flux_redux", "controlnet", "wan_text_to_video"}
    assert not plain & with_workflow
    assert {"sdxl_base_and_refiner", "three_passes", "average", "latent_composite", "paste_with_masks"} <= with_workflow
