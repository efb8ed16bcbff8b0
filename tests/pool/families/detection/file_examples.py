"""One example of each kind of file that people keep beside models: names and shapes only, published or tiny sizes."""

from __future__ import annotations

import functools
import gzip
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from modelpool.pool.families.detection.file_kinds import FileKind
from tests.pool.families.detection.published import (
    FOUND,
    GOLDEN,
    Shapes,
    models_in_diffusers_naming,
    shapes_in_diffusers_naming,
    shapes_of,
)
from tests.pool.families.test_t2i_adapters import adapter, original_names
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.inference.image_prompts.tiny_adapters import flat, ip_adapter
from tests.pool.inference.upscalers.tiny_upscalers import LAYOUTS, tiny_state
from tests.pool.models.loading import layouts
from tests.pool.zoo.case import quiet_libraries

CONTROLNET, LORA, PROMPT = FileKind.CONTROLNET, FileKind.LORA, FileKind.IMAGE_PROMPT
EMBEDDING, UPSCALER = FileKind.EMBEDDING, FileKind.UPSCALER


@dataclass(frozen=True)
class Example:
    """A file that is no model.

    title  what it is called
    kind   for the registry
    runs   whether this version uses it
    """

    shapes: Shapes
    title: str
    kind: FileKind | None
    runs: bool = True


def shapes(state: Mapping[str, Tensor]) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def named(*keys: str, shape: tuple[int, ...] = (8, 8)) -> Shapes:
    return dict.fromkeys(keys, shape)


#: arguments of diffusers' ControlNets that have no usable defaults, or make models that are too large
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "HunyuanDiT2DControlNetModel": {
        "transformer_num_layers": 40, "num_attention_heads": 16, "attention_head_dim": 88, "in_channels": 4,
        "patch_size": 2, "sample_size": 128, "cross_attention_dim": 1024, "hidden_size": 1408, "mlp_ratio": 4.3637,
    },
    "QwenImageControlNetModel": {"num_layers": 5},
    "FluxControlNetModel": {"num_layers": 2, "num_single_layers": 0, "guidance_embeds": True},
    "SD3ControlNetModel": {"num_layers": 6},
    "SanaControlNetModel": {"num_layers": 7},
    "ZImageControlNetModel": {"control_layers_places": [0, 5, 10], "control_in_dim": 16},
    "ControlNetUnionModel": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (320, 640),
        "cross_attention_dim": 2048, "num_attention_heads": 8, "transformer_layers_per_block": (1, 1),
        "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
_CONTROLS = {
    "ControlNetModel": ("a ControlNet for Stable Diffusion 1, 2 and XL", True),
    "ControlNetUnionModel": ("a ControlNet for Stable Diffusion XL, with several modes", True),
    "FluxControlNetModel": ("a ControlNet for Flux", True),
    "SD3ControlNetModel": ("a ControlNet for Stable Diffusion 3", True),
    "QwenImageControlNetModel": ("a ControlNet for Qwen-Image", True),
    "HunyuanDiT2DControlNetModel": ("a ControlNet for HunyuanDiT", True),
    "ZImageControlNetModel": ("a ControlNet for Z-Image", True),
    "SanaControlNetModel": ("a ControlNet for Sana", False),
    "CosmosControlNetModel": ("a ControlNet for Cosmos", False),
    "SparseControlNetModel": ("a SparseCtrl ControlNet", False),
    "ControlNetXSAdapter": ("a ControlNet-XS", False),
    "UNetControlNetXSModel": ("a ControlNet-XS", False),
}


def diffusers_controls() -> dict[str, type[Any]]:
    """Every ControlNet of diffusers, but for lists of several."""
    from diffusers.models import controlnets

    found = {**vars(controlnets), **vars(diffusers.models)}
    names = {name for name in found if "Control" in name and name.endswith(("Model", "Adapter"))} | {
        name for name in dir(diffusers) if "ControlNet" in name and name.endswith(("Model", "Adapter"))
    }
    classes = {name: found.get(name) or getattr(diffusers, name) for name in names if "Multi" not in name}
    classes["ControlNetXSAdapter"] = controlnets.controlnet_xs.ControlNetXSAdapter
    return {name: each for name, each in classes.items() if inspect.isclass(each)}


