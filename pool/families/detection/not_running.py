"""Families that are recognised and do not run: their marks, and the class of diffusers that has their architecture, if
any. Torch-free; see `signatures`.

Most are known by their marks alone. Sizes are measured for architectures that a family that runs shares, that have
families of different sizes, or for which the tests have published configurations.

Sources: diffusers 0.42.1 for its naming, its classes and the keys of its single-file converters; the keys by which
other programs recognise the published files.
"""

from __future__ import annotations

from modelpool.pool.families.detection.layouts import flux_layouts as flux
from modelpool.pool.families.detection.layouts import image_layouts as image
from modelpool.pool.families.detection.layouts import other_layouts as other
from modelpool.pool.families.detection.layouts import video_layouts as video
from modelpool.pool.families.detection.layouts.signature import (
    Condition,
    Layout,
    LayoutNaming,
    Signature,
    anything,
    diffusers,
    having,
    published,
)


def _shared(
    layout: Layout,
    name: str,
    title: str,
    comfyui: str = "",
    when: Condition = anything,
    runs: str = "",
    *,
    latent: str = "",
    extra_keys: tuple[str, ...] = (),
) -> Signature:
    """Return the row of a family with measured sizes or a `layout` that others share."""
    return Signature(name, title, layout, when, extra_keys, latent, comfyui, runs)


def _marked(name: str, title: str, comfyui: str, *marks: LayoutNaming, runs: str = "", latent: str = "") -> Signature:
    """Return the row of a family that is known by its marks alone."""
    return Signature(name, title, Layout(title, marks), latent=latent, comfyui=comfyui, runs=runs)


_COGVIDEOX = "CogVideoXTransformer3DModel"

#: in the order in which layouts are tried, and rows of one layout
NOT_RUNNING: tuple[Signature, ...] = (
    # relatives of Flux
    _shared(
        other.HUNYUAN_3D, "hunyuan3d_2_mini", "Hunyuan3D 2 mini", "Hunyuan3Dv2mini", having(depth=8),
        latent="hunyuan3d_2_mini",
    ),
    _shared(other.HUNYUAN_3D, "hunyuan3d_2", "Hunyuan3D 2", "Hunyuan3Dv2", latent="hunyuan3d_2"),
    _marked(
        "flux3", "Flux 3", "",
        published("early_stream_modulations.image.lin.weight"),
        diffusers("early_stream_modulations.image.linear.weight"),
        runs="Flux3Transformer2DModel",
    ),
    _shared(flux.CHROMA_RADIANCE, "chroma_radiance", "Chroma Radiance", "ChromaRadiance", latent="pixels"),
    # images
    _shared(image.PIXART, "allegro_ti2v", "Allegro image-to-video", "", having(reads_frames=True)),
    _shared(
        image.LUMINA_2, "z_image_pixels", "Z-Image on pixels", "ZImagePixelSpace", having(pixel_space=True),
        latent="pixels",
    ),
    _shared(image.LUMINA_2, "newbie", "NewBie", "Lumina2", having(pooled_text=True), latent="flux"),
    _marked(
        "lens", "Lens", "Lens",
        published("transformer_blocks.0.attn.norm_added_q.weight", "transformer_blocks.0.img_mlp.w1.weight"),
    ),
    _shared(
        image.QWEN_IMAGE, "mage_flow", "Mage-Flow", "MageFlow", having(context_dim=2560, out_channels=128),
        latent="flux2",
    ),
    _marked(
        "hidream_o1", "HiDream O1", "HiDreamO1",
        published("t_embedder1.mlp.0.weight", "x_embedder.proj1.weight"), latent="pixels",
    ),
    _marked(
        "boogu", "Boogu", "Boogu", published("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight"),
        latent="flux",
    ),
    _marked("pixeldit", "PixelDiT", "PixelDiTT2I", published("core.pixel_embedder.proj.weight"), latent="pixels"),
    _marked("pid", "PiD", "PiD", published("lq_proj.latent_proj.0.weight"), latent="pixels"),
    # video
    _shared(video.LTX, "ltx23", "LTX-2.3", "LTXAV", having(audio=True, gated=True), "LTX2VideoTransformer3DModel"),
    _shared(
        video.COSMOS_PREDICT_2, "anima", "Anima", "Anima", having(language_adapter=True), latent="wan21"
    ),
    _shared(video.WAN, "wan22_s2v", "Wan 2.2 speech-to-video", "WAN22_S2V", having(model_type="s2v"), latent="wan21"),
    _shared(video.WAN, "wan21_humo", "HuMo on Wan 2.1", "WAN21_HuMo", having(model_type="humo"), latent="wan21"),
    _marked(
        "wan_animate_2", "Wan animate 2", "",
        diffusers("head.modulation", "blocks.0.self_attn.to_q.weight", "patch_embedding.weight"),
        runs="WanAnimate2Transformer3DModel",
    ),
    _marked(
        "minimax_h3", "MiniMax H3", "",
        published("video_patch_proj.weight", "audio_patch_proj.weight"),
        diffusers("audio_proj_in.weight", "token_refiner.final_norm.weight"),
        runs="MiniMaxH3Transformer3DModel",
    ),
    _marked(
        "seedvr2", "SeedVR2 (restores video)", "SeedVR2",
        published("blocks.35.mlp.vid.proj_out.weight"),
        published("blocks.35.mlp.all.proj_in_gate.weight"),
        published("blocks.31.mlp.all.proj_in_gate.weight"),
    ),
    # CogVideoX image-to-video that also reads a face
    _marked(
        "consisid", "ConsisID", "",
        diffusers("patch_embed.text_proj.weight", "local_facial_extractor.latents"),
        runs="ConsisIDTransformer3DModel",
    ),
    _shared(
        video.COGVIDEOX, "cogvideox_inpaint", "CogVideoX inpainting", "CogVideoX_Inpaint", having(in_channels=48),
        _COGVIDEOX,
    ),
    # the video to follow would need an even number of latent frames
    _shared(
        video.COGVIDEOX, "cogvideox_15_fun_control", "CogVideoX 1.5 Fun control", "CogVideoX_I2V",
        having(in_channels=32, patch_frames=2, reads_offset=False), _COGVIDEOX,
    ),
    # audio and 3D shapes
    _shared(other.ACE_STEP, "ace_step_1", "ACE-Step 1", "ACEStep", latent="ace_step"),
    _shared(other.HUNYUAN_3D_21, "hunyuan3d_21", "Hunyuan3D 2.1", "Hunyuan3Dv2_1", latent="hunyuan3d_21"),
    _marked(
        "triposplat", "TripoSplat", "TripoSplat",
        published("cam_out_layer.weight", "repo_layers.0.final_map.weight"),
    ),
)  # fmt: skip
