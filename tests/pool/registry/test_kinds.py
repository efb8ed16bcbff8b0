"""What a file is for is told by its keys; where they do not tell, by the nearest folder with a usual name."""

from __future__ import annotations

import pytest

from modelpool.pool.registry.kinds import Kind, kind_of_folders, kind_of_keys
from tests.pool.registry.weights import CHECKPOINT, LORA, VAE


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (CHECKPOINT, Kind.CHECKPOINT),
        (CHECKPOINT[:1], Kind.DIFFUSION_MODEL),
        (("model.diffusion_model.joint_blocks.0.x", "text_encoders.clip_l.x"), Kind.CHECKPOINT),
        (LORA, Kind.LORA),
        (("blocks.0.hada_w1_a", "blocks.0.hada_w1_b"), Kind.LORA),
        (VAE, Kind.VAE),
        (("first_stage_model.decoder.conv_in.weight",), Kind.VAE),
        (("control_model.input_blocks.0.0.weight", "model.diffusion_model.x"), Kind.CONTROLNET),
        (("controlnet_cond_embedding.conv_in.weight",), Kind.CONTROLNET),
        (("controlnet_blocks.0.weight", "double_blocks.0.img_attn.qkv.weight"), Kind.CONTROLNET),
        (("control_all_x_embedder.2-1.weight", "control_layers.0.before_proj.weight"), Kind.CONTROLNET),
        (("clip_l", "clip_g"), Kind.EMBEDDING),
        (("emb_params",), Kind.EMBEDDING),
        (("text_model.encoder.layers.0.mlp.fc1.weight",), Kind.TEXT_ENCODER),
        (("encoder.block.0.layer.0.SelfAttention.q.weight",), Kind.TEXT_ENCODER),
        (("vision_model.encoder.layers.0.mlp.fc1.weight",), Kind.CLIP_VISION),
        (("model.0.weight", "model.1.sub.0.weight"), Kind.UPSCALER),
        (("strange",), None),
        ((), None),
    ],
)
def test_keys_tell(keys: tuple[str, ...], kind: Kind | None) -> None:
    assert kind_of_keys(keys, is_diffusion_model=False) is kind


def test_keys_of_a_known_diffusion_model_without_prefix_tell() -> None:
    assert kind_of_keys(("double_blocks.0.img_attn.qkv.weight",), is_diffusion_model=True) is Kind.DIFFUSION_MODEL


@pytest.mark.parametrize(
    ("folders", "kind"),
    [
        (("sdxl", "checkpoints", "loras"), Kind.CHECKPOINT),
        (("Stable-diffusion", "models"), Kind.CHECKPOINT),
        (("Lora",), Kind.LORA),
        (("VAE-approx",), Kind.VAE),
        (("ControlNet",), Kind.CONTROLNET),
        (("clip",), Kind.TEXT_ENCODER),
        (("unet",), Kind.DIFFUSION_MODEL),
        (("Upscale Models",), Kind.UPSCALER),
        (("mine", "yours"), None),
    ],
)
def test_folders_tell(folders: tuple[str, ...], kind: Kind | None) -> None:
    assert kind_of_folders(folders) is kind
