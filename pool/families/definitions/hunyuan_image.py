"""Hunyuan Image 2.1: a second encoder reads the words to render. Torch-free.

Its refiner has the same architecture: `hunyuan_image_refiner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import HUNYUAN_VIDEO
from modelpool.pool.families.parts import hunyuan, sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

_TEMPLATE = fam.QWEN_IMAGE.removesuffix("\n<|im_start|>assistant\n")
#: tokens that the encoder of the words to render reads
_GLYPHS = 128
#: patches of its refiner, and width of the image states that HunyuanVideo 1.5 reads: models with the same keys
REFINER_PATCH, _VIDEO_VISION_WIDTH = (1, 1, 1), 1152
#: last step of plain classifier-free guidance, zero-based: of an image, and of one with text in it. Source:
#: hunyuanvideo-community/HunyuanImage-2.1-Diffusers
_CFG_STEPS = {"guider": 5, "ocr_guider": 38}


def is_hunyuan_image(found: fam.Config) -> bool:
    """Return whether a model with these sizes is neither a video model nor the refiner."""
    is_other = found["patch_size"] == REFINER_PATCH or found["vision_in_dim"] == _VIDEO_VISION_WIDTH
    return found["vec_in_dim"] is None and not is_other


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.HunyuanImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, head = sizes["hidden_size"], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    second = shapes.get("context_embedder_2.linear_1.weight")
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "num_layers": sizes["depth"],
        "num_single_layers": sizes["depth_single_blocks"],
        "num_refiner_layers": len(fam.ShapeReader(shapes).numbers("context_embedder.token_refiner.refiner_blocks.")),
        "mlp_ratio": fam.ratio(shapes["transformer_blocks.0.ff.net.0.proj.weight"][0], hidden),
        "patch_size": sizes["patch_size"],
        "guidance_embeds": sizes["guidance_embed"],
        "text_embed_dim": sizes["context_in_dim"],
        "text_embed_2_dim": second[1] if second else None,
        "rope_axes_dim": (head // 2, head // 2),
        "use_meanflow": sizes["meanflow"],
    }


def forward(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The distilled model reads its next level."""
    config = fam.config_of(module)
    second = {}
    if "context_2" in kwargs:
        second = {
            "encoder_hidden_states_2": kwargs["context_2"],
            "encoder_attention_mask_2": text_mask(kwargs, "context_2"),
        }
    return fam.sample_of(
        module(
            hidden_states=x,
            # it computes in the dtype of the timestep
            timestep=(level_B * fam.TIMESTEPS).to(x.dtype),
            timestep_r=(kwargs["next_level"] * fam.TIMESTEPS).to(x.dtype) if config.use_meanflow else None,
            guidance=(kwargs["guidance"] * fam.TIMESTEPS).to(x.dtype) if config.guidance_embeds else None,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            **second,
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="hunyuan_image_21",
        title="Hunyuan Image 2.1",
        detect=fam.Detection(HUNYUAN_VIDEO, is_hunyuan_image, "HunyuanImage21"),
        build=fam.ModelBuild(
            "HunyuanImageTransformer2DModel",
            config,
            fam.LayoutNames(
                "hunyuan_image",
                like="hunyuan_video",
                prefixes=(
                    *hunyuan.SECOND_TEXT,
                    ("time_text_embed.", "time_guidance_embed."),
                    ("time_r_in.in_layer.", "time_guidance_embed.timestep_embedder_r.linear_1."),
                    ("time_r_in.out_layer.", "time_guidance_embed.timestep_embedder_r.linear_2."),
                ),
            ),
            forward,
            dtypes=fam.HALF_FIRST,
            optional_inputs=frozenset({"context_mask", "context_2", "context_2_mask", "guidance", "next_level"}),
        ),
        text=fam.TextInputs(
            (
                hunyuan.qwen_reading(_TEMPLATE, fam.QWEN_IMAGE_BEFORE),
                hunyuan.glyph_reading(_GLYPHS, fam.Cleaning.QUOTED),
            ),
            set_name="hunyuan_image",
            optional=frozenset({"byt5_small_glyph"}),
        ),
        latent="hunyuan_image",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=5.0),
            reads=frozenset({"context", "context_mask", "context_2", "context_2_mask", "guidance", "next_level"}),
            side_multiple=64,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=3.5, sampler="euler", schedule="simple", guidance=fam.Guidance.PROJECTED_LATE
            ),
            sequence=sequence_plans.HUNYUAN_IMAGE,
        ),
        size=(2048, 2048),
        sources="diffusers' HunyuanImagePipeline; shift of ComfyUI's class. The distilled one has a shift of 4 and "
        "8 steps, reads a guidance of 3.25 and its next level; its file has guidance_in and time_r_in",
        folder=fam.DiffusersFolder(
            "HunyuanImagePipeline",
            guiders={
                folder: fam.SchedulerFacts(
                    "AdaptiveProjectedMixGuidance", {"adaptive_projected_guidance_start_step": step}
                )
                for folder, step in _CFG_STEPS.items()
            },
        ),
        lora=hunyuan.HUNYUAN_LORA,
    ),
)
