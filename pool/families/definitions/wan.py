"""Wan 2.1 and 2.2: videos from texts, from first and last frames, and from control videos. Torch-free."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.video_layouts import WAN, WAN_HEAD
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.video_calls import joined, towards_image, with_image
from modelpool.pool.values.core.errors import UnknownArchitecture, unusable_field

if TYPE_CHECKING:
    from torch import Tensor, nn

#: tokens that Wan reads of every text, padded with zeros. Source: WanPipeline, and the attention of
#: WanTransformer3DModel
_TOKENS = 512
#: channels of the mask of a first frame
_MASKS = 4
#: images that the class reads, as vision states, if it has positions for two
_IMAGES = 2


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.WanTransformer3DModel`. A model narrower than a published head has one head."""
    sizes: dict[str, Any] = dict(found)
    width = sizes["dim"]
    heads = max(1, width // WAN_HEAD)
    patch = sizes["patch_size"]
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    positions = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "patch_size": patch,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": sizes["in_dim"],
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "text_dim": sizes["text_dim"],
        "freq_dim": sizes["freq_dim"],
        "ffn_dim": sizes["ffn_dim"],
        "num_layers": sizes["num_layers"],
        "cross_attn_norm": sizes["cross_attn_norm"],
        "qk_norm": "rms_norm_across_heads" if sizes["qk_norm"] else None,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": shapes["blocks.0.attn2.add_k_proj.weight"][1] if image else None,
        "pos_embed_seq_len": positions[1] if positions else None,
    }


