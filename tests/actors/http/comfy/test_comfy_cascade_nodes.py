"""The two samplers of Stable Cascade are one request with a decoder; other graphs of its nodes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.tiny_cascade import STAGE_B, STAGE_C, seeing_stage_c_file, write_files

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
NAMES = PoolNames({STAGE_C: "Stable Cascade C", STAGE_B: "Stable Cascade B", "sd15": "Stable Diffusion 1"}, ["style"],
                  None, FileNames())  # fmt: skip


def cascade(**of_b: Any) -> Graph:
    graph = basic(STAGE_C, cfg=4.0, sampler_name="euler_ancestral", scheduler="simple", steps=3)
    graph["blank"] = node("StableCascade_EmptyLatentImage", width=512, height=256, compression=42, batch_size=1)
    graph["b"] = node("CheckpointLoaderSimple", ckpt_name=f"{STAGE_B}.safetensors")
    graph["for_b"] = node("StableCascade_StageB_Conditioning", conditioning=["positive", 0], stage_c=["sampler", 0])
    graph["sampler_b"] = node(
        "KSampler",
        **{
            "model": ["b", 0], "positive": ["for_b", 0], "negative": ["negative", 0], "latent_image": ["blank", 1],
            "seed": 9, "steps": 2, "cfg": 1.1, "sampler_name": "euler_ancestral", "scheduler": "karras",
            "denoise": 1.0, **of_b,
        },
    )  # fmt: skip
    graph["decoded"]["inputs"] = {"samples": ["sampler_b", 0], "vae": ["b", 2]}
    return graph


def request(graph: Graph) -> GenerateRequest:
    read = lambda name: Image.new("RGBA", (64, 64))  # noqa: E731
    (found,) = [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]
    return found


def test_both_samplers_are_one_request_with_a_decoder() -> None:
    found = request(cascade())
    assert (found.model, found.seed, found.steps, found.cfg, found.width, found.height) == (
        STAGE_C,
        5,
        3,
        4.0,
        512,
        256,
    )
    # the levels of stage C in ComfyUI; the pool's are those of the published pipeline
    assert found.shift == 2.0
    assert found.decoder is not None
    assert found.decoder.model_dump() == {
        "model": STAGE_B, "steps": 2, "cfg": 1.1, "seed": 9, "sampler": "euler_ancestral", "schedule": "karras",
    }  # fmt: skip


def with_images(strengths: tuple[float, ...] = (1.0,), noise: float = 0.0, encoder: str = "") -> Graph:
    graph = cascade()
    graph["vision"] = (
        node("CLIPVisionLoader", clip_name=f"{encoder}.safetensors")
        if encoder
        else node("unCLIPCheckpointLoader", ckpt_name=f"{STAGE_C}.safetensors")
    )
    text = "positive"
    for place, strength in enumerate(strengths):
        graph[f"photo{place}"] = node("LoadImage", image=f"{place}.png")
        graph[f"seen{place}"] = node(
            "CLIPVisionEncode", clip_vision=["vision", 0 if encoder else 3], image=[f"photo{place}", 0], crop="center"
        )
        graph[f"text{place}"] = node(
            "unCLIPConditioning", conditioning=[text, 0], clip_vision_output=[f"seen{place}", 0], strength=strength,
            noise_augmentation=noise,
        )  # fmt: skip
        text = f"text{place}"
    graph["sampler"]["inputs"]["positive"] = [text, 0]
    return graph


def test_images_next_to_the_text_are_image_prompts_of_stage_c() -> None:
    """Before: they were refused."""
    found = request(with_images((1.0, 0.5)))
    assert [(each.model, each.strength, each.encoder) for each in found.image_prompts] == [
        (STAGE_C, 1.0, ""), (STAGE_C, 0.5, ""),
    ]  # fmt: skip
    assert found.image is None, "an image is not where stage C starts"
    (named,) = request(with_images(encoder="clip_vision_l")).image_prompts
    assert named.encoder == "clip_vision_l"
    output = next(iter(outputs_of(with_images(noise=0.4), NAMES)))
    assert any("noise_augmentation: found 0.4, which is not read" in each for each in output.warnings)
    graph = with_images()
    graph["for_b"]["inputs"]["conditioning"] = ["text0", 0]
    assert request(graph).image_prompts, "stage B reads no images, whichever text it has"


def test_what_one_request_cannot_say_is_refused() -> None:
    cases: dict[str, tuple[Graph, dict[str, Any]]] = {
        "found 512x256 at 32, 16x8 cells; expected": (cascade(), {"blank": {"compression": 32}}),
        "found 300x256 at 42": (cascade(), {"blank": {"width": 300}}),
        "the texts of stage C": (cascade(), {"sampler_b": {"negative": ["positive", 0]}}),
        "expected the empty latents of one image": (cascade(), {"blank": {"batch_size": 2}}),
        "denoise: expected 1": (cascade(), {"sampler_b": {"denoise": 0.0}}),
        "found more than its two samplers": (cascade(), {"decoded": {"samples": ["sampler", 0]}}),
        "expected Stable Cascade C and Stable Cascade B": (cascade(), {"b": {"ckpt_name": "sd15.safetensors"}}),
    }
    for expected, (graph, changes) in cases.items():
        for name, inputs in changes.items():
            graph[name]["inputs"] |= inputs
        with pytest.raises((WorkflowRejected, UserError)) as refused:
            request(graph)
        errors = refused.value.errors if isinstance(refused.value, WorkflowRejected) else ()
        texts = [str(refused.value), *(error.details for error in errors)]
        assert any(expected in text for text in texts), (expected, texts)


def test_it_renders_with_the_seed_of_each_sampler(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_files(folder, seeing_stage_c_file())
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, vram="512 MiB")
    wanted = [request(each) for each in (cascade(), cascade(), cascade(seed=10), with_images())]
    with open_real_pool(config) as pool:
        sent = (pool.submit([one], output=tmp_path / str(place)) for place, one in enumerate(wanted))
        images = [np.asarray(Image.open(next(iter(jobs.results())).path)) for jobs in sent]
    assert images[0].shape == (256, 512, 3)
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[3]), "stage C reads the image"
