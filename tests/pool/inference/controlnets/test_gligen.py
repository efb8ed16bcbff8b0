"""Images with texts in boxes are those of diffusers' GLIGEN pipeline on the same weights and noise: one and several
boxes, in a share of the steps, in both namings of files, in batches, with parts of the weights on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.pipelines.deprecated.stable_diffusion_gligen.pipeline_stable_diffusion_gligen import (
    StableDiffusionGLIGENPipeline,
)
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.controlnets.gligen import plan_gligen
from modelpool.pool.inference.controlnets.open_gligen import OpenGligen
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField, UserError
from modelpool.pool.values.core.stage_params import BatchMember, Latent, SampleParams
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.test_controlnets import CFG, FIELDS, HEIGHT, SEED, STEPS, WIDTH
from tests.pool.families.tiny_model import QUIET, Made, TinyModel, euler
from tests.pool.inference.controlnets.tiny_gligen import gligen_state, tiny_gligen
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5
BUDGET_BYTES = 1 << 28
#: a layer of the GLIGEN model is counted in addition to a peak of the UNet
MOST_OVER = 2
#: text, and x, y, width and height in pixels
BOXES = (("a red cube", 8, 0, 24, 32), ("the sun", 40, 8, 24, 16), ("a (very:1.5) old lamp", 0, 16, 64, 32))


class _Tokens(dict[str, Tensor]):
    def to(self, device: Any) -> _Tokens:
        return self


class _Tokenizer:
    """What the pipeline asks of a tokenizer."""

    def __call__(self, texts: Sequence[str], **_: Any) -> _Tokens:
        tokenizer = ClipTokenizer.load()
        ids = [tokenizer.encode(text) for text in texts]
        longest = max(map(len, ids))
        rows = [[49406, *row, *[49407] * (longest + 1 - len(row))] for row in ids]
        return _Tokens(input_ids=torch.tensor(rows))


class Boxed:
    """A tiny model with a GLIGEN model for it, in both namings."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.tiny = TinyModel(folder, layouts.tiny_sd1(), device=device)
        unet, encoder = self.tiny.module(Role.DIFFUSION_MODEL), self.tiny.module(Role.TEXT_ENCODER)
        self.gligen = tiny_gligen(unet, encoder.config.hidden_size)
        (folder / "gligen").mkdir()
        save_file(gligen_state(unet, self.gligen), folder / "gligen" / "boxes.safetensors")
        save_file(gligen_state(unet, self.gligen, published=False), folder / "gligen" / "named.safetensors")

    def latent(self, made: Made, boxes: Sequence[tuple[Any, ...]], beta: float = 1.0) -> Tensor:
        """What diffusers comes to."""
        tiny = self.tiny
        own = tiny.module(Role.DIFFUSION_MODEL)
        config = {name: value for name, value in own.config.items() if not name.startswith("_")}
        unet: Any = UNet2DConditionModel(**{**config, "attention_type": "gated"})
        unet.load_state_dict({**own.state_dict(), **gligen_state(own, self.gligen, published=False)})
        parts: dict[str, Any] = {"vae": tiny.module(Role.VAE), "unet": unet.eval(), "scheduler": euler()}
        parts |= {"text_encoder": tiny.module(Role.TEXT_ENCODER), "tokenizer": _Tokenizer(), "feature_extractor": None}
        pipeline: Any = StableDiffusionGLIGENPipeline(**parts, safety_checker=None, requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        shares = [(x / WIDTH, y / HEIGHT, (x + w) / WIDTH, (y + h) / HEIGHT) for _, x, y, w, h in boxes]
        with torch.no_grad():
            found: Tensor = pipeline(
                **made.texts, width=WIDTH, height=HEIGHT, num_inference_steps=STEPS, guidance_scale=CFG,
                gligen_phrases=[text.replace("(very:1.5)", "very") for text, *_ in boxes], gligen_boxes=shares,
                gligen_scheduled_sampling_beta=beta, output_type="latent",
                generator=torch.Generator().manual_seed(SEED),
            ).images  # fmt: skip
        return found


def workflow(boxes: Sequence[tuple[Any, ...]] = BOXES, name: str = "boxes", **more: Any) -> dict[str, Any]:
    """A run with texts in boxes, and its image."""
    request = {"model": "tiny", "prompt": "a photo", "width": WIDTH, "height": HEIGHT, **FIELDS, "seed": SEED}
    request |= more.pop("request", {})
    nodes: dict[str, Any] = {"sample": {"kind": "sample", "request": request, "inputs": {}}}
    if boxes:
        places = [dict(zip(("x", "y", "width", "height"), box[1:], strict=True)) for box in boxes]
        nodes["sample"]["gligen"] = {"model": name, "boxes": places, **more}
        for number, box in enumerate(boxes):
            nodes[f"text {number}"] = {"kind": "text", "model": "tiny", "prompt": box[0], "pooled": True}
            nodes["sample"]["inputs"][f"boxes.{number}"] = f"text {number}"
    nodes["image"] = {"kind": "decode", "model": "tiny", "inputs": {"latent": "sample"}}
    return {"nodes": nodes, "output": "image"}


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxed]:
    found = Boxed(tmp_path_factory.mktemp("boxed"))
    yield found
    found.tiny.close()