def vace_config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.WanVACETransformer3DModel`."""
    layers, extra = found["num_layers"], found["vace_layers"]
    if not isinstance(layers, int) or not isinstance(extra, int) or not extra or layers % extra:
        raise UnknownArchitecture(f"Wan VACE: found {extra} control blocks, expected a part of {layers}")
    return config(found, shapes) | {
        "vace_layers": list(range(0, layers, layers // extra)),
        "vace_in_channels": found["vace_in_dim"],
    }


def reference_config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `WanReferenceTransformer3DModel`."""
    return {**config(found, shapes), "reference_channels": found["in_dim_ref_conv"]}


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Latents and masks of images ("image") are concatenated along channels."""
    return fam.sample_of(
        module(
            hidden_states=joined(x_BCTHW, kwargs),
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs),
            encoder_hidden_states_image=_images(module, kwargs.get("image_context")),
            return_dict=False,
        )
    )


def forward_5b(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. With a kept image, each patch has its own level, zero where the image is kept.

    Without an image, the pipeline passes equal levels for all patches: the same result, with gigabytes of embedded
    levels.
    """
    if "image_mask" not in kwargs:
        return forward(module, x_BCTHW, level_B, kwargs)
    _, patch_high, patch_wide = fam.config_of(module).patch_size
    kept = kwargs["image_mask"].to(x_BCTHW.dtype)
    levels_BTHW = (1 - kept[:, 0, :, ::patch_high, ::patch_wide]) * (level_B * fam.TIMESTEPS).reshape(-1, 1, 1, 1)
    out = fam.sample_of(
        module(
            hidden_states=with_image(x_BCTHW, kwargs),
            timestep=levels_BTHW.flatten(1),
            encoder_hidden_states=padded_text(kwargs),
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, kwargs)


def forward_vace(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Separate blocks read the latents and masks of the control video ("control")."""
    return fam.sample_of(
        module(
            hidden_states=x_BCTHW,
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs),
            control_hidden_states=kwargs["control"],
            return_dict=False,
        )
    )


def forward_fun_control(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The video to follow ("followed") is concatenated, and then a mask and the latent of a
    first frame, which are zero. The reference image ("image") is zero if there is none, as in training."""
    import torch

    image_BCHW = kwargs.get("image")
    masks_BCTHW = torch.zeros_like(x_BCTHW[:, :_MASKS])
    return fam.sample_of(
        module(
            hidden_states=torch.cat((x_BCTHW, kwargs["followed"], masks_BCTHW, torch.zeros_like(x_BCTHW)), dim=1),
            reference=torch.zeros_like(x_BCTHW[:, :, 0]) if image_BCHW is None else image_BCHW,
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs),
        )
    )


def forward_camera(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The latent of the first frame, or of the video that begins with it, and its mask ("image")
    are concatenated; the camera ("camera") is added to the patches."""
    return fam.sample_of(
        module(
            hidden_states=joined(x_BCTHW, kwargs),
            camera=kwargs.get("camera"),
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs),
            encoder_hidden_states_image=_images(module, kwargs.get("image_context")),
            return_dict=False,
        )
    )


def _images(module: nn.Module, states_BLD: Tensor | None) -> Tensor | None:
    """Return the states of one image unchanged; of two, along the batch, as the class expects."""
    embedder: Any = module.get_submodule("condition_embedder").image_embedder
    if states_BLD is None or embedder is None or embedder.pos_embed is None:
        return states_BLD if embedder is not None else None
    _, tokens, width = states_BLD.shape
    return states_BLD.reshape(-1, tokens // _IMAGES, width)


def padded_text(kwargs: fam.ModelKwargs) -> Tensor:
    """Return the text states with zeros for padding, padded to `_TOKENS`. Raises UnusableField for a longer text."""
    import torch

    context, mask = kwargs["context"], kwargs.get("context_mask")
    if context.shape[1] > _TOKENS:
        raise unusable_field("context", context.shape[1], f"no more than {_TOKENS} tokens")
    real = context if mask is None else torch.where(mask.bool().unsqueeze(-1), context, context.new_zeros(()))
    return torch.nn.functional.pad(real, (0, 0, 0, _TOKENS - context.shape[1]))


def flow_noise(shift: float) -> fam.NoiseFacts:
    """Return the noise of a flow with this shift."""
    return fam.NoiseFacts(fam.NoiseKind.FLOW, shift=shift)


#: index entries of pipelines for one expert
_ONE = {"transformer_2": fam.NOTHING, "boundary_ratio": None}

#: between the sizes of the two image-to-video models of Wan 2.1: the geometric mean of 832 x 480 and 1280 x 720 pixels
_WAN_480_PIXELS = math.sqrt(832 * 480 * 1280 * 720)


def _teacache(
    coefficients: tuple[float, ...], threshold: float, blocks: int, pixels: float = math.inf
) -> fam.TeaCacheFacts:
    """Return the published facts with retention steps."""
    return fam.TeaCacheFacts(coefficients, threshold, blocks, pixels, of_vector=True, first_steps=5)


_NAMES = fam.LayoutNames(
    "wan",
    # the convolution for a reference image, which diffusers' class does not have
    without=("ref_conv.",),
    # positions for the states of first and last frame, which the converter ignores
    renamed={"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"},
)
_T2V = fam.Family(
    name="wan_t2v",
    title="Wan text-to-video",
    detect=fam.Detection(WAN, fam.having(model_type="t2v", in_dim=16, out_dim=16), "WAN21_T2V"),
    build=fam.ModelBuild(
        "WanTransformer3DModel",
        config,
        _NAMES,
        forward,
        dtypes=fam.HALF_FIRST,
        optional_inputs=frozenset({"context_mask"}),
    ),
    text=fam.TextInputs(
        (
            fam.fixed_length(
                "umt5_xxl", 512, cleaning=fam.Cleaning.UNESCAPED, is_masked=True, padding=fam.Padding.ZEROED
            ),
        ),
        set_name="wan",
    ),
    latent="wan21",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.WAN,
        noise=flow_noise(8.0),
        reads=frozenset({"context", "context_mask"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=81, multiple=4, rate=16.0),
        defaults=fam.SamplingDefaults(
            steps=50,
            cfg=5.0,
            sampler="euler",
            # the pipeline leaves the levels to the scheduler, which ends slightly above the last step
            schedule="normal",
            guidance=fam.Guidance.CLASSIFIER_FREE,
        ),
    ),
    size=(832, 480),
    sources="diffusers' WanPipeline; Wan-Video/Wan2.1 has a shift of 3 at 480 lines and of 5 at 720",
    folder=fam.DiffusersFolder("WanPipeline", entries={**_ONE, "expand_timesteps": False}),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(
        teacache=(
            _teacache((-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02), 0.05, 30),
            _teacache((-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01), 0.1, 40),
        ),
        skips_blocks=True,
        moves_positions=True,
        takes_windows=True,
    ),
)
#: no shape determines the experts of Wan 2.2 from Wan 2.1
_T2V_EXPERTS = fam.TwoExperts(
    "Wan 2.2 text-to-video, both experts",
    replace(
        _T2V.sampling,
        noise=flow_noise(12.0),
        low_noise=fam.LowNoiseExpert(boundary=0.875, cfg=3.0),
        defaults=fam.defaults_like(_T2V.sampling, steps=40, cfg=4.0),
    ),
    "Wan-Video/Wan2.2, wan_t2v_A14B: scale 4 above the boundary and 3 below; ComfyUI has a shift of 8",
)
_TI2V_22 = replace(
    _T2V,
    name="wan22_ti2v",
    title="Wan 2.2 text-and-image-to-video",
    detect=replace(_T2V.detect, when=fam.having(model_type="t2v", in_dim=48, out_dim=48), comfyui="WAN22_T2V"),
    build=replace(
        _T2V.build,
        forward=forward_5b,
        optional_inputs=frozenset({"context_mask", "image", "image_mask"}),
    ),
    latent="wan22",
    sampling=replace(
        _T2V.sampling,
        noise=flow_noise(5.0),
        reads=frozenset({"context", "context_mask", "image", "image_mask"}),
        side_multiple=32,
        video=fam.video_like(_T2V.sampling, frames=121, rate=24.0, begins=fam.FirstFrameMode.KEPT),
    ),
    size=(1280, 704),
    sources="Wan-Video/Wan2.2, wan_ti2v_5B; ComfyUI has a shift of 8",
    folder=replace(_T2V.folder, entries={**_ONE, "expand_timesteps": True}),
    options=replace(_T2V.options, teacache=(), takes_windows=False),
)
_VACE = replace(
    _T2V,
    name="wan_vace",
    title="Wan VACE",
    detect=replace(_T2V.detect, when=fam.having(model_type="vace"), comfyui="WAN21_Vace"),
    build=replace(_T2V.build, module="WanVACETransformer3DModel", config=vace_config, forward=forward_vace),
    sampling=replace(
        _T2V.sampling,
        sequence=sequence_plans.WAN_VACE,
        reads=frozenset({"context", "control", "context_mask"}),
        several_references=True,
    ),
    sources="diffusers' WanVACEPipeline, whose example has a shift of 3 at 480 lines and of 5 at 720",
    folder=replace(_T2V.folder, pipeline="WanVACEPipeline", entries=_ONE),
    options=replace(_T2V.options, teacache=(), skips_blocks=False, takes_windows=False),
)
_I2V = replace(
    _T2V,
    name="wan21_i2v",
    title="Wan 2.1 image-to-video",
    detect=replace(_T2V.detect, when=fam.having(model_type="i2v"), comfyui="WAN21_I2V"),
    sampling=replace(
        _T2V.sampling,
        reads=frozenset({"context", "image", "image_context", "context_mask"}),
        vision_use=fam.VisionEncoderUse.PENULTIMATE,
        video=fam.video_like(_T2V.sampling, begins=fam.FirstFrameMode.CONCATENATED),
    ),
    sources="diffusers' WanImageToVideoPipeline; Wan-Video/Wan2.1 has a shift of 3 at 480 lines and of 5 at 720",
    folder=replace(
        _T2V.folder,
        pipeline="WanImageToVideoPipeline",
        entries={**_T2V.folder.entries, "image_encoder": fam.NOTHING, "image_processor": fam.NOTHING},
    ),
    options=replace(
        _T2V.options,
        teacache=(
            _teacache(
                (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01), 0.2, 40, _WAN_480_PIXELS
            ),
            _teacache((8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02), 0.2, 40),
        ),
    ),
)
_FLF2V = replace(
    _I2V,
    name="wan21_flf2v",
    title="Wan 2.1 first-and-last-frame",
    detect=replace(_I2V.detect, when=fam.having(model_type="i2v", flf_pos_embed_token_number=514)),
    sampling=replace(_I2V.sampling, video=fam.video_like(_I2V.sampling, ends=fam.LastFrameMode.MUST)),
    options=replace(_I2V.options, teacache=()),
)
#: follows a video that begins with an image: latents of the video, and the image latent followed by zeros
_FUN_CONTROL = replace(
    _I2V,
    name="wan21_fun_control",
    title="Wan 2.1 Fun control",
    detect=replace(_I2V.detect, when=fam.having(model_type="i2v", in_dim=48), comfyui="WAN21_FunControl2V"),
    sampling=replace(
        _I2V.sampling,
        reads=frozenset({"context", "followed", "image", "image_context", "context_mask"}),
        video=fam.video_like(_I2V.sampling, begins=fam.FirstFrameMode.FIRST_CELL),
    ),
    sources="the pipeline of its authors, WanFunControlPipeline of aigc-apps/VideoX-Fun; "
    "alibaba-pai/Wan2.1-Fun-14B-Control",
    folder=replace(_I2V.folder, pipeline="", entries={}),
    options=replace(_I2V.options, teacache=(), takes_windows=False),
)
#: follows a video, and shows the character of a reference image; the channels of a first frame and its mask are empty
_FUN_CONTROL_22 = replace(
    _T2V,
    name="wan22_fun_control",
    title="Wan 2.2 Fun control",
    detect=replace(
        _T2V.detect, when=fam.having(model_type="t2v", in_dim=52, out_dim=16, in_dim_ref_conv=16), comfyui="WAN21_T2V"
    ),
    build=replace(
        _T2V.build,
        module="WanReferenceTransformer3DModel",
        config=reference_config,
        convert=replace(_NAMES, without=()),
        forward=forward_fun_control,
        optional_inputs=frozenset({"context_mask", "image"}),
    ),
    sampling=replace(
        _T2V.sampling,
        sequence=None,
        not_divided="the tokens of its reference image are not divided",
        noise=flow_noise(5.0),
        reads=frozenset({"context", "followed", "image", "context_mask"}),
        video=fam.video_like(_T2V.sampling, begins=fam.FirstFrameMode.REFERENCE),
        defaults=fam.defaults_like(_T2V.sampling, steps=50, cfg=6.0),
    ),
    sources="the pipeline of its authors, Wan2_2FunControlPipeline of aigc-apps/VideoX-Fun; "
    "alibaba-pai/Wan2.2-Fun-A14B-Control; ComfyUI has a shift of 8",
    folder=replace(_T2V.folder, pipeline="", entries={}),
    options=fam.OptionFacts(),
)
_FUN_CONTROL_5B = replace(
    _FUN_CONTROL_22,
    name="wan22_fun_control_5b",
    title="Wan 2.2 Fun control 5B",
    detect=replace(
        _T2V.detect, when=fam.having(model_type="t2v", in_dim=148, out_dim=48, in_dim_ref_conv=48), comfyui="WAN22_T2V"
    ),
    latent="wan22",
    sampling=replace(
        _FUN_CONTROL_22.sampling,
        side_multiple=32,
        video=fam.video_like(_FUN_CONTROL_22.sampling, frames=121, rate=24.0),
    ),
    size=(1280, 704),
    sources="the pipeline of its authors, Wan2_2FunControlPipeline of aigc-apps/VideoX-Fun; "
    "alibaba-pai/Wan2.2-Fun-5B-Control; ComfyUI has a shift of 8",
)
_I2V_22 = replace(
    _I2V,
    name="wan22_i2v",
    title="Wan 2.2 image-to-video",
    detect=replace(_I2V.detect, when=fam.having(model_type="t2v", in_dim=36), comfyui="WAN21_T2V"),
    sampling=replace(
        _I2V.sampling,
        noise=flow_noise(5.0),
        reads=frozenset({"context", "image", "context_mask"}),
        vision_use=None,
        video=fam.video_like(_I2V.sampling, ends=fam.LastFrameMode.MAY),
        defaults=fam.defaults_like(_I2V.sampling, steps=40, cfg=3.5),
    ),
    sources="Wan-Video/Wan2.2, wan_i2v_A14B; ComfyUI has a shift of 8",
    options=replace(_I2V.options, teacache=()),
)

_CAMERA_NOT_DIVIDED = "its camera adds to the tokens before they are divided"
#: the camera of a video that begins with an image
_CAMERA = replace(
    _I2V,
    name="wan21_camera",
    title="Wan 2.1 camera",
    detect=replace(_I2V.detect, when=fam.having(model_type="camera", in_dim=32), comfyui="WAN21_Camera"),
    build=replace(
        _I2V.build,
        module="WanCameraTransformer3DModel",
        forward=forward_camera,
        optional_inputs=_I2V.build.optional_inputs | {"camera"},
    ),
    sampling=replace(
        _I2V.sampling,
        sequence=None,
        not_divided=_CAMERA_NOT_DIVIDED,
        reads=_I2V.sampling.reads | {"camera"},
        video=fam.video_like(_I2V.sampling, begins=fam.FirstFrameMode.FIRST_CELL),
    ),
    sources="the pipeline of its authors, WanFunControlPipeline of aigc-apps/VideoX-Fun; "
    "alibaba-pai/Wan2.1-Fun-V1.1-14B-Control-Camera",
    folder=replace(_I2V.folder, pipeline="", entries={}),
    options=fam.OptionFacts(),
)
_CAMERA_22 = replace(
    _CAMERA,
    name="wan22_camera",
    title="Wan 2.2 camera",
    detect=replace(_I2V.detect, when=fam.having(model_type="camera_2.2", in_dim=36), comfyui="WAN22_Camera"),
    sampling=replace(
        _I2V_22.sampling,
        sequence=None,
        not_divided=_CAMERA_NOT_DIVIDED,
        reads=_I2V_22.sampling.reads | {"camera"},
        video=fam.video_like(_I2V.sampling, begins=fam.FirstFrameMode.CONCATENATED),
    ),
    sources="the pipeline of its authors, Wan2_2FunControlPipeline of aigc-apps/VideoX-Fun; "
    "alibaba-pai/Wan2.2-Fun-A14B-Control-Camera; ComfyUI has a shift of 8",
)
_I2V_22_EXPERTS = fam.TwoExperts(
    "Wan 2.2 image-to-video, both experts",
    replace(_I2V_22.sampling, low_noise=fam.LowNoiseExpert(boundary=0.9, cfg=3.5)),
    _I2V_22.sources,
)

_FUN_CONTROL_22_EXPERTS = fam.TwoExperts(
    "Wan 2.2 Fun control, both experts",
    replace(_FUN_CONTROL_22.sampling, low_noise=fam.LowNoiseExpert(boundary=0.9, cfg=6.0)),
    _FUN_CONTROL_22.sources,
)
_CAMERA_22_EXPERTS = fam.TwoExperts(
    "Wan 2.2 camera, both experts",
    replace(_CAMERA_22.sampling, low_noise=fam.LowNoiseExpert(boundary=0.9, cfg=3.5)),
    _CAMERA_22.sources,
)

FAMILIES = (
    _VACE,
    replace(_FUN_CONTROL_22, two_experts=_FUN_CONTROL_22_EXPERTS),
    _FUN_CONTROL_5B,
    _CAMERA,
    replace(_CAMERA_22, two_experts=_CAMERA_22_EXPERTS),
    _TI2V_22,
    _FUN_CONTROL,
    _FLF2V,
    _I2V,
    replace(_I2V_22, two_experts=_I2V_22_EXPERTS),
    replace(_T2V, two_experts=_T2V_EXPERTS),
)
