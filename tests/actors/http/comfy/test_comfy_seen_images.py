"""Images of unCLIPConditioning are those that a model varies: one as it is, several with strength and noise. Models
that read none are refused: such an image would become the start of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import own_folder
from tests.pool.families.test_seen_next_to_texts import vision_of
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"


def seeing(*numbers: tuple[float, float]) -> Graph:
    graph: dict[str, Any] = basic()
    before = "positive"
    for place, (strength, noise) in enumerate(numbers):
        graph |= {
            f"photo{place}": node("LoadImage", image=f"{place}.png"),
            f"seen{place}": node("CLIPVisionEncode", clip_vision=["encoder", 0], image=[f"photo{place}", 0]),
            f"text{place}": node("unCLIPConditioning", conditioning=[before, 0], clip_vision_output=[f"seen{place}", 0],
                                 strength=strength, noise_augmentation=noise),
        }  # fmt: skip
        before = f"text{place}"
    graph["encoder"] = node("CLIPVisionLoader", clip_name="vision.safetensors")
    graph["sampler"]["inputs"]["positive"] = [before, 0]
    return graph


def request(graph: Graph, title: str = "Stable Diffusion 2.1 unCLIP H") -> GenerateRequest:
    names = PoolNames({"shapes": title}, [], None, FileNames())
    read = lambda name: Image.new("RGBA", (64, 64), (int(name[0]), 0, 0, 255))  # noqa: E731
    (found,) = [one for output in outputs_of(graph, names) for one in requests_of(output, names, read)]
    return found


def test_one_image_as_it_is_is_the_image_of_the_request() -> None:
    found = request(seeing((1.0, 0.0)))
    assert found.image is not None
    assert not found.image_prompts


def test_other_images_have_their_strength_and_noise() -> None:
    """Before: a strength below 1 and a second image were refused, and noise was left out."""
    found = request(seeing((0.5, 0.4), (0.75, 0.0)))
    assert found.image is None
    assert [(each.model, each.strength, each.noise) for each in found.image_prompts] == [
        ("shapes", 0.5, 0.4), ("shapes", 0.75, 0.0),
    ]  # fmt: skip
    assert found.image_prompts[0].image.sha256 != found.image_prompts[1].image.sha256
    assert request(seeing((1.0, 0.1))).image_prompts[0].noise == 0.1
    assert request(seeing((1.0, 0.0), (0.0, 0.5))).image is not None, "one of strength 0 is none"
    graph = seeing((0.5, 0.4), (0.75, 0.0))
    graph["tile"] = node("LatentFlip", samples=["sampler", 0], flip_method="x-axis: vertically")
    graph["decoded"]["inputs"]["samples"] = ["tile", 0]
    of_nodes = request(graph)
    assert of_nodes.workflow is not None
    (sampling,) = of_nodes.workflow.samplings
    assert [(each.strength, each.noise) for each in sampling.request.image_prompts] == [(0.5, 0.4), (0.75, 0.0)]


def test_images_for_stable_diffusion_xl_are_its_image_prompts_with_their_encoder() -> None:
    """Before: they were refused. With one of strength 1 and no noise, too, the image is no start."""
    found = request(seeing((1.0, 0.0)), "Stable Diffusion XL")
    assert found.image is None
    (prompt,) = found.image_prompts
    assert (prompt.model, prompt.encoder, prompt.strength, prompt.noise) == ("shapes", "vision", 1.0, 0.0)
    several = request(seeing((0.75, 0.1), (0.5, 0.0)), "Stable Diffusion XL").image_prompts
    assert [(each.strength, each.noise) for each in several] == [(0.75, 0.1), (0.5, 0.0)]
    graph = seeing((0.75, 0.0), (0.75, 0.0))
    graph["zero"] = node("ConditioningZeroOut", conditioning=["positive", 0])
    graph["text0"]["inputs"]["conditioning"] = ["zero", 0]
    zeroed = request(graph, "Stable Diffusion XL").workflow
    assert zeroed is not None
    (sampling,) = zeroed.samplings
    assert [(each.encoder, each.strength) for each in sampling.request.image_prompts] == [("vision", 0.75)] * 2
    kinds = {name: getattr(each, "name", "") for name, each in zeroed.nodes.items()}
    assert "encoded_zero" in kinds.values()


def test_a_zeroed_text_with_images_renders_with_stable_diffusion_xl(tmp_path: Path) -> None:
    folder = own_folder(tmp_path, "models")
    write_tiny_checkpoint(folder / "shapes.safetensors", seed=2, dtype=torch.float32, layout=layouts.tiny_sdxl())
    save_file(dict(vision_of(32).state_dict()), folder / "vision.safetensors")
    graphs = [seeing((0.75, 0.0), (0.75, 0.0)), seeing((0.75, 0.0))]
    for graph in graphs:
        graph["zero"] = node("ConditioningZeroOut", conditioning=["positive", 0])
        graph["text0"]["inputs"]["conditioning"] = ["zero", 0]
        graph["sampler"]["inputs"]["steps"] = 2
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, vram="512 MiB")
    wanted = [request(graph, "Stable Diffusion XL") for graph in graphs]
    with open_real_pool(config) as pool:
        sent = [pool.submit([one], output=tmp_path / str(place)) for place, one in enumerate(wanted)]
        images = [np.asarray(Image.open(next(iter(jobs.results())).path)) for jobs in sent]
    assert not np.array_equal(*images)


@pytest.mark.parametrize("title", ["Stable Diffusion 1", "Stable Cascade B", "Flux dev"])
def test_an_image_for_a_model_that_varies_none_is_refused(title: str) -> None:
    """Before: with strength 1 it became the start of the image, without a word."""
    with pytest.raises((WorkflowRejected, UserError), match=r"found an image for model|not valid"):
        request(seeing((1.0, 0.0)), title)
    graph = seeing((1.0, 0.0))
    graph["sampler"]["inputs"] |= {"positive": ["positive", 0], "negative": ["text0", 0]}
    with pytest.raises((WorkflowRejected, UserError)):
        request(graph)
