"""Krea 2, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions import krea2
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.templates import whole_text
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.sampling_facts import Guidance
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import QWEN_VAE, WIDTH, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

(READING,) = krea2.FAMILIES[0].text.readings
LAYERS = len(READING.layers)


def _model() -> Any:
    """One layer: of random weights, whose norms are twice as large as others', two multiply rounding by a hundred."""
    return diffusers.Krea2Transformer2DModel(
        num_layers=1, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        timestep_embed_dim=24, text_hidden_dim=WIDTH, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=40, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _publish(state: State) -> File:
    file: File = {}
    for key, tensor in state.items():
        name = next((old + key.removeprefix(new) for old, new in krea2._OUTER if key.startswith(new)), key)
        for old, new in krea2._INNER:
            name = name.replace(new, old)
        file[name] = tensor.flatten() if name.endswith(".mod.lin") else tensor
    return file


def _encoder() -> Any:
    """As many layers as the last one that is read."""
    return texts.qwen3_vl(words=words("qwen"), layers=READING.layers[-1] + 1)


def _pipeline(encoder: Any, vae: Any, model: Any, **more: Any) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, max_image_seq_len=6400
    )
    return diffusers.Krea2Pipeline(scheduler, vae, encoder, for_transformers("qwen"), model, **more)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    """The real tokens, which are around the padding in the pipeline's; those of the layers side by side."""
    with torch.no_grad():
        states, mask = _pipeline(modules[0], None, None).encode_prompt(prompt)
    return {"context": states[:, mask[0]].flatten(2)}


def _latent(whole: Whole, texts: tuple[Encoded, ...], **more: Any) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline, noise = _pipeline(*modules, **more), noise_of(whole)
    width, height = whole.sides
    told: dict[str, Any] = {}
    longest = max(len(text.context_LD) for text in texts)  # texts of a call are equally long in the pipeline
    for side, text in zip(("", "negative_"), texts, strict=False):
        states = torch.from_numpy(text.context_LD)
        padded = nn.functional.pad(states, (0, 0, 0, longest - len(states)))
        told[f"{side}prompt_embeds"] = padded[None].unflatten(-1, (LAYERS, -1))
        told[f"{side}prompt_embeds_mask"] = torch.arange(longest)[None] < len(states)
    found = pipeline(
        **told, height=height, width=width, num_inference_steps=STEPS, guidance_scale=4.5 if len(texts) > 1 else 0.0,
        latents=pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]), output_type="latent",
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, height, width)[:, :, 0]
    return unpacked


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    facts = whole.opened.latent
    means, deviations = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (facts.means, facts.deviations))
    decoded: Tensor = whole.module(Role.VAE).decode(latent[:, :, None] * deviations + means).sample
    return decoded[:, :, 0]


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"krea2": ("blocks.0.attn.wq", "diffusion_model.{}")}
CASES = {
    "krea2": Compared(
        TinyFamily("krea2", _model, _publish, {"qwen3vl_4b": (_encoder, texts.under("model."))}, *QWEN_VAE),
        diffusers.Krea2Pipeline,
        _latent,
        _texts,
        LORAS["krea2"],
        decode=_decoded,
    )
}
CASE = CASES["krea2"]


class TestKrea2(FamilyTests):
    case = CASE


def test_published_names_are_those_that_diffusers_converts() -> None:
    state = seeded(_model, 1).state_dict()
    theirs = convert_krea2_transformer_checkpoint_to_diffusers(_publish(state))
    assert theirs.keys() == state.keys()
    assert all(torch.equal(theirs[key], state[key]) for key in state)


def test_long_prompts_keep_the_end_of_the_template() -> None:
    """As the pipeline has it: of its 512 tokens, those of the end are the last ones."""
    own = TextTokenizer(tiny("qwen"), "qwen")
    after = len(own.encode(READING.template.partition("{}")[2]).ids)
    assert after == krea2._AFTER, "the tiny tokenizer has other tokens for the end of the template"
    prompt = "two cats, " * 400
    row = whole_text(own, prompt, READING)
    module = texts.qwen3_vl(words=words("qwen"), layers=READING.layers[-1] + 1)
    (found,) = read_texts(module, own, (prompt,), torch.device("cpu"), READING)
    expected = _texts([module], prompt)["context"][0]
    assert len(row.token_ids) == READING.most_tokens
    torch.testing.assert_close(found.context_LD, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_folder_of_the_turbo_model_has_its_shift_and_no_guidance(tmp_path: Path) -> None:
    """Only the index tells it. The folder saved again says so too."""
    save_file(CASE.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder")
    index = tmp_path / "folder/model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    turbo = open_checkpoint(tmp_path / "folder")
    noise, defaults = turbo.family.sampling.noise, turbo.family.sampling.defaults
    assert defaults is not None
    assert (noise.shift_by_size, noise.shift) == (None, pytest.approx(math.exp(1.15)))
    assert (defaults.steps, defaults.guidance) == (8, Guidance.NONE)
    save_diffusers(turbo, tmp_path / "again")
    assert json.loads((tmp_path / "again/model_index.json").read_text())["is_distilled"] is True
    assert open_checkpoint(tmp_path / "again").family.sampling == turbo.family.sampling
    whole = Whole(tmp_path, CASE.tiny, write=False)
    whole.model = whole.catalog.find_model("again")
    whole.opened = whole.engine._opened(whole.model)
    whole.family = whole.opened.checkpoint.family
    texts_read = whole.texts()
    with torch.no_grad():
        expected = _latent(whole, texts_read, is_distilled=True)
    ours = torch.from_numpy(whole.latent(texts_read).samples_CHW)
    torch.testing.assert_close(ours, expected[0], rtol=0.0, atol=1e-4 * max(1.0, float(expected.std())))
    whole.engine.close()