def made(boxed: Boxed, *boxes: Any, **more: Any) -> Made:
    return boxed.tiny.made(workflow=workflow(*boxes, **more))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_images_are_those_of_diffusers(boxed: Boxed) -> None:
    plain = made(boxed, ())
    for boxes, end in ((BOXES[:1], 1.0), (BOXES, 1.0), (BOXES[:2], 0.5)):
        found = made(boxed, boxes, end=end)
        assert_close(found.latents[0], boxed.latent(plain, boxes, end))
        assert not torch.allclose(found.latents[0], plain.latents[0], atol=1e-2)
    assert torch.equal(made(boxed, BOXES[:1], "named").latents[0], made(boxed, BOXES[:1]).latents[0])


def test_a_run_leaves_the_model_as_it_was(boxed: Boxed) -> None:
    before = made(boxed, ()).latents[0]
    made(boxed)
    unet = boxed.tiny.module(Role.DIFFUSION_MODEL)
    assert torch.equal(made(boxed, ()).latents[0], before)
    assert not any({"forward", "fuser"} & module.__dict__.keys() for module in unet.modules())


def test_tasks_of_one_pass_have_the_bytes_of_runs_alone(boxed: Boxed) -> None:
    """With other texts in the boxes, and other seeds; the images of a pass are fixed, so that kernels are the same."""
    asked = [[(f"{text} {number}", *place) for text, *place in BOXES] for number in range(2)]
    found = [made(boxed, boxes, request={"seed": number}) for number, boxes in enumerate(asked)]
    members = []
    for each in found:
        task = next(task for task in each.tasks if isinstance(each.works[task.task_id], SampleParams))
        work = replace(each.works[task.task_id], batch_size=2)
        task = replace(task, batch_size=2)
        members.append(BatchMember(task, work, results_read(task, each.results), QUIET))
    together = boxed.tiny.engine.run_batch(members)
    for member, outcome in zip(members, together, strict=True):
        assert isinstance(outcome, tuple), outcome
        (alone,) = boxed.tiny.engine.run_batch([member])
        assert isinstance(alone, tuple), alone
        for found_one in (outcome[0], alone[0]):
            assert isinstance(found_one, Latent)
        np.testing.assert_array_equal(outcome[0].samples_CHW, alone[0].samples_CHW)


