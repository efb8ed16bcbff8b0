"""Tiny configurations of real architectures with random weights and inputs, chosen for what breaks naive casting.

UNet and VAE (stock layers), CLIP (position table), T5 (raw norms, sniffs its own dtype), SD3.5 (raw RMSNorm), Flux, Wan
(subclassed norms, a raw table, tables that no file holds), AuraFlow (register tokens, sniffs its parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A built module, inputs for it, and which part of its result to compare."""

    module: nn.Module
    inputs: Inputs

    def run(self, device: torch.device | None = None) -> list[Tensor]:
        """All tensors of the result, on the CPU."""
        inputs = {k: v if device is None else v.to(device) for k, v in self.inputs.items()}
        out = self.module(**inputs, return_dict=False)
        return [t.to("cpu") for t in _tensors(out)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return []


def unet() -> tuple[nn.Module, Inputs]:
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }
    return module, inputs


def sd35() -> tuple[nn.Module, Inputs]:
    module = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([10.0, 500.0]),
    }
    return module, inputs


def flux() -> tuple[nn.Module, Inputs]:
    module = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.2]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }
    return module, inputs


def wan() -> tuple[nn.Module, Inputs]:
    module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }
    return module, inputs


def auraflow() -> tuple[nn.Module, Inputs]:
    module = diffusers.AuraFlowTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=256,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 32, 32),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "timestep": torch.tensor([0.1, 0.5]),
    }
    return module, inputs


def vae() -> tuple[nn.Module, Inputs]:
    module = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    return module, {"sample": torch.randn(1, 3, 16, 16)}


def clip() -> tuple[nn.Module, Inputs]:
    config = transformers.CLIPTextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        eos_token_id=98,
        bos_token_id=97,
        pad_token_id=98,
    )
    return transformers.CLIPTextModel(config), {"input_ids": torch.randint(0, 97, (2, 9))}


def t5() -> tuple[nn.Module, Inputs]:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
    )
    return transformers.T5EncoderModel(config), {"input_ids": torch.randint(0, 98, (2, 9))}


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    f.__name__: f for f in (unet, sd35, flux, wan, auraflow, vae, clip, t5)
}


def build(family: str, storage: torch.dtype) -> Case:
    """A case whose floating point parameters are random numbers rounded to `storage`, held in float32.

    Random, because zero-initialised gates would hide what is behind them.
    """
    torch.manual_seed(11)
    module, inputs = FAMILIES[family]()
    for parameter in module.parameters():
        noise = torch.randn_like(parameter) * (0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5)
        parameter.data = noise.to(storage).float()
    return Case(module.eval().requires_grad_(False), inputs)


def store_in(module: nn.Module, storage: torch.dtype) -> None:
    """Put the parameters of `module` in `storage`, exactly."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.data.to(storage), requires_grad=False)
