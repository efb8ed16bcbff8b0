"""Cosmos, which has learned positions, and Cosmos Predict 2, a flow: images, and videos with or without first frames.
Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.video_layouts import (
    COSMOS_DIFFUSERS_KEYS,
    COSMOS_DIFFUSERS_SIZES,
    COSMOS_LEARNED_POSITIONS,
    COSMOS_PREDICT_2,
    PATCH,
    without_mask,
)
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.video_calls import frame_rate, towards_image, with_image

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Scale of positions relative to the base size: time, height, width. By what tells the models apart: learned
#: positions (the first Cosmos), a channel for first frames, width of more than 4096. Source: diffusers'
#: scripts/convert_cosmos_to_diffusers.py
_SCALES: dict[tuple[bool, bool, bool], tuple[float, float, float]] = {
    (True, False, False): (2.0, 1.0, 1.0),
    (True, True, False): (2.0, 1.0, 1.0),
    (True, False, True): (2.0, 2.0, 2.0),
    (True, True, True): (2.0, 2.0, 2.0),
    (False, False, False): (1.0, 4.0, 4.0),
    (False, False, True): (1.0, 4.0, 4.0),
    (False, True, False): (1.0, 3.0, 3.0),
    (False, True, True): (20 / 24, 2.0, 2.0),
}
#: Predict 2.5, which reads wider texts through a projection, has the same scale at both its sizes. Source: as above
_SCALE_25 = (1.0, 3.0, 3.0)
_WIDE = 4096
#: largest latent of Predict 2, which has no position table: frames, height, width. Source: as above
_LARGEST = (128, 240, 240)
#: share of noise of kept frames in Predict 2: sigma 0.0001. Source: Cosmos2VideoToWorldPipeline
_KEPT_LEVEL = 0.0001 / 1.0001

_BLOCK = "blocks.block0.blocks.0.block.attn."

LAYOUT = fam.Layout(
    "Cosmos",
    (
        fam.published(
            _BLOCK + "to_q.0.weight",
            "x_embedder.proj.1.weight",
            measure=fam.sizes(
                # one additional channel marks padding
                in_channels=lambda reader: without_mask(reader, "x_embedder.proj.1.weight"),
                out_channels=fam.dim("final_layer.linear.weight", 0, divide=PATCH),
                model_channels=fam.dim("x_embedder.proj.1.weight", 0),
                num_blocks=fam.count("blocks.block"),
                num_heads=fam.heads(("x_embedder.proj.1.weight", 0), _BLOCK + "to_q.1.weight"),
                crossattn_emb_channels=fam.maybe("blocks.block0.blocks.1.block.attn.to_k.0.weight", 1),
                extra_per_block_abs_pos_emb=fam.has("extra_pos_embedder.pos_emb_h"),
            ),
        ),
        fam.diffusers(*COSMOS_DIFFUSERS_KEYS, COSMOS_LEARNED_POSITIONS, measure=COSMOS_DIFFUSERS_SIZES),
    ),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.CosmosTransformer3DModel`, of the first Cosmos and of Predict 2."""
    sizes: dict[str, Any] = dict(found)
    width = sizes["model_channels"]
    learned = bool(sizes["extra_per_block_abs_pos_emb"])
    projection = shapes.get("crossattn_proj.0.weight")
    texts: fam.Arguments = {}
    if projection is not None:
        texts = {
            "use_crossattn_projection": True,
            "encoder_hidden_states_channels": projection[0],
            "crossattn_proj_in_channels": projection[1],
        }
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_attention_heads": sizes["num_heads"],
        "attention_head_dim": width // sizes["num_heads"],
        "num_layers": sizes["num_blocks"],
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / width,
        "text_embed_dim": sizes["crossattn_emb_channels"],
        "adaln_lora_dim": shapes["transformer_blocks.0.norm1.linear_1.weight"][0],
        "max_size": _largest(shapes) if learned else _LARGEST,
        "rope_scale": _scale(sizes, learned, projection is not None),
        "extra_pos_embed_type": "learnable" if learned else None,
        **texts,
    }


def _largest(shapes: fam.Shapes) -> tuple[int, int, int]:
    """Return the largest latent with positions; patches are 2 cells wide and high."""
    time, height, width = (shapes[f"learnable_pos_embed.pos_emb_{axis}"][0] for axis in "thw")
    return time, 2 * height, 2 * width


def _scale(sizes: dict[str, Any], learned: bool, projected: bool) -> tuple[float, float, float]:
    if projected:
        return _SCALE_25
    goes_on = sizes["in_channels"] > sizes["out_channels"]
    return _SCALES[learned, goes_on, sizes["model_channels"] > _WIDE]


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Call the first Cosmos. The first-frame image ("image") has the noise and scale that the model expects."""
    return fam.sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, kwargs), kwargs),
            timestep=level_B,
            encoder_hidden_states=kwargs["context"],
            fps=frame_rate(kwargs),
            return_dict=False,
        )
    )


def forward_predict_2(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. First-frame cells ("image") have almost no noise. An image latent is accepted as one
    frame."""
    if x_BCTHW.dim() == 4:
        return forward_predict_2(module, x_BCTHW.unsqueeze(2), level_B, kwargs).squeeze(2)
    timestep = level_B
    if _goes_on(module):
        timestep = level_B.reshape(-1, 1, 1, 1, 1).expand(-1, 1, x_BCTHW.shape[2], 1, 1)
        if "image_mask" in kwargs:
            kept = kwargs["image_mask"][..., :1, :1].to(timestep.dtype)
            timestep = kept * _KEPT_LEVEL + (1 - kept) * timestep
    out = fam.sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, kwargs), kwargs),
            timestep=timestep,
            encoder_hidden_states=kwargs["context"],
            fps=frame_rate(kwargs) if "frame_rate" in kwargs else None,
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, kwargs)


