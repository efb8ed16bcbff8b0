"""Sana, compared with its pipeline in diffusers."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SCMScheduler
from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers
from diffusers.schedulers import scheduling_scm
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.families.definitions import sana
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.components.text.lengths import length_read
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import native_size
from modelpool.pool.models.loading.transformer_folder import _noise
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import SEED, STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny
from tests.pool.zoo.case import quiet_libraries

(READING,) = sana.FAMILIES[0].text.readings
#: that of the pipeline of Sana Sprint
SPRINT_STEPS = 2


def _model(**more: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
        in_channels=32, out_channels=32, num_layers=2, num_attention_heads=5, attention_head_dim=32,
        num_cross_attention_heads=20, cross_attention_head_dim=8, cross_attention_dim=160, caption_channels=WIDTH,
        **more,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderDC(
        latent_channels=32, attention_head_dim=8, encoder_block_out_channels=(16, 16, 16, 16, 16, 32),
        decoder_block_out_channels=(16, 16, 16, 16, 16, 32), encoder_layers_per_block=(1, 1, 1, 1, 1, 2),
        decoder_layers_per_block=(1, 1, 1, 1, 1, 2), downsample_block_type="conv", upsample_block_type="interpolate",
        encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        encoder_qkv_multiscales=((), (), (), (), (5,), (5,)), decoder_qkv_multiscales=((), (), (), (5,), (5,), (3,)),
    )  # fmt: skip


_OUTER = (
    ("patch_embed.", "x_embedder."),
    ("time_embed.emb.timestep_embedder.linear_1.", "t_embedder.mlp.0."),
    ("time_embed.emb.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
    ("time_embed.linear.", "t_block.1."),
    ("caption_projection.linear_1.", "y_embedder.y_proj.fc1."),
    ("caption_projection.linear_2.", "y_embedder.y_proj.fc2."),
    ("caption_norm.", "attention_y_norm."),
    ("proj_out.", "final_layer.linear."),
    ("scale_shift_table", "final_layer.scale_shift_table"),
    ("transformer_blocks.", "blocks."),
)
_INNER = (
    (".attn1.to_out.0.", ".attn.proj."),
    (".attn1.norm_q.", ".attn.q_norm."),
    (".attn1.norm_k.", ".attn.k_norm."),
    (".attn2.to_out.0.", ".cross_attn.proj."),
    (".attn2.to_q.", ".cross_attn.q_linear."),
    (".attn2.norm_q.", ".cross_attn.q_norm."),
    (".attn2.norm_k.", ".cross_attn.k_norm."),
    (".ff.conv_inverted.", ".mlp.inverted_conv.conv."),
    (".ff.conv_depth.", ".mlp.depth_conv.conv."),
    (".ff.conv_point.", ".mlp.point_conv.conv."),
)


def _publish(state: State) -> File:
    file: File = {}
    for key, tensor in state.items():
        name = next(new + key.removeprefix(old) for old, new in _OUTER if key.startswith(old))
        for old, new in _INNER:
            name = name.replace(old, new)
        if ".attn1.to_q." in name:
            parts = [state[key.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            file[name.replace("attn1.to_q", "attn.qkv")] = torch.cat(parts)
        elif ".attn2.to_k." in name:
            parts = [state[key.replace("to_k", part)] for part in ("to_k", "to_v")]
            file[name.replace("attn2.to_k", "cross_attn.kv_linear")] = torch.cat(parts)
        elif ".attn1.to_" not in name and ".attn2.to_" not in name:
            file[name] = tensor
    return file


def _pipeline(encoder: Any, tokenizer: Any, vae: Any, model: Any) -> Any:
    return diffusers.SanaPipeline(tokenizer, encoder, vae, model, FlowMatchEulerDiscreteScheduler(shift=3.0))


def _texts(modules: list[Any], prompt: str, *, is_negative: bool = False) -> dict[str, Tensor]:
    pipeline = _pipeline(modules[0], for_transformers("gemma"), None, None)
    read = partial(pipeline.encode_prompt, device=torch.device("cpu"))
    instruction = sana._INSTRUCTION.removesuffix("{}").split("\n")
    with torch.no_grad():
        found = read("", negative_prompt=prompt)[2:] if is_negative else read(
            prompt, False, complex_human_instruction=instruction
        )[:2]  # fmt: skip
    return {"context": found[0], "context_mask": found[1].bool()}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _pipeline(modules[0], None, *modules[1:])
    masks = [torch.from_numpy(text.others["context_mask"])[None] for text in texts]
    width, height = whole.sides
    found: Tensor = pipeline(
        prompt=None, negative_prompt=None, height=height, width=width, num_inference_steps=STEPS, guidance_scale=4.5,
        prompt_embeds=states(texts[0]), prompt_attention_mask=masks[0].float(),
        negative_prompt_embeds=states(texts[1]), negative_prompt_attention_mask=masks[1].float(),
        use_resolution_binning=False, output_type="latent", latents=noise_of(whole),
        # those of the published scheduler, but for a thousandth
        sigmas=[1 - step / STEPS for step in range(STEPS)],
    ).images  # fmt: skip
    return found


def _sprint() -> Any:
    return _model(guidance_embeds=True, qk_norm="rms_norm_across_heads")


def _publish_sprint(state: State) -> File:
    """Embeddings of the noise level and of the guidance scale are next to each other."""
    guidance = "time_embed.guidance_embedder.linear_"
    plain = {
        key.replace("time_embed.timestep_embedder.", "time_embed.emb.timestep_embedder."): value
        for key, value in state.items()
        if not key.startswith(guidance)
    }
    told = {key.replace(f"{guidance}1", "cfg_embedder.mlp.0").replace(f"{guidance}2", "cfg_embedder.mlp.2"): value
            for key, value in state.items() if key.startswith(guidance)}  # fmt: skip
    return _publish(plain) | told


def _sprint_pipeline(encoder: Any, tokenizer: Any, vae: Any, model: Any) -> Any:
    return diffusers.SanaSprintPipeline(tokenizer, encoder, vae, model, SCMScheduler())


def _sprint_texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    pipeline = _sprint_pipeline(modules[0], for_transformers("gemma"), None, None)
    instruction = sana._INSTRUCTION.removesuffix("{}").split("\n")
    with torch.no_grad():
        found = pipeline.encode_prompt(prompt, device=torch.device("cpu"), complex_human_instruction=instruction)
    return {"context": found[0], "context_mask": found[1].bool()}


def _sprint_latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    """With the noise of the step that the run draws."""
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _sprint_pipeline(modules[0], None, *modules[1:])
    (text,) = texts
    mask = torch.from_numpy(text.others["context_mask"])[None]
    width, height = whole.sides
    noise = ImageNoise(SEED)
    first = noise.draw(noise_of(whole).shape)
    with mock.patch.object(scheduling_scm, "randn_tensor", lambda shape, **_: noise.draw(shape)):
        found: Tensor = pipeline(
            prompt=None, height=height, width=width, num_inference_steps=SPRINT_STEPS, guidance_scale=4.5,
            prompt_embeds=states(text), prompt_attention_mask=mask.float(), use_resolution_binning=False,
            output_type="latent", latents=first,
        ).images  # fmt: skip
    return found


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {
    "sana": ("blocks.0.attn.qkv", "diffusion_model.{}"), "sana_sprint": ("blocks.0.attn.qkv", "diffusion_model.{}"),
}  # fmt: skip
_GEMMA = {"gemma2_2b": (lambda: texts.gemma2(words=words("gemma")), texts.under("model."))}
CASES = {
    "sana": Compared(
        TinyFamily(
            "sana",
            _model,
            _publish,
            _GEMMA,
            _vae,
            published.dc,
        ),
        diffusers.SanaPipeline,
        _latent,
        _texts,
        LORAS["sana"],
    ),
    "sana_sprint": Compared(
        TinyFamily("sana_sprint", _sprint, _publish_sprint, _GEMMA, _vae, published.dc),
        diffusers.SanaSprintPipeline,
        _sprint_latent,
        _sprint_texts,
        LORAS["sana_sprint"],
        SPRINT_STEPS,
    ),
}
CASE, SPRINT = CASES.values()


class TestSana(FamilyTests):
    case = CASE


class TestSanaSprint(FamilyTests):
    case = SPRINT


def test_the_levels_of_sana_sprint_are_the_angles_of_its_scheduler() -> None:
    """As shares of noise."""
    scheduler, table = SCMScheduler(), sigma_table(TRANSFORMERS["sana_sprint"].sampling.noise)
    for steps in (1, 2, 4):
        scheduler.set_timesteps(steps, intermediate_timesteps=1.3 if steps == SPRINT_STEPS else None)
        angles = scheduler.timesteps
        shares = angles.sin() / (angles.sin() + angles.cos())
        torch.testing.assert_close(make_sigmas("scm", steps, table), shares, rtol=0.0, atol=1e-5)


def test_prompts_have_the_instruction_of_the_pipeline_and_negative_ones_have_not() -> None:
    """Of texts of one batch: the instruction is the default of the pipeline's call, and the last 299 states are those
    of longer prompts too."""
    default = inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default
    assert READING.template == "\n".join(default) + "{}"
    module, own = texts.gemma2(words=words("gemma")), TextTokenizer(tiny("gemma"), "gemma")
    cases = [("A small Red cat ", False), ("a dog", True), ("", False), ("", True), ("two cats, " * 200, False)]
    read = read_texts(
        module, own, [text for text, _ in cases], torch.device("cpu"), READING, negative=[side for _, side in cases]
    )
    for (text, is_negative), found in zip(cases, read, strict=True):
        expected = _texts([module], text, is_negative=is_negative)
        torch.testing.assert_close(found.context_LD, expected["context"][0], rtol=1e-4, atol=2e-5)
        mask = torch.ones(300, dtype=torch.bool) if found.mask_L is None else found.mask_L
        assert torch.equal(mask, expected["context_mask"][0])
        assert length_read(READING, own, text, is_negative=is_negative).tokens == 300


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_levels_are_those_of_the_published_scheduler_and_saved_folders_have_it() -> None:
    """Within a thousandth, by which its first level is below 1."""
    family = TRANSFORMERS["sana"]
    facts, defaults = scheduler_facts(family), family.sampling.defaults
    assert defaults is not None
    scheduler = getattr(diffusers, facts.name)(**facts.settings)
    for steps in (3, 20):
        scheduler.set_timesteps(steps)
        ours = make_sigmas(defaults.schedule, steps, sigma_table(family.sampling.noise))
        torch.testing.assert_close(ours, scheduler.sigmas.to(ours.dtype), rtol=0.0, atol=1.5e-3)
    read = _noise(family.sampling.noise, {"_class_name": facts.name, **facts.settings, "flow_shift": 6.0})
    assert (read.shift, read.shift_by_size) == (6.0, None)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_saved_folder_is_a_pipeline_that_reads_prompts_alike_and_generates(tmp_path: Path) -> None:
    save_file(CASE.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder")
    with quiet_libraries():
        pipeline = diffusers.SanaPipeline.from_pretrained(tmp_path / "folder", local_files_only=True)
    instruction = READING.template.removesuffix("{}").split("\n")
    with torch.no_grad():
        theirs, _, _, _ = pipeline.encode_prompt("A cat", False, complex_human_instruction=instruction)
        image = pipeline(
            "A cat", height=64, width=96, num_inference_steps=2, use_resolution_binning=False, output_type="np"
        ).images[0]
    own = TextTokenizer(tiny("gemma"), "gemma")
    (found,) = read_texts(pipeline.text_encoder, own, ("A cat",), torch.device("cpu"), READING, negative=(False,))
    torch.testing.assert_close(found.context_LD, theirs[0], rtol=1e-4, atol=2e-5)
    assert image.shape == (64, 96, 3)
    assert np.isfinite(image).all()
    assert type(pipeline.scheduler).__name__ == "DPMSolverMultistepScheduler"
    assert pipeline.vae.config.scaling_factor == pytest.approx(0.41407)


def test_published_names_are_those_that_diffusers_converts() -> None:
    state = seeded(_model, 1).state_dict()
    file = _publish(state) | {"pos_embed": torch.zeros(1, 1024, 160), "y_embedder.y_embedding": torch.zeros(300, WIDTH)}
    theirs = convert_sana_transformer_to_diffusers(dict(file))
    ours = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()}).build(file).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(("cells", "scale"), [(16, None), (32, None), (64, 1.0), (128, 2.0)])
def test_the_table_of_positions_of_a_file_tells_its_size(cells: int, scale: float | None) -> None:
    shapes = {key: tuple(value.shape) for key, value in _publish(seeded(_model, 1).state_dict()).items()}
    config = plan_diffusion_model({**shapes, "pos_embed": (1, cells**2, 160)}).config
    assert (config["sample_size"], config["interpolation_scale"]) == (cells, scale)


def test_the_model_for_4096_pixels_has_its_shift_and_size(tmp_path: Path) -> None:
    """Told by its table of positions; its folder has the shift, by which it is read again."""
    file = {f"model.diffusion_model.{key}": value for key, value in _publish(seeded(_model, 1).state_dict()).items()}
    for cells, name, shift, side in ((64, "sana", 3.0, 1024), (128, "sana_4k", 6.0, 4096)):
        table = {"model.diffusion_model.pos_embed": torch.zeros(1, cells**2, 160)}
        found = recognise_diffusion({key: tuple(value.shape) for key, value in (file | table).items()})
        assert found is not None
        assert found.name == name
        save_file(file | table, tmp_path / f"{name}.safetensors")
        checkpoint = open_checkpoint(tmp_path / f"{name}.safetensors", whole=False)
        assert checkpoint.family.sampling.noise.shift == shift
        assert native_size(checkpoint.family, checkpoint.header) == (side, side)
        save_diffusers(checkpoint, tmp_path / name)
        scheduler = json.loads((tmp_path / name / "scheduler/scheduler_config.json").read_text())
        assert scheduler["flow_shift"] == shift


def test_saved_folders_of_larger_models_keep_the_size_that_positions_are_relative_to(tmp_path: Path) -> None:
    """The size of the family was written, at which diffusers computes other positions."""
    file = {f"model.diffusion_model.{key}": value for key, value in _publish(seeded(_model, 1).state_dict()).items()}
    save_file(file | {"model.diffusion_model.pos_embed": torch.zeros(1, 64**2, 160)}, tmp_path / "tiny.safetensors")
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors", whole=False), tmp_path / "folder")
    config = json.loads((tmp_path / "folder/transformer/config.json").read_text())
    assert (config["sample_size"], config["interpolation_scale"]) == (64, 1.0)


def test_sana_15_has_norms_of_queries_and_keys() -> None:
    model = seeded(partial(_model, qk_norm="rms_norm_across_heads"), 1)
    file = _publish(model.state_dict())
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
    built = plan.build(file).state_dict()
    assert plan.recognised.name == "sana"
    assert built.keys() == model.state_dict().keys()
    assert all(torch.equal(value, built[key]) for key, value in model.state_dict().items())
