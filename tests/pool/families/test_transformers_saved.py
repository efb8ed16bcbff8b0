"""Files of the families that run on transformers are saved again as they were, and take LoRAs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_videos_from_images import CONCATENATED, KEPT
from tests.pool.families.test_wan_vace import VACE
from tests.pool.families.tiny_audio import STABLE_AUDIO
from tests.pool.families.tiny_relatives import SMALL_FAMILIES
from tests.pool.families.tiny_shown import SHOWN_FAMILIES
from tests.pool.families.whole_transformer import Whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Mochi's own attention wants half precision of the CPU
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


#: those that run on texts alone, and all
ON_TEXTS = {**SMALL_FAMILIES, KEPT.name: KEPT, STABLE_AUDIO.name: STABLE_AUDIO}
#: that LoRA and merged file are compared in
STEPS = 2
FAMILIES = {**ON_TEXTS, **SHOWN_FAMILIES, CONCATENATED.name: CONCATENATED, VACE.name: VACE}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_saved_again_is_that_file(name: str, tmp_path: Path) -> None:
    """Tensor for tensor, tokenizers and numbers that are no weights included."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_file(FAMILIES[name].file(), first)
    save_checkpoint(open_checkpoint(first), second)
    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)


_FLUX, _SD3 = ("double_blocks.0.img_attn.qkv", "diffusion_model.{}"), "joint_blocks.0.x_block.attn.qkv"
_PIXART, _HUNYUAN_DIT = ("blocks.0.cross_attn.q_linear", "diffusion_model.{}"), "blocks.0.attn2.q_proj"
#: a weight of each family's diffusion model under its published name, and the form of LoRA names that people use for it
LORAS = {
    "sd3": (_SD3, "diffusion_model.{}"),
    "sd35_large": (_SD3, "diffusion_model.{}"),
    "sd35_medium": (_SD3, "diffusion_model.{}"),
    "flux_dev": _FLUX,
    "flux_schnell": _FLUX,
    "flux2_klein": _FLUX,
    "flux2": _FLUX,
    "chroma": _FLUX,
    "qwen_image": ("transformer_blocks.0.attn.to_q", "transformer.{}"),
    "z_image": ("layers.0.attention.qkv", "diffusion_model.{}"),
    "lumina2": ("layers.0.attention.qkv", "diffusion_model.{}"),
    "auraflow": ("double_layers.0.attn.w2q", "diffusion_model.{}"),
    "pixart_sigma": _PIXART,
    "pixart_alpha": _PIXART,
    "pixart_alpha_512": _PIXART,
    "hunyuan_dit": (_HUNYUAN_DIT, "diffusion_model.{}"),
    "hunyuan_dit_1": (_HUNYUAN_DIT, "diffusion_model.{}"),
    "hunyuan_image_21": _FLUX,
    "hidream_i1": ("double_stream_blocks.0.block.attn1.to_q", "diffusion_model.{}"),
    "wan_t2v": ("blocks.0.self_attn.q", "diffusion_model.{}"),
    "wan22_ti2v": ("blocks.0.self_attn.q", "diffusion_model.{}"),
    "hunyuan_video": ("double_blocks.0.img_attn_qkv", "diffusion_model.{}"),
    "hunyuan_video_15": _FLUX,
    "ltxv": ("transformer_blocks.0.attn1.to_q", "diffusion_model.{}"),
    "mochi": ("blocks.0.attn.qkv_x", "diffusion_model.{}"),
    "cosmos_t2v": ("blocks.block0.blocks.0.block.attn.to_q.0", "diffusion_model.{}"),
    "cosmos_i2v": ("blocks.block0.blocks.0.block.attn.to_q.0", "diffusion_model.{}"),
    "cosmos2_t2i": ("blocks.0.self_attn.q_proj", "diffusion_model.{}"),
    "cosmos2_i2v": ("blocks.0.self_attn.q_proj", "diffusion_model.{}"),
    "stable_audio_1": ("transformer.layers.0.self_attn.to_qkv", "diffusion_model.{}"),
}


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_draws_what_the_merged_file_draws(name: str, tmp_path: Path) -> None:
    """On the diffusion model, with its published names."""
    weight, form = LORAS[name]
    plain, loras = tmp_path / "plain", tmp_path / "loras"
    plain.mkdir()
    loras.mkdir()
    whole = Whole(plain, FAMILIES[name])
    prefix = whole.family.prefixes[Role.DIFFUSION_MODEL]
    shape = whole.opened.checkpoint.shapes[f"{prefix}{weight}.weight"]
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    base = form.format(weight)
    save_file({f"{base}.lora_B.weight": up * 0.05, f"{base}.lora_A.weight": down}, loras / "some.safetensors")
    catalog = Catalog((plain,), (loras,), "cpu")
    lora = catalog.find_lora("some", 0.8)
    texts = whole.texts()
    without, drawn = whole.latent(texts, steps=STEPS).samples_CHW, whole.latent(texts, (lora,), steps=STEPS)
    merged = tmp_path / "merged"
    merged.mkdir()
    save_checkpoint(whole.opened, merged / "tiny.safetensors", loras=(lora,))
    whole.engine.close()
    other = Whole(merged, FAMILIES[name], write=False)
    expected = other.latent(texts, steps=STEPS).samples_CHW
    other.engine.close()
    assert not np.allclose(without, expected, atol=1e-3)
    np.testing.assert_allclose(drawn.samples_CHW, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