def _goes_on(module: nn.Module) -> bool:
    """Return whether the model reads a channel that marks kept frames, in addition to the padding channel."""
    arguments = fam.config_of(module)
    return bool(arguments.in_channels - arguments.out_channels > 1)


def _with_masks(module: nn.Module, x_BCTHW: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Return the latent, the channel of kept frames if the model reads it, and the padding channel, all zeros."""
    import torch

    nothing = torch.zeros_like(x_BCTHW[:, :1])
    if not _goes_on(module):
        return torch.cat((x_BCTHW, nothing), dim=1)
    return torch.cat((x_BCTHW, kwargs["image_mask"].to(x_BCTHW) if "image_mask" in kwargs else nothing, nothing), dim=1)


def _marks_frames(found: fam.Config) -> bool:
    """Return whether the model reads a channel that marks kept frames; Anima, which has an adapter for its texts, is
    another family."""
    return found.get("in_channels") == 17 and not found.get("language_adapter")


_T2V = fam.Family(
    name="cosmos_t2v",
    title="Cosmos text-to-video",
    detect=fam.Detection(LAYOUT, fam.anything, "CosmosT2V"),
    build=fam.ModelBuild(
        "CosmosTransformer3DModel",
        config,
        "cosmos",
        forward,
        dtypes=fam.BFLOAT16_FIRST,
    ),
    text=fam.TextInputs(
        (fam.fixed_length("t5xxl_old", 512, 1024, is_masked=True, padding=fam.Padding.ZEROED),), set_name="cosmos"
    ),
    latent="cosmos",
    sampling=fam.SamplingFacts(
        fam.Prediction.EDM,
        noise=fam.NoiseFacts(fam.NoiseKind.EDM, sigma_min=0.002, sigma_max=80.0, sigma_data=0.5),
        reads=frozenset({"context", "frame_rate"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=121, multiple=8, rate=30.0),
        defaults=fam.SamplingDefaults(
            steps=36, cfg=7.0, sampler="euler", schedule="karras", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.COSMOS,
    ),
    size=(1280, 704),
    sources="diffusers' CosmosTextToWorldPipeline; the padding of texts is read like the rest, as zeros",
    folder=fam.DiffusersFolder("CosmosTextToWorldPipeline", entries={"safety_checker": fam.NOTHING}),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(skips_blocks=True),
)
_I2V = replace(
    _T2V,
    name="cosmos_i2v",
    title="Cosmos image-to-video",
    detect=replace(_T2V.detect, when=fam.having(in_channels=17), comfyui="CosmosI2V"),
    build=replace(_T2V.build, optional_inputs=frozenset({"image", "image_mask"})),
    sampling=replace(
        _T2V.sampling,
        reads=frozenset({"context", "frame_rate", "image", "image_mask"}),
        video=fam.video_like(_T2V.sampling, begins=fam.FirstFrameMode.KEPT_WITH_NOISE),
    ),
    sources="diffusers' CosmosVideoToWorldPipeline; the padding of texts is read like the rest, as zeros",
    folder=replace(_T2V.folder, pipeline="CosmosVideoToWorldPipeline"),
)
_PREDICT_2_T2I = replace(
    _T2V,
    name="cosmos2_t2i",
    title="Cosmos Predict 2 images",
    detect=replace(_T2V.detect, layout=COSMOS_PREDICT_2, comfyui="CosmosT2IPredict2"),
    build=replace(
        _T2V.build,
        forward=forward_predict_2,
        dtypes=fam.NO_FLOAT16,
    ),
    latent="wan21",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, sigma_min=0.002, sigma_max=80.0),
        reads=frozenset({"context"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=35, cfg=7.0, sampler="euler", schedule="karras", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.COSMOS,
    ),
    size=(1360, 768),
    sources="diffusers' Cosmos2TextToImagePipeline: the shares are sigma / (1 + sigma) of Karras' levels between "
    "both sigmas, and its guidance scale is smaller by 1",
    folder=replace(_T2V.folder, pipeline="Cosmos2TextToImagePipeline", scheduler_entries={"use_karras_sigmas": True}),
)
_PREDICT_2_I2V = replace(
    _PREDICT_2_T2I,
    name="cosmos2_i2v",
    title="Cosmos Predict 2 video",
    detect=replace(_PREDICT_2_T2I.detect, when=_marks_frames, comfyui="CosmosI2VPredict2"),
    build=replace(_PREDICT_2_T2I.build, optional_inputs=frozenset({"image", "image_mask"})),
    sampling=replace(
        _PREDICT_2_T2I.sampling,
        reads=frozenset({"context", "frame_rate", "image", "image_mask"}),
        video=fam.VideoFacts(frames=93, multiple=4, rate=16.0, begins=fam.FirstFrameMode.KEPT),
    ),
    size=(1280, 704),
    sources="diffusers' Cosmos2VideoToWorldPipeline; shares and scale as for images",
    folder=replace(_PREDICT_2_T2I.folder, pipeline="Cosmos2VideoToWorldPipeline"),
)

FAMILIES = (_I2V, _T2V, _PREDICT_2_I2V, _PREDICT_2_T2I)
