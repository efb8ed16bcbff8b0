"""GLIGENTextBoxApply: texts in boxes are a part of a workflow, and its image is the image of the workflow of the
pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import SampleNode, TextNode
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.pool.families.test_controlnets import CFG, HEIGHT, SEED, STEPS, WIDTH
from tests.pool.inference.controlnets.test_gligen import BOXES, Boxed, workflow

NAMES = PoolNames({"tiny": "Stable Diffusion 1"}, ["light"], None, FileNames(gligens=("boxes", "named")))
BOX = {"clip": ["model", 1], "gligen_textbox_model": ["boxes", 0]}


def graph(boxes: int = 2) -> Graph:
    found: Graph = {
        "model": node("CheckpointLoaderSimple", ckpt_name="tiny.safetensors"),
        "boxes": node("GLIGENLoader", gligen_name="boxes.safetensors"),
        "positive": node("CLIPTextEncode", text="a photo", clip=["model", 1]),
        "negative": node("CLIPTextEncode", text="blurry", clip=["model", 1]),
        "blank": node("EmptyLatentImage", width=WIDTH, height=HEIGHT, batch_size=1),
    }
    last = "positive"
    for number, (text, x, y, width, height) in enumerate(BOXES[:boxes]):
        place = {"x": x, "y": y, "width": width, "height": height}
        found[f"box {number}"] = node("GLIGENTextBoxApply", conditioning_to=[last, 0], text=text, **place, **BOX)
        last = f"box {number}"
    found["sampler"] = node(
        "KSampler", model=["model", 0], positive=[last, 0], negative=["negative", 0], latent_image=["blank", 0],
        seed=SEED, steps=STEPS, cfg=CFG, sampler_name="euler", scheduler="normal", denoise=1.0,
    )  # fmt: skip
    found["image"] = node("VAEDecode", samples=["sampler", 0], vae=["model", 2])
    found["save"] = node("SaveImage", images=["image", 0], filename_prefix="x")
    return found


def request(made: Graph) -> GenerateRequest:
    read = lambda name: Image.new("RGBA", (64, 64))  # noqa: E731
    (found,) = [one for output in outputs_of(made, NAMES) for one in requests_of(output, NAMES, read)]
    return found


def told(made: Graph) -> tuple[str, ...]:
    (output,) = outputs_of(made, NAMES)
    return output.warnings


def refusal(made: Graph) -> str:
    with pytest.raises(WorkflowRejected) as refused:
        request(made)
    return "; ".join(error.details for error in refused.value.errors)


def test_a_graph_renders_what_the_workflow_of_the_pool_does(tmp_path: Path) -> None:
    boxed = Boxed(tmp_path)
    found = boxed.tiny.made(workflow=request(graph()).workflow)
    own = boxed.tiny.made(workflow=workflow(BOXES[:2]))
    assert torch.equal(found.latents[0], own.latents[0])
    boxed.tiny.close()


def test_texts_in_boxes_have_their_text_encoders() -> None:
    """With a LoRA on the text encoder of one box."""
    made = graph()
    made["light"] = node("LoraLoader", model=["model", 0], clip=["model", 1], lora_name="light", strength_model=1.0,
                         strength_clip=0.5)  # fmt: skip
    made["box 1"]["inputs"]["clip"] = ["light", 1]
    asked = request(made).workflow
    assert asked is not None
    (run,) = [each for each in asked.nodes.values() if isinstance(each, SampleNode)]
    assert run.gligen is not None
    assert [(box.x, box.y, box.width, box.height) for box in run.gligen.boxes] == [box[1:] for box in BOXES[:2]]
    texts = [asked.nodes[run.inputs[f"boxes.{number}"]] for number in range(2)]
    assert all(isinstance(text, TextNode) and text.pooled for text in texts)
    assert [len(text.loras) for text in texts if isinstance(text, TextNode)] == [0, 1]


def test_boxes_have_whole_cells_and_parts_are_told_of() -> None:
    made = graph(1)
    made["box 0"]["inputs"] |= {"x": 13, "width": 30}
    asked = request(made).workflow
    assert asked is not None
    (run,) = [each for each in asked.nodes.values() if isinstance(each, SampleNode)]
    assert run.gligen is not None
    assert (run.gligen.boxes[0].x, run.gligen.boxes[0].width) == (8, 24)
    assert [warning for warning in told(made) if "x: found 13, which is read as 8" in warning]


def test_what_cannot_be_is_refused() -> None:
    def changed(**more: Any) -> Graph:
        return {**graph(), **more}

    negative = node("GLIGENTextBoxApply", conditioning_to=["negative", 0], text="a", x=0, y=0, width=8, height=8, **BOX)
    made = changed(other=negative)
    made["sampler"]["inputs"]["negative"] = ["other", 0]
    assert "expected them in positive alone" in refusal(made)
    made = changed(named=node("GLIGENLoader", gligen_name="named"))
    made["box 1"]["inputs"]["gligen_textbox_model"] = ["named", 0]
    assert "gligen_textbox_model: found named, expected boxes" in refusal(made)
    made = graph(1)
    for number in range(1, 32):
        last = f"box {number - 1}"
        made[f"box {number}"] = node("GLIGENTextBoxApply", conditioning_to=[last, 0], text="a", x=0, y=0, width=8,
                                     height=8, **BOX)  # fmt: skip
    made["sampler"]["inputs"]["positive"] = ["box 31", 0]
    assert "boxes, expected up to 30" in refusal(made)