@functools.cache
def others() -> dict[str, Example]:
    """Files that are no model, by a name of their own."""
    with torch.device("meta"), quiet_libraries():
        built = {
            name: shapes(made(**_ARGUMENTS.get(name, {})).state_dict()) for name, made in diffusers_controls().items()
        }
        motion = shapes(diffusers.MotionAdapter().state_dict())
        moving = shapes(diffusers.UNetMotionModel().state_dict())
        t2i = {
            kind: adapter([32, 64], kind).state_dict() for kind in ("full_adapter", "full_adapter_xl", "light_adapter")
        }
    found = {
        f"diffusers {name}": Example(built[name], title, CONTROLNET, runs) for name, (title, runs) in _CONTROLS.items()
    }
    unet = "a ControlNet for Stable Diffusion 1, 2 and XL"
    plain = ldm_controlnet(layouts.TINY_UNET, "")
    found |= {
        "control ldm": Example(ldm_controlnet(layouts.TINY_UNET), unet, CONTROLNET),
        "control ldm bare": Example(plain, unet, CONTROLNET),
        "control lora": Example(plain | named("lora_controlnet"), "a Control-LoRA", CONTROLNET, False),
        "control tiny flux": _control(tiny_controls.flux(), "Flux"),
        "control xlabs": Example(
            shapes(tiny_controls.xlabs_file(tiny_controls.flux(conditioning_embedding_channels=8).state_dict())),
            "a ControlNet for Flux, of XLabs", CONTROLNET,
        ),
        "control tiny sd3": _control(tiny_controls.sd3(), "Stable Diffusion 3"),
        "control sd35": Example(
            shapes(tiny_controls.sd35_file(tiny_controls.sd35_large().state_dict())),
            "a ControlNet for Stable Diffusion 3", CONTROLNET,
        ),
        "control tiny qwen": _control(tiny_controls.qwen_image(), "Qwen-Image"),
        "control qwen inpaint": _control(tiny_controls.qwen_image(extra_condition_channels=4), "Qwen-Image"),
        "control qwen blockwise": _control(tiny_controls.qwen_blockwise(), "Qwen-Image, of DiffSynth"),
        "control tiny hunyuan": _control(tiny_controls.hunyuan_dit(), "HunyuanDiT"),
        **{f"control z {each}": _control(tiny_controls.z_image(each), "Z-Image") for each in ("1", "2.0", "2.1")},
        **{f"t2i {kind}": Example(shapes(state), "a T2I-Adapter", CONTROLNET) for kind, state in t2i.items()},
        **{
            f"t2i original {kind}": Example(shapes(original_names(state, 2)), "a T2I-Adapter", CONTROLNET)
            for kind, state in t2i.items()
        },
        **_unused_controls(),
        **_prompts(),
        **_loras(),
        **{f"upscaler {name}": Example(shapes(tiny_state(name)), "an upscaler", UPSCALER) for name in LAYOUTS},
        "upscaler swinir": Example(
            named("conv_first.weight", "layers.0.residual_group.blocks.0.norm1.weight", "conv_last.weight"),
            "an upscaler", UPSCALER,
        ),
        "upscaler of latents": Example(
            named("initial_conv.weight", "res_blocks.0.conv1.weight", "upsampler.0.weight", "final_conv.weight"),
            "an upscaler of latents", UPSCALER,
        ),
        "motion module": Example(motion, "an AnimateDiff motion module", None, False),
        "motion unet": Example(moving, "a UNet with the motion modules of AnimateDiff", None, False),
        "gligen": Example(
            named("position_net.linears.0.weight", "input_blocks.1.1.transformer_blocks.0.fuser.alpha_attn"),
            "a GLIGEN model", FileKind.GLIGEN,
        ),
        "gligen of images": Example(
            named("position_net.linears_text.0.weight", "input_blocks.1.1.transformer_blocks.0.fuser.alpha_attn"),
            "a GLIGEN model that reads something else than texts in boxes", FileKind.GLIGEN, False,
        ),
        "gligen in a unet": Example(
            named("position_net.linears.0.weight", "conv_in.weight", "down_blocks.0.resnets.0.norm1.weight"),
            "a UNet with a GLIGEN model in it", None, False,
        ),
        "hypernetwork": Example(
            named("768.0.linear.0.weight", "768.1.linear.0.weight"), "a hypernetwork", FileKind.HYPERNETWORK, False
        ),
        "inversion a1111": Example(named("string_to_param.*", shape=(2, 768)), _INVERSION, EMBEDDING),
        "inversion sdxl": Example({"clip_l": (2, 768), "clip_g": (2, 1280)}, _INVERSION, EMBEDDING),
        "inversion diffusers": Example({"<cat-toy>": (768,)}, _INVERSION, EMBEDDING),
        "inversion sd2": Example({"emb_params": (4, 1024)}, _INVERSION, EMBEDDING),
        "connectors": Example(
            named("text_embedding_projection.aggregate_embed.weight", "video_embeddings_connector.learnable_registers"),
            "text connectors of LTX-2, without their model", None, False,
        ),
        "mmproj": Example(named("v.patch_embd.weight", "v.blk.0.ln1.weight", "mm.0.weight"), _MMPROJ, None, False),
        "optimizer": Example(named("state.0.exp_avg", "state.0.exp_avg_sq"), "the state of an optimizer", None, False),
        "vace module": Example(
            named("vace_patch_embedding.weight", "vace_blocks.0.before_proj.weight"),
            "the control module of Wan VACE, without its model", None, False,
        ),
    }  # fmt: skip
    return found


_INVERSION = "a textual inversion embedding"
_MMPROJ = "the vision part of a language model (mmproj)"


def _control(module: Any, models: str) -> Example:
    return Example(shapes(module.state_dict()), f"a ControlNet for {models}", CONTROLNET)


