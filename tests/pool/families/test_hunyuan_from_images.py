"""HunyuanVideo makes of an image, which its text encoder sees, what diffusers makes: on the same weights and noise,
from the words of a prompt on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file

from modelpool.actors.graph.common.output_shape import output_shape_of
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.text_tokenizer import TokenizerMissing
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeParams,
    OutputShape,
    SampleParams,
    VideoFrames,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_llava import LEADING_CELL, SIDE, STATES, llava, vision_file
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES, File
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED = 96, 64, 5, 3, 11
PROMPT, NEGATIVE = "a small red cat on the moon", "a dog"
FIELDS: dict[str, Any] = {
    "prompt": PROMPT, "frames": FRAMES, "steps": STEPS, "negative": NEGATIVE, "width": WIDTH, "height": HEIGHT,
    "seed": SEED,
}  # fmt: skip
PIPELINES = {
    "hunyuan_video_i2v": diffusers.HunyuanVideoImageToVideoPipeline,
    "skyreels_i2v": diffusers.HunyuanSkyreelsImageToVideoPipeline,
}


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))


def _template() -> dict[str, Any]:
    """The pipeline's own, for so many states of an image."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as theirs

    template = dict(theirs.DEFAULT_PROMPT_TEMPLATE)
    ids = tiny("llama3").encode(template["template"]).ids
    start = ids.index(tiny("llama3").token_to_id("<image>"))
    return template | {"image_emb_start": start, "image_emb_end": start + STATES, "image_emb_len": STATES}


