"""The two samplers of Stable Cascade are one request with a decoder, or a workflow with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames, WorkflowOutput
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import SampleNode, Workflow
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.tiny_cascade import STAGE_B, STAGE_C, encoding_stage_c_file, write_files

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


def request_list(graph: Graph) -> list[GenerateRequest]:
    read = lambda name: Image.linear_gradient("L").resize((256, 192)).convert("RGBA")  # noqa: E731
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]


def request(graph: Graph) -> GenerateRequest:
    (found,) = request_list(graph)
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
    # the levels of stage C in ComfyUI; the pool's equal the published pipeline's
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


def workflow_of(graph: Graph) -> Workflow:
    """The workflow of a graph that no request without one can say."""
    found = request(graph).workflow
    assert found is not None
    return found


def changed(**changes: dict[str, Any]) -> Graph:
    graph = cascade()
    for name, inputs in changes.items():
        graph[name]["inputs"] |= inputs
    return graph


def test_what_stable_cascade_cannot_generate_is_refused() -> None:
    cases = {
        "found 300x256, expected multiples of 8": changed(blank={"width": 300}),
        "found a latent of stage C, expected one of the sampler of stage B": changed(
            decoded={"samples": ["sampler", 0]}
        ),
        "Stable Diffusion 1, expected": changed(b={"ckpt_name": "sd15.safetensors"}),
        "latent_image: expected empty latents of": changed(sampler={"latent_image": ["blank", 1], "steps": 4}),
        "reads texts of StableCascade_StageB_Conditioning": changed(sampler_b={"positive": ["positive", 0]}),
        "stage_c: expected the latents of a sampler": changed(for_b={"stage_c": ["blank", 0]}),
    }
    for expected, graph in cases.items():
        with pytest.raises((WorkflowRejected, UserError)) as refused:
            request(graph)
        errors = refused.value.errors if isinstance(refused.value, WorkflowRejected) else ()
        texts = [str(refused.value), *(error.details for error in errors)]
        assert any(expected in text for text in texts), (expected, texts)


def test_what_one_request_cannot_say_is_a_workflow_of_both_samplers() -> None:
    """Before: it was refused."""
    cases = {
        "other cells": (changed(blank={"compression": 32}), (688, 344, 512, 256)),
        "no multiple of 128": (changed(blank={"width": 648, "height": 504}), (640, 512, 648, 504)),
        "another negative text": (changed(sampler_b={"negative": ["positive", 0]}), (512, 256, 512, 256)),
    }
    for case, (graph, sizes) in cases.items():
        nodes = workflow_of(graph).nodes
        first, second = nodes["sampler"], nodes["sampler_b"]
        assert isinstance(first, SampleNode)
        assert isinstance(second, SampleNode)
        found = (first.request.width, first.request.height, second.request.width, second.request.height)
        assert found == sizes, case
        assert (first.request.shift, second.request.shift) == (2.0, None)
        assert second.inputs["prior"] == "sampler"
        assert nodes[second.inputs["positive"]].model == STAGE_C, "stage B reads a text of stage C"
    batch = request_list(changed(blank={"batch_size": 2}))
    assert [each.workflow.nodes["sampler"].request.seed for each in batch] == [5, 6]


def with_image(strength: float = 0.6, compression: int = 32) -> Graph:
    graph = cascade()
    graph["photo"] = node("LoadImage", image="photo.png")
    vae = ["model", 2]
    graph["blank"] = node("StableCascade_StageC_VAEEncode", image=["photo", 0], vae=vae, compression=compression)
    graph["sampler"]["inputs"]["denoise"] = strength
    return graph


def test_an_image_that_stage_c_begins_with_is_a_workflow() -> None:
    """Before: it was refused."""
    nodes = workflow_of(with_image()).nodes
    assert nodes["blank"].model_dump() == {"inputs": {"image": "blank/scaled"}, "kind": "encode", "model": STAGE_C}
    scaled = nodes["blank/scaled"]
    assert (scaled.name, scaled.settings) == ("image_scale_to_cells", {"compression": 32, "cell": 32})
    first, second = nodes["sampler"], nodes["sampler_b"]
    assert (first.inputs["latent"], first.first_step) == ("blank", 2), "0.6 of 3 steps"
    assert second.inputs["size"] == scaled.inputs["image"], "stage B has the size of the image"
    assert (second.request.width, "latent" in second.inputs) == (None, False)


def test_both_checkpoints_of_one_loader_are_those_of_two() -> None:
    graph, loader = with_images(), "StableCascade_CheckpointLoader //Inspire"
    names = {"stage_b": f"{STAGE_B}.safetensors", "stage_c": f"{STAGE_C}.safetensors"}
    graph["both"] = node(loader, **names, key_opt_b="", key_opt_c="", cache_mode="all")
    places = {("b", 0): 0, ("b", 2): 1, ("model", 0): 2, ("model", 2): 3, ("vision", 3): 4, ("model", 1): 5}
    expected = request(graph)
    for each in graph.values():
        each["inputs"] |= {
            name: ["both", places[tuple(value)]]
            for name, value in each["inputs"].items()
            if isinstance(value, list) and tuple(value) in places
        }
    for name in ("b", "model", "vision"):
        del graph[name]
    found = request(graph)
    assert (found.model, found.decoder, found.shift, found.prompt, found.negative) == (
        expected.model, expected.decoder, expected.shift, expected.prompt, expected.negative,
    )  # fmt: skip
    assert [each.model for each in found.image_prompts] == [STAGE_C]


def test_the_levels_of_a_node_are_those_of_stage_c() -> None:
    graph = cascade()
    graph["shifted"] = node("ModelSamplingStableCascade", model=["model", 0], shift=1.5)
    graph["sampler"]["inputs"]["model"] = ["shifted", 0]
    assert request(graph).shift == 1.5
    graph["sampler_b"]["inputs"]["negative"] = ["positive", 0]
    assert workflow_of(graph).nodes["sampler"].request.shift == 1.5


def test_a_shift_of_zero_is_refused() -> None:
    """Before: the model kept its own."""
    graph = cascade()
    graph["shifted"] = node("ModelSamplingStableCascade", model=["model", 0], shift=0.0)
    graph["sampler"]["inputs"]["model"] = ["shifted", 0]
    with pytest.raises(WorkflowRejected, match=r"shift.*0\.01"):
        request(graph)


def test_it_renders_with_the_seed_of_each_sampler(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_files(folder, encoding_stage_c_file())
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, vram="512 MiB")
    graphs = (
        cascade(), cascade(), cascade(seed=10), with_images(), with_image(), with_image(0.3),
        changed(blank={"compression": 32}),
    )  # fmt: skip
    wanted = [request(each) for each in graphs]
    (output,) = outputs_of(cascade(), NAMES)
    assert isinstance(output, WorkflowOutput)
    assert output.as_graph is not None
    wanted += requests_of(output.as_graph(), NAMES, lambda name: Image.new("RGBA", (8, 8)))
    assert wanted[-1].workflow is not None
    with open_real_pool(config) as pool:
        sent = (pool.submit([one], output=tmp_path / str(place)) for place, one in enumerate(wanted))
        images = [np.asarray(Image.open(next(iter(jobs.results())).path)) for jobs in sent]
    assert images[0].shape == (256, 512, 3)
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[3]), "stage C reads the image"
    assert images[4].shape == (192, 256, 3), "the size of the image"
    assert not np.array_equal(images[4], images[5]), "the strength acts"
    assert images[6].shape == (256, 512, 3)
    assert not np.array_equal(images[6], images[0]), "stage C has other cells"
    assert np.array_equal(images[7], images[0]), "a workflow of both samplers is what one request is"
