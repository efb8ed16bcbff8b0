"""Key and shape lists of published single-file layouts, generated from a description of each architecture.

No weights and no files: `{key: shape}` in the order in which the architecture is built. The sizes are arguments, so
that a tiny model of the same layout has the same key names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Shape = tuple[int, ...]
Layout = dict[str, Shape]

CLIP_VOCABULARY = 49408
CLIP_POSITIONS = 77


def linear(layout: Layout, key: str, out_features: int, in_features: int, *, bias: bool = True) -> None:
    """A fully connected layer."""
    layout[f"{key}.weight"] = (out_features, in_features)
    if bias:
        layout[f"{key}.bias"] = (out_features,)


def conv(layout: Layout, key: str, out_channels: int, in_channels: int, side: int = 3) -> None:
    """A square 2D convolution with bias."""
    layout[f"{key}.weight"] = (out_channels, in_channels, side, side)
    layout[f"{key}.bias"] = (out_channels,)


def norm(layout: Layout, key: str, channels: int) -> None:
    """A layer or group norm."""
    layout[f"{key}.weight"] = (channels,)
    layout[f"{key}.bias"] = (channels,)


def prefixed(prefix: str, layout: Layout) -> Layout:
    """`layout` with `prefix` before each key."""
    return {prefix + key: shape for key, shape in layout.items()}


@dataclass(frozen=True, slots=True)
class LdmUnet:
    """Sizes of a UNet of the latent diffusion kind (SD1, SD2, SDXL)."""

    model_channels: int = 320
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    res_blocks: int = 2
    #: transformer blocks behind each residual block of a level, 0 for none
    depths: tuple[int, ...] = (1, 1, 1, 0)
    #: 0 for a residual block alone, None for no middle
    middle_depth: int | None = 1
    context_width: int = 768
    in_channels: int = 4
    linear_projection: bool = False
    #: width of the pooled conditioning, None where there is none
    label_width: int | None = None
    #: `depths` of the way up where they are others: for each level, those behind each of its blocks there
    up_depths: tuple[tuple[int, ...], ...] | None = None


SD15_UNET = LdmUnet()
SD21_UNET = LdmUnet(context_width=1024, linear_projection=True)
SDXL_UNET = LdmUnet(
    multipliers=(1, 2, 4),
    depths=(0, 2, 10),
    middle_depth=10,
    context_width=2048,
    linear_projection=True,
    label_width=2816,
)
SDXL_REFINER_UNET = LdmUnet(
    model_channels=384,
    depths=(0, 4, 4, 0),
    middle_depth=4,
    context_width=1280,
    linear_projection=True,
    label_width=2560,
)
#: linear projections, and what it is told beside the text: a pooled text of 32 and six numbers
TINY_SDXL_UNET = LdmUnet(
    model_channels=64,
    multipliers=(1, 2),
    res_blocks=1,
    depths=(0, 2),
    middle_depth=2,
    context_width=64,
    linear_projection=True,
    label_width=32 + 6 * 256,
)
TINY_UNET = LdmUnet(model_channels=48, multipliers=(1, 2), res_blocks=1, depths=(1, 1), context_width=32)


def ldm_unet(unet: LdmUnet, prefix: str = "model.diffusion_model.") -> Layout:
    """The UNet of SD1, SD2 and SDXL files."""
    layout: Layout = {}
    time_width = unet.model_channels * 4
    linear(layout, "time_embed.0", time_width, unet.model_channels)
    linear(layout, "time_embed.2", time_width, time_width)
    if unet.label_width is not None:
        linear(layout, "label_emb.0.0", time_width, unet.label_width)
        linear(layout, "label_emb.0.2", time_width, time_width)
    channels = unet.model_channels
    conv(layout, "input_blocks.0.0", channels, unet.in_channels)
    skips = [channels]
    index = 1
    for level, multiplier in enumerate(unet.multipliers):
        for _ in range(unet.res_blocks):
            out_channels = unet.model_channels * multiplier
            _unet_res(layout, f"input_blocks.{index}.0", channels, out_channels, time_width)
            channels = out_channels
            if unet.depths[level]:
                _unet_transformer(layout, f"input_blocks.{index}.1", channels, unet.depths[level], unet)
            skips.append(channels)
            index += 1
        if level != len(unet.multipliers) - 1:
            conv(layout, f"input_blocks.{index}.0.op", channels, channels)
            skips.append(channels)
            index += 1
    if unet.middle_depth is not None:
        _unet_res(layout, "middle_block.0", channels, channels, time_width)
    if unet.middle_depth:
        _unet_transformer(layout, "middle_block.1", channels, unet.middle_depth, unet)
        _unet_res(layout, "middle_block.2", channels, channels, time_width)
    _unet_up(layout, unet, channels, skips, time_width)
    norm(layout, "out.0", unet.model_channels)
    conv(layout, "out.2", 4, unet.model_channels)
    return prefixed(prefix, layout)


def _unet_up(layout: Layout, unet: LdmUnet, channels: int, skips: list[int], time_width: int) -> None:
    index = 0
    for level in reversed(range(len(unet.multipliers))):
        for block in range(unet.res_blocks + 1):
            out_channels = unet.model_channels * unet.multipliers[level]
            _unet_res(layout, f"output_blocks.{index}.0", channels + skips.pop(), out_channels, time_width)
            channels = out_channels
            place = 1
            if depth := unet.up_depths[level][block] if unet.up_depths else unet.depths[level]:
                _unet_transformer(layout, f"output_blocks.{index}.1", channels, depth, unet)
                place = 2
            if level and block == unet.res_blocks:
                conv(layout, f"output_blocks.{index}.{place}.conv", channels, channels)
            index += 1


def _unet_res(layout: Layout, key: str, in_channels: int, out_channels: int, time_width: int) -> None:
    norm(layout, f"{key}.in_layers.0", in_channels)
    conv(layout, f"{key}.in_layers.2", out_channels, in_channels)
    linear(layout, f"{key}.emb_layers.1", out_channels, time_width)
    norm(layout, f"{key}.out_layers.0", out_channels)
    conv(layout, f"{key}.out_layers.3", out_channels, out_channels)
    if in_channels != out_channels:
        conv(layout, f"{key}.skip_connection", out_channels, in_channels, 1)


def _unet_transformer(layout: Layout, key: str, channels: int, depth: int, unet: LdmUnet) -> None:
    norm(layout, f"{key}.norm", channels)
    for projection in ("proj_in", "proj_out"):
        if unet.linear_projection:
            linear(layout, f"{key}.{projection}", channels, channels)
        else:
            conv(layout, f"{key}.{projection}", channels, channels, 1)
    for block in (f"{key}.transformer_blocks.{i}" for i in range(depth)):
        for attention, context_width in (("attn1", channels), ("attn2", unet.context_width)):
            linear(layout, f"{block}.{attention}.to_q", channels, channels, bias=False)
            linear(layout, f"{block}.{attention}.to_k", channels, context_width, bias=False)
            linear(layout, f"{block}.{attention}.to_v", channels, context_width, bias=False)
            linear(layout, f"{block}.{attention}.to_out.0", channels, channels)
        linear(layout, f"{block}.ff.net.0.proj", channels * 8, channels)
        linear(layout, f"{block}.ff.net.2", channels, channels * 4)
        for i in (1, 2, 3):
            norm(layout, f"{block}.norm{i}", channels)


@dataclass(frozen=True, slots=True)
class LdmVae:
    """Sizes of a KL autoencoder of the latent diffusion kind."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    res_blocks: int = 2
    latent_channels: int = 4
    quant_convs: bool = True