def test_ids_follow_from_boxes_texts_and_model(boxed: Boxed) -> None:
    moved = [(text, x + 8, y, w, h) for text, x, y, w, h in BOXES[:1]]
    other = [("a blue cube", *BOXES[0][1:])]
    ids = {
        next(task.task_id for task in each.tasks if isinstance(each.works[task.task_id], SampleParams))
        for each in (made(boxed, ()), made(boxed, BOXES[:1]), made(boxed, moved), made(boxed, other),
                     made(boxed, BOXES[:1], end=0.5), made(boxed, BOXES[:1], "named"))
    }  # fmt: skip
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"boxes": BOXES, "name": "tiny"}, "GLIGEN"),
        ({"boxes": [("text", 0, 0, 0, 8)]}, "width"),
        ({"boxes": [("text", 0, 0, 8, 8)] * 31}, "boxes"),
        ({"request": {"options": {"tiled": {"tile": 64, "overlap": 16}}}}, "gligen: found together with options.tiled"),
        ({"request": {"options": {"perp_neg": 1.0}}}, "gligen: found together with options.perp_neg"),
    ],
    ids=["no gligen", "empty box", "too many", "tiled", "perpendicular"],
)
def test_what_cannot_be_is_refused(boxed: Boxed, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boxed.tiny.made(workflow=workflow(**said))


def test_texts_and_boxes_belong_together(boxed: Boxed) -> None:
    asked = workflow(BOXES[:2])
    del asked["nodes"]["sample"]["inputs"]["boxes.1"]
    with pytest.raises(UserError, match=r"inputs: found 'boxes\.0', expected boxes\.0, boxes\.1"):
        boxed.tiny.made(workflow=asked)
    asked = workflow(BOXES[:1])
    del asked["nodes"]["text 0"]["pooled"]
    with pytest.raises(UserError, match=r"boxes\.0: found 'a text without its pooled state"):
        boxed.tiny.made(workflow=asked)


def test_one_for_another_model_is_refused(boxed: Boxed, tmp_path: Path) -> None:
    unet, encoder = boxed.tiny.module(Role.DIFFUSION_MODEL), boxed.tiny.module(Role.TEXT_ENCODER)
    opened = boxed.tiny.engine._opened(boxed.tiny.model)
    found = boxed.tiny.catalog.gligens.find("boxes")
    OpenGligen(found, "cpu").check_fits(opened)
    wider = tiny_gligen(unet, encoder.config.hidden_size + 8)
    save_file(gligen_state(unet, wider), tmp_path / "wider.safetensors")
    with pytest.raises(UnusableField, match="for texts of width"):
        OpenGligen(replace(found, path=str(tmp_path / "wider.safetensors"), sha256="w"), "cpu").check_fits(opened)
    state = gligen_state(unet, boxed.gligen)
    last = sorted({key.partition(".fuser.")[0] for key in state if ".fuser." in key})[-1]
    fewer = {key: tensor for key, tensor in state.items() if not key.startswith(last)}
    save_file(fewer, tmp_path / "fewer.safetensors")
    with pytest.raises(UnusableField, match="block"):
        OpenGligen(replace(found, path=str(tmp_path / "fewer.safetensors"), sha256="f"), "cpu").check_fits(opened)
    with pytest.raises(UnknownArchitecture, match="GLIGEN"):
        plan_gligen({"a": (1,), "b": (2,)})


def test_it_streams_and_holds_what_was_estimated(tmp_path: Path) -> None:
    other = Boxed(tmp_path)
    tiny, whole = other.tiny, made(other)
    sim.install()
    for policy in (VramPolicy.NORMAL, VramPolicy.NONE):
        tiny.close()
        sim.configure(0, BUDGET_BYTES)
        sim.recover(0)
        tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=BUDGET_BYTES, vram_policy=policy))
        found = made(other)
        np.testing.assert_array_equal(found.pixels, whole.pixels)
        if policy is VramPolicy.NORMAL:
            (sample,) = [place for place, task in enumerate(found.tasks) if task.stage is Stage.SAMPLE]
            task, working_bytes = found.tasks[sample], found.costs[sample].working_bytes
            assert {use.component for use in task.uses} > {OpenGligen(tiny.catalog.gligens.find("boxes"), "cpu").key}
            assert working_bytes <= task.activation_bytes <= MOST_OVER * working_bytes
        else:
            assert any(cost.streamed_bytes for cost in found.costs)
    tiny.close()
