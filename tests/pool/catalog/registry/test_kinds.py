"""What a file is for is told by its keys; where they do not tell, by the nearest folder with a usual name."""

from __future__ import annotations

import pytest

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_folders, kind_of_keys
from tests.pool.catalog.registry.weights import CHECKPOINT, LORA, VAE


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (CHECKPOINT, FileKind.CHECKPOINT),
        (CHECKPOINT[:1], FileKind.DIFFUSION_MODEL),
        (("model.diffusion_model.joint_blocks.0.x", "text_encoders.clip_l.x"), FileKind.CHECKPOINT),
        (LORA, FileKind.LORA),
        (("blocks.0.hada_w1_a", "blocks.0.hada_w1_b"), FileKind.LORA),
        (VAE, FileKind.VAE),
        (("first_stage_model.decoder.conv_in.weight",), FileKind.VAE),
        (("control_model.input_blocks.0.0.weight", "model.diffusion_model.x"), FileKind.CONTROLNET),
        (("controlnet_cond_embedding.conv_in.weight",), FileKind.CONTROLNET),
        (("controlnet_blocks.0.weight", "double_blocks.0.img_attn.qkv.weight"), FileKind.CONTROLNET),
        (("control_all_x_embedder.2-1.weight", "control_layers.0.before_proj.weight"), FileKind.CONTROLNET),
        (("clip_l", "clip_g"), FileKind.EMBEDDING),
        (("emb_params",), FileKind.EMBEDDING),
        (("text_model.encoder.layers.0.mlp.fc1.weight",), FileKind.TEXT_ENCODER),
        (("encoder.block.0.layer.0.SelfAttention.q.weight",), FileKind.TEXT_ENCODER),
        (("vision_model.encoder.layers.0.mlp.fc1.weight",), FileKind.CLIP_VISION),
        (("model.0.weight", "model.1.sub.0.weight"), FileKind.UPSCALER),
        (("strange",), None),
        ((), None),
    ],
)
def test_keys_tell(keys: tuple[str, ...], kind: FileKind | None) -> None:
    assert kind_of_keys(keys, is_diffusion_model=False) is kind


def test_keys_of_a_known_diffusion_model_without_prefix_tell() -> None:
    assert kind_of_keys(("double_blocks.0.img_attn.qkv.weight",), is_diffusion_model=True) is FileKind.DIFFUSION_MODEL


@pytest.mark.parametrize(
    ("folders", "kind"),
    [
        (("sdxl", "checkpoints", "loras"), FileKind.CHECKPOINT),
        (("Stable-diffusion", "models"), FileKind.CHECKPOINT),
        (("Lora",), FileKind.LORA),
        (("VAE-approx",), FileKind.VAE),
        (("ControlNet",), FileKind.CONTROLNET),
        (("clip",), FileKind.TEXT_ENCODER),
        (("unet",), FileKind.DIFFUSION_MODEL),
        (("Upscale Models",), FileKind.UPSCALER),
        (("mine", "yours"), None),
    ],
)
def test_folders_tell(folders: tuple[str, ...], kind: FileKind | None) -> None:
    assert kind_of_folders(folders) is kind