def _unused_controls() -> dict[str, Example]:
    """ControlNets of authors whose code is in no dependency, by their first names."""
    listed = {
        "a ControlNet-LLLite": named("lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight"),
        "a ControlNet for PixArt": named("controlnet.0.copied_block.attn.qkv.weight"),
        "a Fun ControlNet for Qwen-Image": named("control_img_in.weight", "control_blocks.0.after_proj.weight"),
        "a ControlNet for Wan": named(
            "controlnet_patch_embedding.weight", "controlnet_blocks.0.weight", "blocks.0.attn1.to_q.weight"
        ),
        "a ControlNet for HunyuanDiT in its published naming": named(
            "after_proj_list.0.weight", "before_proj.weight", "blocks.0.attn1.Wqkv.weight"
        ),
        "a ControlNet of a kind that is not known here": named("controlnet_encode_first.0.weight"),
    }  # fmt: skip
    return {title: Example(each, title, CONTROLNET, runs=False) for title, each in listed.items()}


def _prompts() -> dict[str, Example]:
    kinds = ("base", "full", "plus", "faceid", "faceid_plus")
    found = {
        f"prompt {kind}": Example(shapes(flat(ip_adapter(kind, [(320, 768)] * 2))), "an IP-Adapter", PROMPT)
        for kind in kinds
    }
    with_lora = found["prompt faceid"].shapes | named(
        "ip_adapter.0.to_q_lora.down.weight", "ip_adapter.0.to_q_lora.up.weight"
    )
    xlabs = named("ip_adapter_proj_model.proj.weight", "ip_adapter_proj_model.norm.weight") | {
        f"double_blocks.0.processor.ip_adapter_double_stream_{part}_proj.weight": (3072, 4096) for part in "kv"
    }
    return found | {
        "prompt faceid with its lora": Example(with_lora, "an IP-Adapter", PROMPT),
        "prompt xlabs": Example(xlabs, "an IP-Adapter", PROMPT),
        "redux": Example(
            {"redux_up.weight": (12288, 1152), "redux_down.weight": (4096, 12288)}, "a Redux style model", PROMPT
        ),
        "pulid": Example(
            named("pulid_encoder.latents", "pulid_ca.0.norm1.weight"), "a PuLID face adapter", None, False
        ),
        "photomaker": Example(
            named("id_encoder.vision_model.embeddings.patch_embedding.weight"), "a PhotoMaker face adapter", None, False
        ),
    }


def _loras() -> dict[str, Example]:
    base = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    parts = {
        "kohya": (f"{base}.lora_up.weight", f"{base}.lora_down.weight", f"{base}.alpha"),
        "peft": ("transformer.x_embedder.lora_A.weight", "transformer.x_embedder.lora_B.weight"),
        "adapter name": ("transformer.x.lora_A.default.weight", "transformer.x.lora_B.default.weight"),
        "attn procs": ("unet.down_blocks.0.attentions.0.processor.to_q_lora.up.weight",),
        "loha": tuple(f"{base}.hada_w{n}_{part}" for n in (1, 2) for part in "ab"),
        "lokr": (f"{base}.lokr_w1", f"{base}.lokr_w2"),
        "oft": (f"{base}.oft_blocks",),
        "glora": tuple(f"{base}.{part}.weight" for part in ("a1", "a2", "b1", "b2")),
        "dora": (f"{base}.lora_up.weight", f"{base}.lora_down.weight", f"{base}.dora_scale"),
        "full": (f"{base}.diff", f"{base}.diff_b"),
        "xlabs": ("double_blocks.0.processor.qkv_lora1.up.weight", "double_blocks.0.processor.qkv_lora1.down.weight"),
        "control of bfl": (
            "img_in.lora_A.weight", "img_in.lora_B.weight", "single_blocks.0.norm.key_norm.scale",
            "double_blocks.0.img_attn.qkv.lora_A.weight",
        ),
        "motion": ("down_blocks.0.motion_modules.0.temporal_transformer.to_q_lora.up.weight",),
        "with an embedding": (f"{base}.lora_up.weight", f"{base}.lora_down.weight", "bundle_emb.worn.clip_l"),
        "of a controlnet's names": ("controlnet_blocks.0.lora_A.weight", "controlnet_blocks.0.lora_B.weight"),
    }  # fmt: skip
    return {f"lora {name}": Example(named(*keys), "a LoRA", LORA) for name, keys in parts.items()}


@functools.cache
def models() -> dict[str, Shapes]:
    """Published diffusion models, in both namings."""
    return {
        **{f"model {name}": shapes_of(name) for name in FOUND},
        **{f"model {name} of diffusers": shapes_in_diffusers_naming(name) for name in models_in_diffusers_naming()},
    }


@functools.cache
def parts_of_models() -> dict[str, Shapes]:
    """Published VAEs and text encoders."""
    found: dict[str, Shapes] = {}
    for name in ("vae_keys", "text_encoder_keys"):
        listed = json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))
        for part, keys in listed.items():
            found[f"{name} {part}"] = (
                {key: tuple(shape) for key, shape in keys.items()} if isinstance(keys, dict) else named(*keys)
            )
    return found
