"""Which family a file of weights belongs to, from its keys and shapes. Torch-free.

Knows the signatures of published architectures: of those that this version runs, to run them; of the others, to say
what a file is instead of failing later. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pool.checkpoints import infer
from pool.checkpoints.adapter_keys import looks_like_lora
from pool.checkpoints.families import SD1, Family
from pool.checkpoints.safetensors_file import Header, Shape
from pool.errors import UnknownArchitecture
from pool.quantization.layers import QuantizedLayer, layers_in_file, logical_shapes
from pool.spec import Role

#: what the keys of the diffusion model begin with in single files; the empty prefix is a file of nothing else
DIFFUSION_PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "")

#: float types that weights may be stored in
WEIGHT_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
#: ends of keys of factors beside weights. Where no marker tells how to use them, a plain cast would get it wrong
_SCALED_ENDS = (".scale_weight", ".weight_scale", ".comfy_quant", "scaled_fp8")

_ROLE_TITLES: Mapping[Role, str] = {
    Role.TEXT_ENCODER: "text encoder",
    Role.DIFFUSION_MODEL: "diffusion model",
    Role.VAE: "VAE",
}
#: a key that each component of an SD1 file has, without prefix
_SD1_COMPONENTS: Mapping[Role, str] = {
    Role.TEXT_ENCODER: "final_layer_norm.weight",
    Role.DIFFUSION_MODEL: "input_blocks.0.0.weight",
    Role.VAE: "decoder.conv_in.weight",
}


@dataclass(frozen=True, slots=True)
class Signature:
    """A diffusion model that has all of `keys` (without prefix) is `title`."""

    title: str
    keys: tuple[str, ...]


#: the first that fits counts, so the narrower of two comes first
SIGNATURES: tuple[Signature, ...] = (
    Signature("Stable Diffusion 3", ("joint_blocks.0.context_block.attn.qkv.weight",)),
    Signature("Stable Cascade", ("clf.1.weight",)),
    Signature("Stable Audio", ("transformer.rotary_pos_emb.inv_freq",)),
    Signature("AuraFlow", ("double_layers.0.attn.w1q.weight",)),
    Signature("HunyuanDiT", ("mlp_t5.0.weight",)),
    Signature("Hunyuan Video or Hunyuan Image", ("txt_in.individual_token_refiner.blocks.0.norm1.weight",)),
    Signature("Hunyuan3D", ("latent_in.weight", "double_blocks.0.img_attn.qkv.weight")),
    Signature("Flux 2", ("double_stream_modulation_img.lin.weight",)),
    Signature("Chroma", ("double_blocks.0.img_attn.proj.weight", "distilled_guidance_layer.norms.0.scale")),
    Signature("Chroma", ("double_blocks.0.img_attn.proj.weight", "distilled_guidance_layer.in_proj.weight")),
    Signature("Flux", ("img_in.weight", "double_blocks.0.img_attn.qkv.weight")),
    Signature("Mochi", ("t5_yproj.weight",)),
    Signature("PixArt in the naming of diffusers", ("adaln_single.linear.weight", "pos_embed.proj.bias")),
    Signature("LTX-Video", ("adaln_single.emb.timestep_embedder.linear_1.bias", "patchify_proj.weight")),
    Signature("ACE-Step", ("genre_embedder.weight",)),
    Signature("PixArt", ("t_block.1.weight", "y_embedder.y_proj.fc1.weight")),
    Signature("Cosmos", ("blocks.block0.blocks.0.block.attn.to_q.0.weight",)),
    Signature("Z-Image", ("cap_embedder.1.weight", "cap_pad_token")),
    Signature("Lumina 2", ("cap_embedder.1.weight",)),
    Signature("Wan", ("head.modulation",)),
    Signature("Hunyuan3D", ("t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight")),
    Signature("HiDream", ("caption_projection.0.linear.weight",)),
    Signature("Cosmos Predict 2", ("blocks.0.mlp.layer1.weight",)),
    Signature("OmniGen 2", ("time_caption_embed.timestep_embedder.linear_1.bias",)),
    Signature("Qwen-Image", ("txt_norm.weight", "transformer_blocks.0.attn.add_k_proj.weight")),
    Signature("Kandinsky 5", ("visual_transformer_blocks.0.cross_attention.key_norm.weight",)),
    Signature("Stable Video Diffusion", ("input_blocks.0.0.weight", "input_blocks.1.0.time_stack.in_layers.0.weight")),
)

#: files that are no diffusion model: a key or the beginning of one, and what the file is
OTHER_FILES: tuple[tuple[str, str], ...] = (
    ("control_model.", "a ControlNet"),
    ("controlnet_cond_embedding.", "a ControlNet in the naming of diffusers"),
    ("down_blocks.0.resnets.0.norm1.weight", "a UNet in the naming of diffusers, one part of a model folder"),
    ("decoder.up_blocks.0.resnets.0.norm1.weight", "a VAE in the naming of diffusers, one part of a model folder"),
    ("transformer_blocks.0.attn.to_q.weight", "a transformer in the naming of diffusers, one part of a model folder"),
    ("decoder.conv_in.weight", "a VAE on its own"),
    ("first_stage_model.decoder.conv_in.weight", "a VAE on its own"),
    ("text_model.encoder.layers.0.", "a CLIP text encoder on its own"),
    ("encoder.block.0.layer.0.SelfAttention.", "a T5 text encoder on its own"),
    ("emb_params", "a textual inversion embedding"),
    ("string_to_param", "a textual inversion embedding"),
    ("image_proj.", "an IP-Adapter"),
    ("conv_first.weight", "an upscaler"),
    ("model.0.weight", "an upscaler"),
)


def detect(header: Header) -> Family:
    """The family of a checkpoint, one that this version can run whole.

    Raises UnknownArchitecture, naming the file and what it seems to be, for anything else, and BadQuantization for
    quantized layers that are not stored as they say.
    """
    layers = layers_in_file(header)
    shapes = logical_shapes(header.shapes, layers)
    title = recognise(shapes)
    if title is None:
        raise UnknownArchitecture(f"{header.path}: {_describe_unknown(shapes)}; {_expected()}")
    if title == SD1.title:
        title += _variant(header, shapes)
    if title != SD1.title:
        raise UnknownArchitecture(
            f"{header.path}: recognised as {title}, which this version cannot run yet; {_expected()}"
        )
    missing = [role for role, key in _SD1_COMPONENTS.items() if not _has_component(shapes, role, key)]
    if missing:
        raise UnknownArchitecture(
            f"{header.path}: recognised as {title}, but without its {' and '.join(_ROLE_TITLES[r] for r in missing)} "
            f"(no tensors {', '.join(SD1.prefixes[r] + '*' for r in missing)}); {_expected()}"
        )
    _check_dtypes(header, shapes, layers)
    try:
        infer.check(SD1, shapes)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: recognised as {title}, but {error}; {_expected()}") from error
    return SD1


def recognise(shapes: Mapping[str, Shape]) -> str | None:
    """The title of the architecture whose diffusion model is among `shapes`, run by this version or not."""
    for prefix in DIFFUSION_PREFIXES:
        for signature in SIGNATURES:
            if all(prefix + key in shapes for key in signature.keys):
                return signature.title
        if prefix + "input_blocks.0.0.weight" in shapes:
            return _recognise_unet(shapes, prefix)
    return None


def _recognise_unet(shapes: Mapping[str, Shape], prefix: str) -> str:
    """Which of the latent diffusion UNets this is; `Family.title` for one that this version runs."""
    in_channels = (*shapes[prefix + "input_blocks.0.0.weight"], 0, 0)[1]
    linear_projection = len(shapes.get(prefix + "middle_block.1.proj_in.weight", ())) == 2
    if prefix + "label_emb.0.0.weight" in shapes:
        to_k = shapes.get(prefix + "middle_block.1.transformer_blocks.0.attn2.to_k.weight", ())
        context = (*to_k, 0, 0)[1]
        by_context = {2048: "Stable Diffusion XL", 1280: "the Stable Diffusion XL refiner"}
        return by_context.get(
            context, "Stable Diffusion XL" if not context else "Stable Diffusion 2 unCLIP or a relative"
        )
    if in_channels == 7:
        return "the Stable Diffusion x4 upscaler"
    if linear_projection:
        return "Stable Diffusion 2" if in_channels == 4 else "Stable Diffusion 2 inpainting"
    by_channels = {9: "Stable Diffusion 1 inpainting", 8: "Stable Diffusion 1 InstructPix2Pix"}
    return by_channels.get(in_channels, SD1.title)


def _variant(header: Header, shapes: Mapping[str, Shape]) -> str:
    """What sets an SD1 file apart from those that this version runs, where its shapes do not; empty for nothing."""
    if "v_pred" in header.tensors or header.metadata.get("modelspec.prediction_type", "").startswith("v"):
        return " with v-prediction"
    if any(key.endswith(_SCALED_ENDS) for key in shapes):
        return " with scaled 8-bit weights"
    return ""


def _check_dtypes(header: Header, shapes: Mapping[str, Shape], layers: Mapping[str, QuantizedLayer]) -> None:
    for role in SD1.prefixes:
        for key in SD1.shapes_of(role, shapes):
            if key not in layers and header.tensors[key].dtype not in WEIGHT_DTYPES:
                raise UnknownArchitecture(
                    f"{header.path}: tensor {key!r}: found type {header.tensors[key].dtype}, "
                    f"expected one of {', '.join(sorted(WEIGHT_DTYPES))}"
                )


def _has_component(shapes: Mapping[str, Shape], role: Role, key: str) -> bool:
    return key in SD1.bare_shapes_of(role, shapes)


def _describe_unknown(shapes: Mapping[str, Shape]) -> str:
    if not shapes:
        return "the file holds no tensors"
    if looks_like_lora(shapes):
        return "this is a LoRA, not a checkpoint: use it with a checkpoint that it was made for"
    for beginning, title in OTHER_FILES:
        if any(key.startswith(beginning) for key in shapes):
            return f"this is {title}"
    first = ", ".join(list(shapes)[:3])
    return f"its {len(shapes)} tensors match no known architecture (the first are {first})"


def _expected() -> str:
    return f"expected a {SD1.title} checkpoint in one file"
