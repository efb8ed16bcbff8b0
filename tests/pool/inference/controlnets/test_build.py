"""ControlNets are built from either published layout, at any size, and saved as they were; what is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import ControlNetModel
from safetensors.torch import load_file, save_file

from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet, plan_controlnet
from modelpool.pool.models.components.common.diffusers_private import differing_keys
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.values.core.stage_params import ControlRef
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import LdmUnet
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

UNETS: dict[str, LdmUnet] = {
    "sd1": layouts.TINY_UNET,
    "sdxl": layouts.TINY_SDXL_UNET,
    "sd1, as published": LdmUnet(),
    "sdxl, as published": layouts.SDXL_UNET,
}
PUBLISHED_WIDTHS = (16, 32, 96, 256)


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
@pytest.mark.parametrize("prefix", ["control_model.", ""])
def test_both_layouts_are_the_same_module_and_are_saved_as_they_were(name: str, prefix: str, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "c.safetensors", layout=ldm_controlnet(UNETS[name], prefix))
    tensors = load_file(path)
    plan = plan_controlnet({key: tuple(value.shape) for key, value in tensors.items()})
    module = plan.build(tensors)
    saved = plan.save(module, tensors)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensors[key]) for key in tensors)
    state = module.state_dict()
    again = plan_controlnet({key: tuple(value.shape) for key, value in state.items()})
    assert again.config == plan.config
    rebuilt = again.build(state).state_dict()
    assert all(torch.equal(rebuilt[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["sd1, as published", "sdxl, as published"])
def test_published_sizes_are_those_of_diffusers(name: str) -> None:
    """Its own defaults are SD1's; SDXL's are those of diffusers/controlnet-canny-sdxl-1.0."""
    plan = plan_controlnet(ldm_controlnet(UNETS[name], widths=PUBLISHED_WIDTHS))
    plan.empty()
    with torch.device("meta"):
        if name.startswith("sd1"):
            expected = ControlNetModel(cross_attention_dim=768)
        else:
            expected = ControlNetModel(
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                block_out_channels=(320, 640, 1280),
                attention_head_dim=(5, 10, 20),
                transformer_layers_per_block=(1, 2, 10),
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            )
    assert not differing_keys(plan.key_map, expected)
    assert dict(plan.empty().config)["attention_head_dim"] == expected.config["attention_head_dim"]


def test_what_is_no_controlnet_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"its 2 tensors are not a ControlNet \(the first are a, b\)"):
        plan_controlnet({"a": (1,), "b": (2,)})
    broken = ldm_controlnet(layouts.TINY_UNET)
    del broken["control_model.zero_convs.2.0.weight"]
    with pytest.raises(UnknownArchitecture, match="ControlNet"):
        plan_controlnet(broken).empty()
    odd = {**ldm_controlnet(layouts.TINY_UNET), "control_model.zero_convs.2.0.bias": (5,)}
    with pytest.raises(UnknownArchitecture, match=r"controlnet_down_blocks\.2\.bias has shape \(5,\)"):
        plan_controlnet(odd).empty()
    path = tmp_path / "lora.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(UnknownArchitecture, match=r"lora\.safetensors: its 1 tensor is not"):
        OpenControlNet(ControlRef("lora", str(path), "00", 1.0, 0.0, 1.0), "cpu")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CorruptFile):
        OpenControlNet(ControlRef("lora", str(path), "00", 1.0, 0.0, 1.0), "cpu")
