"""LoRAs by their names through our maps give what diffusers and PEFT give when they load and fuse them.

On real modules of small size, with an adapter on every linear layer; the maps go from the LoRA's names to the rows of
the checkpoint, and the checkpoint is converted after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import FluxLoraLoaderMixin
from torch import Tensor, nn

from modelpool.pool.models.components.common.infer_config import unet_config
from modelpool.pool.models.lora_names.diffusion_lora_names import model_names
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.weights.keymaps.key_map import RowRange
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout

pytest.importorskip("peft")

RANK = 2
SCALE = 0.7
#: PEFT multiplies in another order than we do
TOLERANCE = 2e-6


@dataclass(frozen=True, slots=True)
class Small:
    """A small checkpoint of a family, and the module that it is for."""

    layout: Layout
    module: Callable[[], nn.Module]


def _flux() -> Small:
    return Small(
        layouts.flux(2, 2, hidden=256),
        lambda: diffusers.FluxTransformer2DModel(
            num_layers=2, num_single_layers=2, num_attention_heads=2, guidance_embeds=True
        ),
    )


def _sd3() -> Small:
    return Small(
        layouts.sd3(depth=3, hidden=128, positions=4, qk_norm=True, dual_blocks=1, prefix=""),
        lambda: diffusers.SD3Transformer2DModel(
            num_layers=3,
            num_attention_heads=2,
            caption_projection_dim=128,
            pos_embed_max_size=4,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
    )


def _sd1() -> Small:
    layout = layouts.ldm_unet(layouts.TINY_UNET, prefix="")
    return Small(layout, lambda: diffusers.UNet2DConditionModel(**unet_config(layout)))


def _sdxl() -> Small:
    layout = layouts.ldm_unet(
        layouts.LdmUnet(
            model_channels=32,
            multipliers=(1, 2),
            depths=(0, 2),
            middle_depth=2,
            context_width=48,
            linear_projection=True,
            label_width=6 * 8 + 16,
        ),
        prefix="",
    )
    return Small(
        layout,
        lambda: diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(4, 8),
            cross_attention_dim=48,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        ),
    )


SMALL = {"flux": _flux, "sd3": _sd3, "sd1": _sd1, "sdxl": _sdxl}
BEGINNING = {"flux": "transformer", "sd3": "transformer", "sd1": "unet", "sdxl": "unet"}


def adapters(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Tensor, Tensor]]:
    """An up and a down factor for each name."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: (
            torch.randn(rows, RANK, generator=generator) * 0.1,
            torch.randn(RANK, columns, generator=generator) * 0.1,
        )
        for name, (rows, columns) in shapes.items()
    }


def patched(
    weights: Mapping[str, Tensor],
    names: Mapping[str, tuple[RowRange, ...]],
    loras: Mapping[str, tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """The checkpoint's tensors with each LoRA's delta on the rows that its name means."""
    changed = {key: value.clone() for key, value in weights.items()}
    for name, (up, down) in loras.items():
        for target in names[name]:
            piece = target.place((up @ down * SCALE).reshape(target.source_shape))
            changed[target.key].narrow(0, target.start, piece.shape[0]).add_(piece)
    return changed


def fused(module: nn.Module, lora: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The module's parameters after diffusers has loaded and fused `lora`."""
    module.load_lora_adapter(lora, prefix=prefix)  # type: ignore[operator]
    module.fuse_lora(lora_scale=SCALE)  # type: ignore[operator]
    return {
        key.replace(".base_layer.", "."): value for key, value in module.state_dict().items() if ".lora_" not in key
    }


def loaded(small: Small, weights: dict[str, Tensor], family: str) -> nn.Module:
    """The small module with the checkpoint's weights."""
    module = small.module()
    module.load_state_dict(layout_map(family, small.layout).load(weights))
    return module


def random_weights(layout: Layout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {key: torch.randn(shape, generator=generator) * 0.1 for key, shape in layout.items()}


def compare(expected: Mapping[str, Tensor], ours: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> int:
    """Check that all parameters are alike; how many differ from `before`."""
    assert ours.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(ours[key], expected[key], rtol=0, atol=TOLERANCE)
    return sum(not torch.equal(ours[key], before[key]) for key in expected)


@pytest.mark.parametrize("family", SMALL)
def test_diffusers_names_give_what_diffusers_makes_of_them(family: str) -> None:
    small = SMALL[family]()
    weights = random_weights(small.layout)
    key_map, names = layout_map(family, small.layout), model_names(family, small.layout)
    module = loaded(small, weights, family)
    linear = {
        f"{BEGINNING[family]}.{name}": (part.out_features, part.in_features)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }
    loras = adapters(linear)
    file: dict[str, Any] = {}
    for name, (up, down) in loras.items():
        file |= {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}
    expected = fused(module, file, BEGINNING[family])
    ours = key_map.load(patched(weights, names, loras))
    assert compare(expected, ours, key_map.load(weights)) == len(linear)


def test_kohya_names_of_flux_give_what_diffusers_makes_of_them() -> None:
    """Fused layers under the checkpoint's names: diffusers cuts the LoRA up, we put it where it belongs.

    Without the fused layers of single blocks, which diffusers cuts at the rows of the published size only.
    """
    small = _flux()
    weights = random_weights(small.layout)
    key_map, names = layout_map("flux", small.layout), model_names("flux", small.layout)
    blocks = {
        f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}": shape
        for key, shape in small.layout.items()
        if key.endswith(".weight") and key.startswith(("double_blocks", "single_blocks")) and ".linear1." not in key
    }
    loras = adapters({name: (shape[0], shape[1]) for name, shape in blocks.items() if len(shape) == 2})
    file: dict[str, Any] = {}
    for name, (up, down) in loras.items():
        file |= {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down, f"{name}.alpha": torch.tensor(2.0)}
    converted = FluxLoraLoaderMixin.lora_state_dict(file)
    expected = fused(loaded(small, weights, "flux"), converted, "transformer")
    ours = key_map.load(patched(weights, names, loras))
    assert compare(expected, ours, key_map.load(weights)) > len(loras)