def _pipeline(model: TinyFamilyModel) -> Any:
    sides = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    pipeline = PIPELINES["hunyuan_video_i2v"](
        llava(), for_transformers("llama3"), model.module(Role.DIFFUSION_MODEL), model.module(Role.VAE),
        FlowMatchEulerDiscreteScheduler(shift=7.0), None, None, transformers.CLIPImageProcessorPil(**sides),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _texts(pipeline: Any, made: Made, image: Image.Image, cfg: float) -> dict[str, Any]:
    """What the pipeline's own LLaVA reads, with CLIP's vectors of ours."""
    found: dict[str, Any] = {}
    read = [one for one in made.of(EncodeParams) if isinstance(one, Encoded)]
    black = Image.new("RGB", (WIDTH, HEIGHT), 0)
    sides = [("", PROMPT, image), ("negative_", NEGATIVE, black)]
    for (name, text, shown), own in zip(sides, read, strict=False):
        context, mask = pipeline._get_llama_prompt_embeds(shown, text, _template())
        assert own.pooled_V is not None
        found[f"{name}prompt_embeds"], found[f"{name}prompt_attention_mask"] = context, mask
        found[f"{name}pooled_prompt_embeds"] = torch.from_numpy(own.pooled_V)[None]
    return found


def _expected(model: TinyFamilyModel, made: Made, image: Image.Image, cfg: float) -> tuple[dict[str, Any], Any, Any]:
    """Texts, the latent with the cell that leads it, and pixels."""
    pipeline = _pipeline(model)
    (work,) = [one for one in made.works.values() if isinstance(one, SampleParams)]
    noise = ImageNoise(SEED).draw((1, *sampled_shape(work, model.engine._opened(model.model).latent)))
    kept: list[Any] = []

    def keep(_: Any, __: int, ___: Any, told: dict[str, Any]) -> dict[str, Any]:
        kept.append(told["latents"])
        return {}

    with torch.no_grad():
        texts = _texts(pipeline, made, image, cfg)
        video = pipeline(
            image, **texts, height=HEIGHT, width=WIDTH, num_frames=FRAMES + 4, num_inference_steps=STEPS,
            latents=noise, true_cfg_scale=cfg, output_type="np", callback_on_step_end=keep,
        ).frames[0]  # fmt: skip
    return texts, kept[-1], video


def _real(context: Any, mask: Any) -> Any:
    return context[0][mask[0].bool()]


@pytest.mark.parametrize("cfg", [1.0, 4.0], ids=["alone", "guided"])
def test_a_video_that_a_image_leads_is_that_of_diffusers(cfg: float, tmp_path: Path) -> None:
    """Words and image as the text encoder reads them, latent and pixels."""
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    assert model.family.name == "hunyuan_video_i2v"
    made = model.made(image=image(4), **FIELDS, cfg=cfg)
    texts, latent, video = _expected(model, made, image(4), cfg)
    read = [one for one in made.of(EncodeParams) if isinstance(one, Encoded)]
    assert len(read) == (1 if cfg == 1 else 2)
    for name, own in zip(("", "negative_"), read, strict=False):
        ours = torch.from_numpy(own.context_LD)[None], torch.from_numpy(own.others["context_mask"])[None]
        theirs = texts[f"{name}prompt_embeds"], texts[f"{name}prompt_attention_mask"]
        np.testing.assert_array_equal(ours[1].bool(), theirs[1].bool())
        assert_equal(_real(*ours), _real(*theirs))
    assert_equal(made.latents[0], latent)
    result = made.results[made.tasks[-1].task_id]
    assert isinstance(result, VideoFrames)
    assert result.frames_THWC.shape == (FRAMES, HEIGHT, WIDTH, 3)
    np.testing.assert_allclose(result.frames_THWC / 255, video, atol=1 / 255)
    model.close()


def test_a_long_prompt_is_cut_as_the_pipeline_cuts_it(tmp_path: Path) -> None:
    """The head of the turn that would follow is not there then: the last tokens are left out."""
    model, prompt = (
        TinyFamilyModel(tmp_path, LEADING_CELL),
        "a red cat sits beside a large blue dog on the table, " * 60,
    )
    made = model.made(**{**FIELDS, "prompt": prompt, "steps": 1, "cfg": 1.0}, image=image(4))
    (own,) = (one for one in made.of(EncodeParams) if isinstance(one, Encoded))
    context, mask = _pipeline(model)._get_llama_prompt_embeds(image(4), prompt, _template())
    assert bool(mask.bool().all())
    assert "context_mask" not in own.others, "all are real"
    assert_equal(torch.from_numpy(own.context_LD)[None], context)
    model.close()


def test_what_the_image_shows_matters_to_words_and_to_the_video(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    one, other = (model.made(image=image(seed), **FIELDS) for seed in (4, 5))
    read = [text for made in (one, other) for text in made.of(EncodeParams)[:1] if isinstance(text, Encoded)]
    contexts = [torch.from_numpy(text.context_LD) for text in read]
    assert not torch.allclose(*contexts, atol=1e-2)
    assert not torch.allclose(one.latents[0], other.latents[0], atol=1e-2)
    model.close()


@pytest.mark.parametrize("cfg", [1.0, 4.0], ids=["alone", "guided"])
@pytest.mark.counted
def test_what_runs_hold_is_estimated(cfg: float, tmp_path: Path) -> None:
    from modelpool.pool.devices.sim import device as sim

    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, LEADING_CELL, "sim")
    made = model.made(image=image(4), **FIELDS, cfg=cfg)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        assert cost.division is None
        work = made.works[task.task_id]
        assert cost.working_bytes <= task.activation_bytes, work
        if isinstance(work, SampleParams | VisionEncodeParams | EncodeParams):
            assert task.activation_bytes <= 1.15 * cost.working_bytes, work
    model.close()


def test_a_file_is_saved_as_it_was(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    save_checkpoint(model.engine._opened(model.model), tmp_path / "again.safetensors")
    before, after = load_file(tmp_path / "tiny.safetensors"), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    model.close()


def test_a_folder_makes_what_the_file_makes(tmp_path: Path) -> None:
    """Its text encoder and its vision encoder are one folder then."""
    (tmp_path / "file").mkdir()
    model = TinyFamilyModel(tmp_path / "file", LEADING_CELL)
    expected = model.made(image=image(4), **FIELDS, cfg=4.0).latents[0]
    (tmp_path / "folders").mkdir()
    assert save_diffusers(model.engine._opened(model.model), tmp_path / "folders" / "tiny").missing == ()
    model.close()
    again = TinyModel.of_folder(tmp_path / "folders")
    assert again.family.name == "hunyuan_video_i2v"
    assert torch.equal(again.made(image=image(4), **FIELDS, cfg=4.0).latents[0], expected)
    again.close()


def _without_level(text: File) -> File:
    return {key.replace("vision_tower.vision_model.", "vision_tower."): tensor for key, tensor in text.items()}


def _with_head(text: File) -> File:
    return text | {"language_model.lm_head.weight": text["language_model.model.embed_tokens.weight"].clone()}


@pytest.mark.parametrize("written", [_without_level, _with_head])
def test_folders_of_all_versions_of_the_class_are_read(written: Any, tmp_path: Path) -> None:
    """Transformers 5 writes the vision encoder without a level of names, and all of them a head of words."""
    save_file(LEADING_CELL.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, LEADING_CELL)
    checkpoint, folder = open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder"
    save_diffusers(checkpoint, folder)
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    text = load_file(path)
    changed = written(text)
    assert changed.keys() != text.keys()
    save_file(changed, path)
    again = open_checkpoint(folder)
    for role in checkpoint.roles:
        own, found = (one.build(role).module.state_dict() for one in (checkpoint, again))
        own, found = ({name.removeprefix("text_model."): x for name, x in one.items()} for one in (own, found))
        assert own.keys() - found.keys() <= {"text_projection.weight"}
        assert all(torch.equal(own[name], found[name]) for name in found)


def test_a_folder_of_the_form_that_replaces_the_first_frame_is_refused(tmp_path: Path) -> None:
    """Found: it was taken for text to video, whose tensors it has. One for texts, which says nothing, is not."""
    save_file(FAMILIES["hunyuan_video"].file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, FAMILIES["hunyuan_video"])
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder")
    config = tmp_path / "folder" / "transformer" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "image_condition_type": None}))
    assert open_checkpoint(tmp_path / "folder").family.name == "hunyuan_video"
    config.write_text(json.dumps({**said, "image_condition_type": "token_replace"}))
    message = "configuration of transformer: image_condition_type: found 'token_replace', expected no value or .*not"
    with pytest.raises(UnknownArchitecture, match=message):
        open_checkpoint(tmp_path / "folder")


