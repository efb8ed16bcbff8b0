"""Nodes that merge models are further models of a request, each with its way and its shares by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from modelpool import PoolConfig
from modelpool.actors.graph.recipe_request import requests_of as requests_of_recipe
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import own_folder
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
TITLE = "Stable Diffusion 1"
NAMES = PoolNames({"shapes": TITLE, "other": TITLE, "third": TITLE}, ["style"], None, FileNames())


def request(graph: Graph) -> GenerateRequest:
    (found,) = [one for output in outputs_of(graph, NAMES)
                for one in requests_of(output, NAMES, lambda name: Image.new("RGBA", (64, 64)))]  # fmt: skip
    return found


def merged(kind: str, **inputs: Any) -> Graph:
    graph = basic()
    graph["other"] = node("CheckpointLoaderSimple", ckpt_name="other.safetensors")
    graph["merged"] = node(kind, model1=["model", 0], model2=["other", 0], **inputs)
    graph["sampler"]["inputs"]["model"] = ["merged", 0]
    return graph


def test_models_that_are_merged_are_models_of_the_request() -> None:
    """Before: refused. The text encoders of the first model stay."""
    cases = {
        "ModelMergeSimple": ({"ratio": 0.75}, {"strength": 0.25, "merge": "mix"}),
        "ModelMergeAdd": ({}, {"strength": 1.0, "merge": "add"}),
        "ModelMergeSubtract": ({"multiplier": 0.5}, {"strength": 0.5, "merge": "subtract"}),
        "ModelMergeBlocks": (
            {"input": 1.0, "middle": 0.75, "out": 0.5},
            {"strength": 1.0, "merge": "mix", "blocks": (
                ("HEAD", 0.5), ("IN", 0.0), ("LABEL", 0.0), ("MID", 0.25), ("OTHER", 0.0), ("OUT", 0.5), ("TIME", 0.0),
            )},
        ),
    }  # fmt: skip
    for kind, (inputs, expected) in cases.items():
        found = request(merged(kind, **inputs))
        (lora,) = found.loras
        assert found.workflow is None
        assert found.model == "shapes", kind
        assert {name: getattr(lora, name) for name in expected} == expected, kind
        assert (lora.name, lora.text_strength, lora.file_kind) == ("other", 0.0, "model"), kind


def test_a_merge_of_text_encoders_and_a_chain_keep_their_order() -> None:
    graph = merged("ModelMergeSubtract", multiplier=1.0)
    graph["third"] = node("CheckpointLoaderSimple", ckpt_name="third.safetensors")
    graph["light"] = node("LoraLoader", model=["merged", 0], clip=["model", 1], lora_name="style", strength_model=0.5,
                          strength_clip=0.5)  # fmt: skip
    graph["sum"] = node("ModelMergeAdd", model1=["light", 0], model2=["third", 0])
    graph["texts"] = node("CLIPMergeSimple", clip1=["light", 1], clip2=["third", 1], ratio=0.25)
    graph["sampler"]["inputs"]["model"] = ["sum", 0]
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["texts", 0]
    found = request(graph)
    assert found.workflow is not None
    (sampling,) = found.workflow.samplings
    assert [(each.name, each.strength, each.merge) for each in sampling.request.loras] == [
        ("other", 1.0, "subtract"), ("style", 0.5, ""), ("third", 1.0, "add"),
    ]  # fmt: skip
    text = found.workflow.nodes[sampling.inputs["positive"]]
    assert [(each.name, each.strength, each.merge) for each in text.loras] == [
        ("style", 0.5, ""),
        ("third", 0.75, "mix"),
    ]
    assert set(text.names()) == {("model", "shapes"), ("lora", "style"), ("model", "third")}


def test_a_merge_of_what_is_no_file_is_refused_by_its_node() -> None:
    graph = merged("ModelMergeSimple", ratio=0.5)
    graph["light"] = node("LoraLoaderModelOnly", model=["other", 0], lora_name="style", strength_model=0.5)
    graph["merged"]["inputs"]["model2"] = ["light", 0]
    for changed, expected in ((graph, "found a model with style"),
                              (merged("ModelMergeSubtract", multiplier=0.0), "found 0")):  # fmt: skip
        with pytest.raises(WorkflowRejected) as refused:
            request(changed)
        (error,) = refused.value.errors
        assert error.node_id == "merged"
        assert expected in error.details


def test_a_merged_model_generates_the_images_of_a_file_with_the_merged_weights(tmp_path: Path) -> None:
    """Both through a pool; weights and texts of the recipe can be found again."""
    folder = tmp_path / "models"
    for name, seed in (("shapes", 1), ("other", 2)):
        path = own_folder(folder, name) / f"{name}.safetensors"
        write_tiny_checkpoint(path, seed=seed, dtype=torch.float32, layout=layouts.tiny_sd1())
    one, two = (load_file(folder / name / f"{name}.safetensors") for name in ("shapes", "other"))
    unet = "model.diffusion_model."
    mixed = {name: each * 0.75 + two[name] * 0.25 if name.startswith(unet) else each for name, each in one.items()}
    save_file(mixed, own_folder(folder, "merged") / "merged.safetensors")
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        wanted = [request(merged("ModelMergeSimple", ratio=0.75)), request(basic())]
        wanted.append(wanted[1].model_copy(update={"model": "merged"}))
        sent = (pool.submit([one], output=tmp_path / str(place)) for place, one in enumerate(wanted))
        paths = [next(iter(jobs.results())).path for jobs in sent]
    images = [np.asarray(Image.open(path)) for path in paths]
    assert np.array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[1])
    again = requests_of_recipe(read_recipe(paths[0]), str)[0]
    assert [(each.name, each.strength, each.text_strength, each.merge) for each in again.loras] == [
        ("other", 0.25, 0.0, "mix")
    ]
