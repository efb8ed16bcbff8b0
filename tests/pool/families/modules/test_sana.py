"""Sana, compared with its pipeline in diffusers."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.stage_params import Encoded
from modelpool.pool.detection.diffusion import recognise_diffusion
from modelpool.pool.families.modules import sana
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.loading.build_checkpoint import open_checkpoint
from modelpool.pool.loading.transformer_folder import _noise
from modelpool.pool.models.diffusion.build import plan_diffusion_model
from modelpool.pool.models.text.lengths import length_read
from modelpool.pool.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.saving.diffusers_folder import save_diffusers
from modelpool.pool.saving.pipelines import scheduler_facts
from modelpool.pool.specs.spec import Role
from modelpool.pool.text.encode import read_texts
from modelpool.pool.text.text_tokenizer import TextTokenizer
from tests.pool.families.modules.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.diffusion.image_published import File, State
from tests.pool.models.text import cases as texts
from tests.pool.models.vae import published
from tests.pool.text.tiny_tokenizers import for_transformers, tiny
from tests.pool.zoo.case import quiet_libraries

(READING,) = sana.FAMILIES[0].texts


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


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"sana": ("blocks.0.attn.qkv", "diffusion_model.{}")}
CASES = {
    "sana": Compared(
        TinyFamily(
            "sana",
            _model,
            _publish,
            {"gemma2_2b": (lambda: texts.gemma2(words=words("gemma")), texts.under("model."))},
            _vae,
            published.dc,
        ),
        diffusers.SanaPipeline,
        _latent,
        _texts,
        LORAS["sana"],
    )
}
(CASE,) = CASES.values()


class TestSana(FamilyTests):
    case = CASE


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


def test_sana_sprint_is_recognised_and_does_not_run() -> None:
    sprint = diffusers.SanaTransformer2DModel(num_layers=1, guidance_embeds=True, qk_norm="rms_norm_across_heads")
    shapes = {key: tuple(value.shape) for key, value in sprint.state_dict().items()}
    found = recognise_diffusion(shapes)
    assert found is not None
    assert found.name == "sana_sprint"
    with pytest.raises(UnknownArchitecture, match="Sana Sprint"):
        plan_diffusion_model(shapes)
