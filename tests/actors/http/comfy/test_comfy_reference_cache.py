"""FluxKVCache selects the option `kv_cache`, whether or not a reference follows."""

from __future__ import annotations

import pytest

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.request.workflow_fields import SampleNode
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.run_options import ReferenceCache, RunOptions
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.actors.http.comfy.test_public_kinds import requests


def edit(model: str, has_reference: bool) -> Graph:
    """An edit of an image by Flux 2 klein."""
    text = "referring" if has_reference else "text"
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name=f"{model}.safetensors"),
        "cached": node("FluxKVCache", model=["loader", 0]),
        "text": node("CLIPTextEncode", clip=["loader", 1], text="make it red"),
        "photo": node("LoadImage", image="clear.png"),
        "encoded": node("VAEEncode", pixels=["photo", 0], vae=["loader", 2]),
        "referring": node("ReferenceLatent", conditioning=["text", 0], latent=["encoded", 0]),
        "zero": node("ConditioningZeroOut", conditioning=[text, 0]),
        "guider": node("CFGGuider", model=["cached", 0], positive=[text, 0], negative=["zero", 0], cfg=1.0),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "levels": node("Flux2Scheduler", steps=4, width=64, height=64),
        "noise": node("RandomNoise", noise_seed=5),
        "empty": node("EmptyFlux2LatentImage", width=64, height=64, batch_size=1),
        "sampled": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["levels", 0], latent_image=["empty", 0],
        ),
        "decoded": node("VAEDecode", samples=["sampled", 0], vae=["loader", 2]),
        "saved": node("SaveImage", images=["decoded", 0], filename_prefix="x"),
    }  # fmt: skip


@pytest.mark.parametrize("has_reference", [True, False])
def test_the_node_selects_the_option(has_reference: bool) -> None:
    names = PoolNames({"klein": "Flux 2 klein"}, [], None, FileNames(), image_size=lambda name: (64, 64))
    (request,) = requests(edit("klein", has_reference), names)
    options = request.options
    if request.workflow is not None:
        (found,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
        options = found.options
    assert options == RunOptions(kv_cache=ReferenceCache())