def test_a_tokenizer_without_a_token_for_a_image_is_told_with_one_that_has_it(tmp_path: Path) -> None:
    """Found: who missed a tokenizer was told to take Llama's, and then that it was none of Llama's."""
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    model.close()
    (path,) = tmp_path.glob("tokenizer_llama3_8b/tokenizer.json")
    path.write_text(path.read_text().replace("<image>", "<drawing>"))
    with pytest.raises(TokenizerMissing, match=r"lacks '<image>', expected the tokenizer.json of xtuner/llava-\S+"):
        TinyModel.of_folder(tmp_path).made(image=image(4), **FIELDS)


def test_cells_that_lead_are_decoded_and_left_out(tmp_path: Path) -> None:
    """Of a latent of the driver's own too: it has one more."""
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    made = model.made(image=image(4), **FIELDS)
    cells = made.latents[0].shape[2]
    assert cells == 1 + (1 + (FRAMES - 1) // 4)
    own = model.catalog.model_defaults(model.model)
    assert own.sampling.video is not None
    assert output_shape_of((cells, HEIGHT // 8, WIDTH // 8), "tiny", own) == OutputShape(
        *(WIDTH, HEIGHT, FRAMES, own.sampling.video.rate), leading=1
    )
    model.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "image: missing; model 'tiny' requires the first frame"),
        ({"image": image(4), "last_image": image(5)}, "last_image: not supported by model"),
        ({"image": image(4), "reference": image(5)}, "reference: not supported by model"),
    ],
)
def test_what_it_is_not_told_is_told_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, LEADING_CELL)
    with pytest.raises(UnusableField, match=message):
        model.made(**FIELDS, **fields)
    model.close()


def test_a_file_without_its_vision_encoder_says_so(tmp_path: Path) -> None:
    without = {key: tensor for key, tensor in LEADING_CELL.file().items() if not key.startswith("vision_encoder.")}
    save_file(without, tmp_path / "hunyuan.safetensors")
    with pytest.raises(UnknownArchitecture, match="but without its vision encoder"):
        open_checkpoint(tmp_path / "hunyuan.safetensors")