SD15_VAE = LdmVae()
TINY_VAE = LdmVae(channels=32, multipliers=(1, 1, 2, 2), res_blocks=1)


def ldm_vae(vae: LdmVae, prefix: str = "first_stage_model.") -> Layout:
    """The autoencoder of SD1, SDXL, SD3 and Flux files."""
    layout: Layout = {}
    channels = vae.channels
    conv(layout, "encoder.conv_in", channels, 3)
    for level, multiplier in enumerate(vae.multipliers):
        for i in range(vae.res_blocks):
            _vae_res(layout, f"encoder.down.{level}.block.{i}", channels, vae.channels * multiplier)
            channels = vae.channels * multiplier
        if level != len(vae.multipliers) - 1:
            conv(layout, f"encoder.down.{level}.downsample.conv", channels, channels)
    for half in ("encoder", "decoder"):
        _vae_res(layout, f"{half}.mid.block_1", channels, channels)
        norm(layout, f"{half}.mid.attn_1.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            conv(layout, f"{half}.mid.attn_1.{part}", channels, channels, 1)
        _vae_res(layout, f"{half}.mid.block_2", channels, channels)
    norm(layout, "encoder.norm_out", channels)
    conv(layout, "encoder.conv_out", 2 * vae.latent_channels, channels)
    conv(layout, "decoder.conv_in", channels, vae.latent_channels)
    for level in reversed(range(len(vae.multipliers))):
        for i in range(vae.res_blocks + 1):
            _vae_res(layout, f"decoder.up.{level}.block.{i}", channels, vae.channels * vae.multipliers[level])
            channels = vae.channels * vae.multipliers[level]
        if level:
            conv(layout, f"decoder.up.{level}.upsample.conv", channels, channels)
    norm(layout, "decoder.norm_out", channels)
    conv(layout, "decoder.conv_out", 3, channels)
    if vae.quant_convs:
        conv(layout, "quant_conv", 2 * vae.latent_channels, 2 * vae.latent_channels, 1)
        conv(layout, "post_quant_conv", vae.latent_channels, vae.latent_channels, 1)
    return prefixed(prefix, layout)


def _vae_res(layout: Layout, key: str, in_channels: int, out_channels: int) -> None:
    norm(layout, f"{key}.norm1", in_channels)
    conv(layout, f"{key}.conv1", out_channels, in_channels)
    norm(layout, f"{key}.norm2", out_channels)
    conv(layout, f"{key}.conv2", out_channels, out_channels)
    if in_channels != out_channels:
        conv(layout, f"{key}.nin_shortcut", out_channels, in_channels, 1)


@dataclass(frozen=True, slots=True)
class ClipText:
    """Sizes of a CLIP text model."""

    hidden: int = 768
    layers: int = 12
    mlp: int = 3072
    vocabulary: int = CLIP_VOCABULARY


CLIP_L = ClipText()
TINY_CLIP = ClipText(hidden=32, layers=2, mlp=128)


def hf_clip(
    clip: ClipText, prefix: str = "cond_stage_model.transformer.text_model.", *, position_ids: bool = True
) -> Layout:
    """CLIP-L as SD1 and SDXL files name it. `position_ids` is an integer table that only some files carry."""
    layout: Layout = {
        "embeddings.token_embedding.weight": (clip.vocabulary, clip.hidden),
        "embeddings.position_embedding.weight": (CLIP_POSITIONS, clip.hidden),
    }
    if position_ids:
        layout["embeddings.position_ids"] = (1, CLIP_POSITIONS)
    for layer in (f"encoder.layers.{i}" for i in range(clip.layers)):
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(layout, f"{layer}.self_attn.{part}", clip.hidden, clip.hidden)
        linear(layout, f"{layer}.mlp.fc1", clip.mlp, clip.hidden)
        linear(layout, f"{layer}.mlp.fc2", clip.hidden, clip.mlp)
        norm(layout, f"{layer}.layer_norm1", clip.hidden)
        norm(layout, f"{layer}.layer_norm2", clip.hidden)
    norm(layout, "final_layer_norm", clip.hidden)
    return prefixed(prefix, layout)


def open_clip(
    hidden: int = 1280, layers: int = 32, mlp: int = 5120, prefix: str = "conditioner.embedders.1.model."
) -> Layout:
    """CLIP-G as SDXL files name it: fused query, key and value; a transposed projection."""
    layout: Layout = {
        "positional_embedding": (CLIP_POSITIONS, hidden),
        "text_projection": (hidden, hidden),
        "logit_scale": (),
        "token_embedding.weight": (CLIP_VOCABULARY, hidden),
    }
    for layer in (f"transformer.resblocks.{i}" for i in range(layers)):
        layout[f"{layer}.attn.in_proj_weight"] = (3 * hidden, hidden)
        layout[f"{layer}.attn.in_proj_bias"] = (3 * hidden,)
        linear(layout, f"{layer}.attn.out_proj", hidden, hidden)
        linear(layout, f"{layer}.mlp.c_fc", mlp, hidden)
        linear(layout, f"{layer}.mlp.c_proj", hidden, mlp)
        norm(layout, f"{layer}.ln_1", hidden)
        norm(layout, f"{layer}.ln_2", hidden)
    norm(layout, "ln_final", hidden)
    return prefixed(prefix, layout)


def flux(
    double_blocks: int = 19, single_blocks: int = 38, hidden: int = 3072, *, guidance: bool = True, prefix: str = ""
) -> Layout:
    """The Flux transformer in its original naming: fused query, key and value."""
    layout: Layout = {}
    linear(layout, "img_in", hidden, 64)
    linear(layout, "txt_in", hidden, 4096)
    embedders = {"time_in": 256, "vector_in": 768} | ({"guidance_in": 256} if guidance else {})
    for name, width in embedders.items():
        linear(layout, f"{name}.in_layer", hidden, width)
        linear(layout, f"{name}.out_layer", hidden, hidden)
    for i in range(double_blocks):
        for stream in (f"double_blocks.{i}.img", f"double_blocks.{i}.txt"):
            linear(layout, f"{stream}_mod.lin", 6 * hidden, hidden)
            linear(layout, f"{stream}_attn.qkv", 3 * hidden, hidden)
            layout[f"{stream}_attn.norm.query_norm.scale"] = (128,)
            layout[f"{stream}_attn.norm.key_norm.scale"] = (128,)
            linear(layout, f"{stream}_attn.proj", hidden, hidden)
            linear(layout, f"{stream}_mlp.0", 4 * hidden, hidden)
            linear(layout, f"{stream}_mlp.2", hidden, 4 * hidden)
    for block in (f"single_blocks.{i}" for i in range(single_blocks)):
        linear(layout, f"{block}.linear1", 7 * hidden, hidden)
        linear(layout, f"{block}.linear2", hidden, 5 * hidden)
        layout[f"{block}.norm.query_norm.scale"] = (128,)
        layout[f"{block}.norm.key_norm.scale"] = (128,)
        linear(layout, f"{block}.modulation.lin", 3 * hidden, hidden)
    linear(layout, "final_layer.linear", 64, hidden)
    linear(layout, "final_layer.adaLN_modulation.1", 2 * hidden, hidden)
    return prefixed(prefix, layout)


def sd3(
    depth: int = 24,
    hidden: int = 1536,
    *,
    positions: int = 192,
    qk_norm: bool = False,
    dual_blocks: int = 0,
    prefix: str = "model.diffusion_model.",
) -> Layout:
    """The SD3 and SD3.5 transformer in its original naming. `dual_blocks` have a second attention on the image."""
    layout: Layout = {"pos_embed": (1, positions * positions, hidden)}
    conv(layout, "x_embedder.proj", hidden, 16, 2)
    linear(layout, "context_embedder", hidden, 4096)
    for name, width in (("t_embedder", 256), ("y_embedder", 2048)):
        linear(layout, f"{name}.mlp.0", hidden, width)
        linear(layout, f"{name}.mlp.2", hidden, hidden)
    for i in range(depth):
        for stream in ("x_block", "context_block"):
            ends_here = i == depth - 1 and stream == "context_block"
            dual = stream == "x_block" and i < dual_blocks
            _sd3_stream(layout, f"joint_blocks.{i}.{stream}", hidden, qk_norm=qk_norm, dual=dual, ends_here=ends_here)
    linear(layout, "final_layer.linear", 64, hidden)
    linear(layout, "final_layer.adaLN_modulation.1", 2 * hidden, hidden)
    return prefixed(prefix, layout)


def _sd3_stream(layout: Layout, key: str, hidden: int, *, qk_norm: bool, dual: bool, ends_here: bool) -> None:
    modulations = 2 if ends_here else 9 if dual else 6
    linear(layout, f"{key}.adaLN_modulation.1", modulations * hidden, hidden)
    for attention in ("attn", "attn2") if dual else ("attn",):
        linear(layout, f"{key}.{attention}.qkv", 3 * hidden, hidden)
        if qk_norm:
            layout[f"{key}.{attention}.ln_q.weight"] = (64,)
            layout[f"{key}.{attention}.ln_k.weight"] = (64,)
        if not ends_here:
            linear(layout, f"{key}.{attention}.proj", hidden, hidden)
    if not ends_here:
        linear(layout, f"{key}.mlp.fc1", 4 * hidden, hidden)
        linear(layout, f"{key}.mlp.fc2", hidden, 4 * hidden)


def sd15() -> Layout:
    """A whole SD1.5 file."""
    return {**ldm_unet(SD15_UNET), **ldm_vae(SD15_VAE), **hf_clip(CLIP_L)}


def sd21() -> Layout:
    """A whole SD2.1 file."""
    text = open_clip(1024, 24, 4096, prefix="cond_stage_model.model.")
    return {**ldm_unet(SD21_UNET), **ldm_vae(SD15_VAE), **text}


def sdxl() -> Layout:
    """A whole SDXL file."""
    clip_l = hf_clip(CLIP_L, "conditioner.embedders.0.transformer.text_model.")
    return {**ldm_unet(SDXL_UNET), **ldm_vae(SD15_VAE), **clip_l, **open_clip()}


def tiny_sd1() -> Layout:
    """A whole file in the SD1 layout with 5 million parameters."""
    return {**ldm_unet(TINY_UNET), **ldm_vae(TINY_VAE), **hf_clip(TINY_CLIP)}


def sdxl_refiner() -> Layout:
    """A whole file of SDXL's refiner."""
    text = open_clip(prefix="conditioner.embedders.0.model.")
    return {**ldm_unet(SDXL_REFINER_UNET), **ldm_vae(SD15_VAE), **text}


def tiny_sd2() -> Layout:
    """A whole file in the SD2 layout with 8 million parameters."""
    unet = replace(TINY_SDXL_UNET, depths=(1, 1), middle_depth=1, context_width=32, label_width=None)
    text = open_clip(32, 3, 128, prefix="cond_stage_model.model.")
    return {**ldm_unet(unet), **ldm_vae(TINY_VAE), **text}


def tiny_sdxl() -> Layout:
    """A whole file in the SDXL layout with 11 million parameters."""
    clip_l = hf_clip(TINY_CLIP, "conditioner.embedders.0.transformer.text_model.")
    return {**ldm_unet(TINY_SDXL_UNET), **ldm_vae(TINY_VAE), **clip_l, **open_clip(32, 3, 128)}


def tiny_sdxl_refiner() -> Layout:
    """A whole file in the layout of SDXL's refiner."""
    unet = replace(TINY_SDXL_UNET, context_width=32, label_width=32 + 5 * 256)
    text = open_clip(32, 3, 128, prefix="conditioner.embedders.0.model.")
    return {**ldm_unet(unet), **ldm_vae(TINY_VAE), **text}
