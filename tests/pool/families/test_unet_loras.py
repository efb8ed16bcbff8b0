"""LoRAs of UNets, and of models that are shown an image: they draw what the file that they were merged into draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from tests.pool.families.test_from_images import image, mask
from tests.pool.families.test_unet_families import CASES, fields_of
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import SHOWN_FAMILIES, SHOWN_LAYOUTS, SHOWN_TENSORS, TinyFamilyModel
from tests.pool.families.tiny_unclip import tiny_unclip_h, tiny_unclip_l

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

_SD = "input_blocks.1.1.transformer_blocks.0.attn1.to_q"
_XL = "input_blocks.3.1.transformer_blocks.0.attn1.to_q"
_XL_OF_MORE_BLOCKS = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
#: as trainers name it after diffusers, and after the file
_AS_DIFFUSERS = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
_AS_FILE, _AS_FILE_4 = (f"lora_unet_{name.replace('.', '_')}" for name in (_XL, _XL_OF_MORE_BLOCKS))
_FLUX = ("double_blocks.0.img_attn.qkv", "lora_unet_double_blocks_0_img_attn_qkv")
#: a weight of each family's diffusion model under its published name, and the name that LoRAs have for it
LORAS = {
    "sd1": (_SD, _AS_DIFFUSERS),
    "sd2": (_SD, _AS_DIFFUSERS),
    "sdxl": (_XL, _AS_FILE),
    "playground_25": (_XL, _AS_FILE),
    "ssd_1b": (_XL_OF_MORE_BLOCKS, _AS_FILE_4),
    "vega": (_XL_OF_MORE_BLOCKS, _AS_FILE_4),
    "koala_700m": (_XL, _AS_FILE),
    "koala_1b": (_XL, _AS_FILE),
    "sdxl_refiner": (_XL, _AS_FILE),
    "sd1_inpaint": (_SD, _AS_DIFFUSERS),
    "sd2_inpaint": (_SD, _AS_DIFFUSERS),
    "sdxl_inpaint": (_XL, _AS_FILE),
    "sd1_ip2p": (_SD, _AS_DIFFUSERS),
    "sdxl_ip2p": (_XL, _AS_FILE),
    "cosxl_edit": (_XL, _AS_FILE),
    "sd_x4": (_SD, _AS_DIFFUSERS),
    "sd2_depth": (_SD, _AS_DIFFUSERS),
    "lotus_d": (_SD, _AS_DIFFUSERS),
    "sd21_unclip_l": (_SD, _AS_DIFFUSERS),
    "sd21_unclip_h": (_SD, _AS_DIFFUSERS),
    "flux_fill": _FLUX,
    "flux_control": _FLUX,
    "wan22_i2v": ("blocks.0.self_attn.q", "diffusion_model.blocks.0.self_attn.q"),
}
#: what the models that are shown an image are asked for
SHOWN: Mapping[str, Mapping[str, Any]] = {
    "sd1_ip2p": {"image": image(), "cfg": 5.0},
    "sdxl_ip2p": {"image": image(), "cfg": 5.0},
    "cosxl_edit": {"image": image(), "cfg": 5.0},
    "sd_x4": {"image": image(24, 16), "cfg": 5.0},
    "sd2_depth": {"image": image(), "cfg": 5.0},
    "lotus_d": {"image": image(), "prompt": ""},
    "sd21_unclip_l": {"image": image(), "cfg": 5.0, "width": 64, "height": 48},
    "sd21_unclip_h": {"image": image(), "cfg": 5.0, "width": 64, "height": 48},
    "flux_fill": {"image": image(), "mask": mask(), "cfg": 3.0},
    "flux_control": {"image": image(), "cfg": 3.0},
    "wan22_i2v": {"image": image(), "frames": 5, "cfg": 3.0},
}
_FAMILIES = {**SHOWN_FAMILIES, CONCATENATED.name: CONCATENATED}
_LAYOUTS = {**SHOWN_LAYOUTS, "sd21_unclip_l": tiny_unclip_l, "sd21_unclip_h": tiny_unclip_h}


def opened(name: str, folder: Path, loras: Path) -> TinyModel:
    """A tiny model of a family, and LoRAs."""
    if name in _FAMILIES:
        return TinyFamilyModel(folder, _FAMILIES[name], loras=(loras,))
    layout: Callable[[], Any] = CASES[name].layout if name in CASES else _LAYOUTS[name]
    tensors = CASES[name].tensors if name in CASES else SHOWN_TENSORS.get(name, {})
    return TinyModel(folder, layout(), tensors=tensors, loras=(loras,))


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_draws_what_the_merged_file_draws(name: str, tmp_path: Path) -> None:
    weight, said = LORAS[name]
    loras, plain, merged = (tmp_path / part for part in ("loras", "plain", "merged"))
    for folder in (loras, plain, merged):
        folder.mkdir()
    model = opened(name, plain, loras)
    shape = open_checkpoint(model.model.source).shapes[f"model.diffusion_model.{weight}.weight"]
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    save_file({f"{said}.lora_up.weight": up * 0.1, f"{said}.lora_down.weight": down}, loras / "some.safetensors")
    fields = dict(SHOWN[name]) if name in SHOWN else fields_of(CASES[name])
    fields |= {"steps": 2}
    without = model.made(**fields).latents[0]
    drawn = model.made(loras=["some:0.8"], **fields).latents[0]
    lora = model.catalog.find_lora("some", 0.8)
    save_checkpoint(model.engine._opened(model.model), merged / "tiny.safetensors", loras=(lora,))
    model.close()
    for tokenizer in plain.glob("tokenizer_*"):
        tokenizer.rename(merged / tokenizer.name)
    other = TinyModel.of_folder(merged)
    assert other.family.name == name
    expected = other.made(**fields).latents[0]
    other.close()
    wide = max(1.0, float(expected.abs().max()))
    assert not torch.allclose(without, expected, atol=1e-3)
    torch.testing.assert_close(drawn, expected, rtol=0.0, atol=2e-5 * wide)
