"""LoRAs that make a layer of a model larger are refused when they are matched, in every spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.values.core.errors import AdapterMismatch
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES


def test_a_lora_that_widens_a_layer_is_refused_with_both_shapes(tmp_path: Path) -> None:
    """Found in a review: the run failed in its first step, with a product of matrices that do not fit."""
    folder, loras = tmp_path / "models", tmp_path / "loras"
    folder.mkdir(), loras.mkdir()
    up, norm = torch.ones(64, 2), torch.ones(32)
    for columns in (64, 128):
        down, shape = torch.ones(2, columns), torch.tensor([64, columns])
        spelled = {"diffusion_model.img_in.lora_A.weight": down, "diffusion_model.img_in.lora_B.weight": up}
        save_file({**spelled, "diffusion_model.img_in.reshape_weight": shape}, loras / f"reshaped{columns}.safetensors")
        bfl = {"img_in.lora_A.weight": down, "img_in.lora_B.weight": up.clone()}
        save_file({**bfl, "single_blocks.0.norm.key_norm.scale": norm}, loras / f"bfl{columns}.safetensors")
    tiny = TinyFamilyModel(folder, FAMILIES["flux_dev"], loras=(loras,))
    tiny.close()
    for name in ("reshaped", "bfl"):
        assert tiny.catalog.lora_warning(tiny.model, tiny.catalog.find_lora(f"{name}64", 1.0)) is None
        wide = tiny.catalog.find_lora(f"{name}128", 1.0)
        with pytest.raises(
            AdapterMismatch, match=r"'x_embedder.weight'.* from shape \(64, 64\) to \(64, 128\), expected"
        ):
            tiny.catalog.lora_warning(tiny.model, wide)
