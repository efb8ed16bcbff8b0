"""Files of the families that run on transformers are saved again as they were, and take LoRAs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pool.catalog import Catalog
from pool.checkpoints.build import open_checkpoint
from pool.saving.checkpoint_file import save_checkpoint
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_saved_again_is_that_file(name: str, tmp_path: Path) -> None:
    """Tensor for tensor, tokenizers and numbers that are no weights included."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_file(FAMILIES[name].file(), first)
    save_checkpoint(open_checkpoint(first), second)
    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)


#: a weight of each family's diffusion model under its published name, and the form of LoRA names that people use for it
LORAS = {
    "flux_dev": ("double_blocks.0.img_attn.qkv", "diffusion_model.{}"),
    "sd35_large": ("joint_blocks.0.x_block.attn.qkv", "diffusion_model.{}"),
    "qwen_image": ("transformer_blocks.0.attn.to_q", "transformer.{}"),
    "z_image": ("layers.0.attention.qkv", "diffusion_model.{}"),
    "wan_t2v": ("blocks.0.self_attn.q", "diffusion_model.{}"),
    "chroma": ("double_blocks.0.img_attn.qkv", "diffusion_model.{}"),
    "hidream_i1": ("double_stream_blocks.0.block.attn1.to_q", "diffusion_model.{}"),
    "pixart_sigma": ("blocks.0.cross_attn.q_linear", "diffusion_model.{}"),
}


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_draws_what_the_merged_file_draws(name: str, tmp_path: Path) -> None:
    """On the diffusion model, with its published names."""
    weight, form = LORAS[name]
    plain, loras = tmp_path / "plain", tmp_path / "loras"
    plain.mkdir()
    loras.mkdir()
    whole = Whole(plain, FAMILIES[name])
    shape = whole.opened.checkpoint.shapes[f"model.diffusion_model.{weight}.weight"]
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    base = form.format(weight)
    save_file({f"{base}.lora_B.weight": up * 0.05, f"{base}.lora_A.weight": down}, loras / "some.safetensors")
    catalog = Catalog((plain,), (loras,), "cpu")
    lora = catalog.find_lora("some", 0.8)
    texts = whole.texts()
    without, drawn = whole.latent(texts).samples_CHW, whole.latent(texts, (lora,))
    merged = tmp_path / "merged"
    merged.mkdir()
    save_checkpoint(whole.opened, merged / "tiny.safetensors", loras=(lora,))
    whole.engine.close()
    other = Whole(merged, FAMILIES[name], write=False)
    expected = other.latent(texts).samples_CHW
    other.engine.close()
    assert not np.allclose(without, expected, atol=1e-3)
    np.testing.assert_allclose(drawn.samples_CHW, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
