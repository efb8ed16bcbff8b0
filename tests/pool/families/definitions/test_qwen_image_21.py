"""Qwen-Image 2.1, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions import qwen_image_21
from modelpool.pool.inference.guidance.call_model import patches_of
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.models.text.tokenizer_files import find_tokenizer
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import (
    Compared,
    FamilyTests,
    check_texts_of_a_batch,
    check_texts_of_two_lengths,
    noise_of,
    states,
)
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

(READING,) = qwen_image_21.FAMILIES[0].text.readings


def _model() -> Any:
    return diffusers.QwenImage21Transformer2DModel(
        num_layers=2, attention_head_dim=32, num_attention_heads=2, context_in_dim=WIDTH, axes_dims_rope=(4, 14, 14)
    )


def _publish(state: State) -> File:
    """Gates and values of the feed-forward are one tensor, gates first."""
    file: File = {}
    for key, tensor in state.items():
        if key.endswith(".img_mlp.gate_layer.weight"):
            values = state[key.replace("gate_layer", "proj")]
            file[key.replace("gate_layer", "gate_up")] = torch.cat((tensor, values))
        elif not key.endswith(".img_mlp.proj.weight"):
            file[key] = tensor
    return file


def _vae() -> Any:
    return diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=6, num_res_blocks=1)


class _Processor:
    """The text part of Qwen3-VL's processor, whose turn of the system has as many tokens as the published one's."""

    def __init__(self) -> None:
        self.tokenizer = for_transformers("qwen")

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0] * 14]

    def __call__(self, text: list[str], **how: Any) -> Any:
        return self.tokenizer(text, **how)


class _Seeing(nn.Module):
    """The language model where the pipeline looks for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def _pipeline(encoder: Any, vae: Any, model: Any, levels: list[float] | None = None) -> Any:
    shifts = {} if levels else {"use_dynamic_shifting": True, "max_shift": 0.9, "shift_terminal": 0.02}
    scheduler = FlowMatchEulerDiscreteScheduler(base_shift=0.5, max_image_seq_len=8192, **shifts)
    return diffusers.QwenImage21Pipeline(scheduler, vae, _Seeing(encoder), _Processor(), model, sample_sigmas=levels)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"context": _pipeline(modules[0], None, None).encode_prompt(prompt, device=torch.device("cpu"))[0]}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline, noise, (width, height) = _pipeline(*modules), noise_of(whole), whole.sides
    found = pipeline(
        prompt_embeds=states(texts[0]), height=height, width=width, num_inference_steps=STEPS, output_type="latent",
        latents=pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]),
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, height, width, 16)
    return unpacked[:, :, 0]


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """The image of the pipeline, which is transparent, on white."""
    vae = whole.module(Role.VAE)
    means, deviations = (
        torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
    )
    shown = (vae.decode(latent[:, :, None] * deviations + means).sample[:, :, 0] / 2 + 0.5).clamp(0, 1)
    return (shown[:, :3] * shown[:, 3:] + 1 - shown[:, 3:]) * 2 - 1


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"qwen_image_21": ("transformer_blocks.0.img_mlp.gate_up", "diffusion_model.{}")}
CASES = {
    "qwen_image_21": Compared(
        TinyFamily(
            "qwen_image_21",
            _model,
            _publish,
            {"qwen3vl_8b": (lambda: texts.qwen3_vl(words=words("qwen")), texts.under("model."))},
            _vae,
            published.wan22,
        ),
        diffusers.QwenImage21Pipeline,
        _latent,
        _texts,
        LORAS["qwen_image_21"],
        decode=_decoded,
    )
}
(CASE,) = CASES.values()


class TestQwenImage21(FamilyTests):
    case = CASE


def test_published_names_are_those_that_diffusers_converts() -> None:
    state = seeded(_model, 1).state_dict()
    theirs = convert_qwen_image21_transformer_checkpoint_to_diffusers(_publish(state))
    assert theirs.keys() == state.keys()
    assert all(torch.equal(theirs[key], state[key]) for key in state)


def test_texts_of_a_batch_are_those_of_texts_alone() -> None:
    """States before the final norm, also of an empty text, and of one that is padded."""
    own = TextTokenizer(tiny("qwen"), "qwen")
    check_texts_of_a_batch(texts.qwen3_vl(words=words("qwen")), own, READING, _texts)


def test_predictions_for_texts_of_two_lengths_are_those_of_each_alone() -> None:
    """The image has the position after its text, which the module takes from the first row of a batch."""
    check_texts_of_two_lengths(qwen_image_21.forward, seeded(_model, 1), 64)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_shift_counts_cells_and_is_that_of_the_saved_folder(tmp_path: Path) -> None:
    """Sides are multiples of two cells, of which each is a patch. A folder may have its tokenizer in `processor`."""
    save_file(CASE.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    checkpoint = open_checkpoint(tmp_path / "tiny.safetensors")
    save_diffusers(checkpoint, tmp_path / "folder")
    again = open_checkpoint(tmp_path / "folder").family.sampling
    assert again.noise == checkpoint.family.sampling.noise
    assert (again.side_multiple, patches_of(again, 1024, 512, 0)) == (32, 64 * 32)
    (tmp_path / "folder/tokenizer").rename(tmp_path / "folder/processor")
    weights = next((tmp_path / "folder/text_encoder").glob("*.safetensors"))
    assert find_tokenizer("qwen", words("qwen"), weights=weights).source.endswith("processor/tokenizer.json")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_folder_with_levels_of_its_own_is_sampled_at_them(tmp_path: Path) -> None:
    """As of Qwen-Image 2.1 Turbo, unless a request sets what levels follow from. The folder saved again has them."""
    save_file(CASE.tiny.file(), tmp_path / "whole.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    folder, levels = tmp_path / "folder/tiny", [1.0, 0.9, 0.3]
    folder.parent.mkdir()
    save_diffusers(open_checkpoint(tmp_path / "whole.safetensors"), folder)
    index, scheduler = folder / "model_index.json", folder / "scheduler/scheduler_config.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"sample_sigmas": levels}))
    with pytest.raises(UnknownArchitecture, match="use_dynamic_shifting: found True, expected false"):
        open_checkpoint(folder)
    scheduler.write_text(json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler"}))
    save_diffusers(open_checkpoint(folder), tmp_path / "again")
    assert json.loads((tmp_path / "again/model_index.json").read_text())["sample_sigmas"] == levels
    tiny = TinyModel.of_folder(tmp_path / "folder")
    size = {"width": 96, "height": 64}
    made, usual = (tiny.made(prompt="a cat", **size, **fields) for fields in ({}, {"steps": 3}))
    modules = [tiny.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline, noise = _pipeline(*modules, levels), ImageNoise(11).draw((1, 64, 4, 6))
    found = pipeline(
        prompt="a cat", **size, output_type="latent", latents=pipeline._pack_latents(noise, 1, 64, 4, 6)
    ).images  # fmt: skip
    expected = pipeline._unpack_latents(found, 64, 96, 16)[:, :, 0]
    wide = max(1.0, float(expected.std()))
    torch.testing.assert_close(made.latents[0], expected, rtol=0.0, atol=1e-4 * wide)
    assert not torch.allclose(usual.latents[0], expected, atol=0.01 * wide)
    tiny.close()
    for wrong in ([0.5, 0.9], [1.0, 0.0], [1.5], "1"):
        index.write_text(json.dumps(json.loads(index.read_text()) | {"sample_sigmas": wrong}))
        with pytest.raises(UnknownArchitecture, match="sample_sigmas"):
            open_checkpoint(folder)