def _described(folder: Path, vision: File) -> Path:
    """A model of separate files: the part that sees is one of its own, as people have it."""
    save_file(
        {key: x for key, x in LEADING_CELL.file().items() if not key.startswith("vision_encoder.")},
        folder / "rest.safetensors",
    )
    save_file({key: x.contiguous().clone() for key, x in vision.items()}, folder / "llava_llama3_vision.safetensors")
    path = folder / "tiny.model.json"
    path.write_text(
        json.dumps({"format": 1, "checkpoint": "rest.safetensors", "vision_encoder": "llava_llama3_vision.safetensors"})
    )
    return path


def test_separate_files_make_what_the_whole_file_makes(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = TinyFamilyModel(tmp_path / "whole", LEADING_CELL)
    expected = whole.made(image=image(4), **FIELDS).latents[0]
    whole.close()
    _described(tmp_path / "parts", vision_file())
    for path in (tmp_path / "whole").glob("tokenizer_*"):
        path.rename(tmp_path / "parts" / path.name)
    parts = TinyModel.of_folder(tmp_path / "parts")
    found = parts.made(image=image(4), **FIELDS).latents[0]
    # the same weights at addresses of another alignment, which decides how matrix products round on a CPU
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))
    parts.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda x: {k: v for k, v in x.items() if "linear_2" not in k},
            "gives no multi_modal_projector.linear_2.weight",
        ),
        (lambda x: {k: v[:8] if "linear_2" in k else v for k, v in x.items()}, "gives states of width 8, expected 32"),
    ],
    ids=["no projection", "another width"],
)
def test_a_vision_encoder_of_another_model_is_told(changed: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=message):
        open_checkpoint(read_description(_described(tmp_path, changed(vision_file()))))


#: HunyuanVideo retrained: it reads the latent of an image next to its own
SKYREELS = replace(
    FAMILIES["hunyuan_video"],
    name="skyreels_i2v",
    model=lambda: diffusers.HunyuanVideoTransformer3DModel(
        in_channels=32, out_channels=16, num_attention_heads=2, attention_head_dim=32, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=32,
        rope_axes_dim=(4, 14, 14), guidance_embeds=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("cfg", [1.0, 4.0], ids=["alone", "guided"])
def test_a_video_of_skyreels_from_an_image_is_that_of_diffusers(
    cfg: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image is the first cell of the latents that are concatenated; the pipeline takes a sample of the latents."""
    model = TinyFamilyModel(tmp_path, SKYREELS)
    assert model.family.name == "skyreels_i2v"
    made = model.made(image=image(4), **FIELDS, cfg=cfg)
    place = "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_skyreels_image2video.retrieve_latents"
    monkeypatch.setattr(place, lambda encoded, *_, **__: encoded.latent_dist.mode())
    pipeline = PIPELINES["skyreels_i2v"](
        None, None, model.module(Role.DIFFUSION_MODEL), model.module(Role.VAE),
        FlowMatchEulerDiscreteScheduler(shift=7.0), None, None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    (work,) = [one for one in made.works.values() if isinstance(one, SampleParams)]
    noise = ImageNoise(SEED).draw((1, *sampled_shape(work, model.engine._opened(model.model).latent)))
    texts: dict[str, Any] = {}
    for name, own in zip(("", "negative_"), [o for o in made.of(EncodeParams) if isinstance(o, Encoded)], strict=False):
        assert own.pooled_V is not None
        context = torch.from_numpy(own.context_LD)[None]
        texts[f"{name}prompt_embeds"] = context
        mask = own.others.get("context_mask")
        texts[f"{name}prompt_attention_mask"] = (
            torch.ones(context.shape[:2]) if mask is None else torch.from_numpy(mask)[None]
        ).long()
        texts[f"{name}pooled_prompt_embeds"] = torch.from_numpy(own.pooled_V)[None]
    with torch.no_grad():
        expected = pipeline(
            image(4), **texts, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS,
            latents=noise, true_cfg_scale=cfg, guidance_scale=1.0, output_type="latent",
        ).frames  # fmt: skip
    assert_equal(made.latents[0], expected)
    model.close()
