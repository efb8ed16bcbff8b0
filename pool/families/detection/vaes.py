"""The kinds of VAE: sizes and latents of each, and how it is recognised in a file of weights, from keys and shapes.
Torch-free.

A table of signatures, one row per published kind; the first match wins. Keys have no component prefix. Knows the kinds
that are recognised, not how they are built (`pool.models.components.vae`).

Golden values: tests/golden/vae_detection.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modelpool.pool.families.detection.tiny_names import (
    DECODER,
    DECODER_ALONE,
    DIFFUSERS_BLOCKS,
    ENCODER,
    ENCODER_ALONE,
    half_numbers,
    is_decoder_alone,
    is_encoder_alone,
    with_both_halves_names,
)
from modelpool.pool.files.formats.safetensors_file import Shape

Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """One kind of VAE, as in a file.

    name              short and stable, "kl"
    title             for human readers
    latent_channels   channels of its latents, as diffusion models read them
    dimensions        dimensions of its latents after batch and channels: 1, 2 or 3
    pixel_channels    channels of its decoded output
    encode_ratio      pixels (or audio samples) along one side per latent cell, when encoding
    decode_ratio      the same when decoding
    temporal_ratio    frames per time cell; the first cell of a video is one frame
    latent_formats    possible formats of its latents, in `latent_formats`; if several, the model's family decides
    frames_are_batch  a batch of images is several images, not frames of a video
    crops_input       whether pixels beyond a multiple of the ratio are cropped before encoding
    extra_channels    size of an additional dimension of its latents between channels and time; 0 for none
    has_encoder       whether the file has the encoder's weights
    has_decoder       whether the file has the decoder's weights
    layout            "original", or "diffusers" for a file in diffusers' naming
    """

    name: str
    title: str
    latent_channels: int = 4
    dimensions: int = 2
    pixel_channels: int = 3
    encode_ratio: float = 8
    decode_ratio: float = 8
    temporal_ratio: int = 1
    latent_formats: tuple[str, ...] = ()
    frames_are_batch: bool = False
    crops_input: bool = True
    extra_channels: int = 0
    has_encoder: bool = True
    has_decoder: bool = True
    layout: str = "original"

    def decoded_frames(self, cells: int) -> int:
        """Return the frames of `cells` time cells; `cells` itself without a time dimension."""
        return max(0, cells * self.temporal_ratio - (self.temporal_ratio - 1))


@dataclass(frozen=True, slots=True)
class VaeSignature:
    """A kind of VAE, identified by any of `keys`.

    keys     one of them suffices
    facts    its facts, or a function of the file's shapes if there are variants; None: no match
    encoder  key prefixes of the encoder decoder  key prefixes of the decoder
    """

    keys: tuple[str, ...]
    facts: VaeFacts | Callable[[Shapes], VaeFacts | None]
    encoder: tuple[str, ...] = ("encoder.",)
    decoder: tuple[str, ...] = ("decoder.",)


def recognise_vae(shapes: Shapes, dtypes: Mapping[str, str] | None = None) -> VaeFacts | None:
    """Return the VAE with tensors of `shapes` (keys without prefix), or None.

    `dtypes`, in safetensors' notation, distinguish some tiny VAEs with equal shapes.
    """
    for signature in SIGNATURES:
        if not any(key in shapes for key in signature.keys):
            continue
        facts = signature.facts if isinstance(signature.facts, VaeFacts) else signature.facts(shapes)
        if facts is None:
            continue
        return replace(
            facts,
            has_encoder=any(key.startswith(signature.encoder) for key in shapes),
            has_decoder=any(key.startswith(signature.decoder) for key in shapes),
            latent_formats=_narrowed(facts, dtypes or {}),
        )
    return None


def _narrowed(facts: VaeFacts, dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """Return its latent formats; the tiny video autoencoder of HunyuanVideo was published in half precision, others
    not."""
    dtype = dtypes.get("decoder.22.bias")
    if facts.name != "taehv" or dtype is None:
        return facts.latent_formats
    return ("hunyuan_video",) if dtype == "F16" else ("wan21",)


def _dimension(shapes: Shapes, key: str, index: int) -> int:
    """Return size `index` of the tensor `key`; 0 if it does not exist."""
    shape = shapes.get(key, ())
    return shape[index] if index < len(shape) else 0


def _levels(shapes: Shapes) -> int:
    """Return the number of resolution levels, from either half."""
    numbers = {match[1] for key in shapes if (match := re.match(r"(?:decoder\.up|encoder\.down)\.(\d+)\.", key))}
    return len(numbers)


_TITLES_BY_CHANNELS = {4: "Stable Diffusion 1, 2 or XL", 16: "Stable Diffusion 3 or Flux"}
_FORMATS_BY_CHANNELS = {4: ("sd1", "sdxl", "playground_25"), 16: ("sd3", "flux", "cogview4", "glm_image")}
_KL_HALVES = ("decoder.conv_in.weight", "encoder.conv_in.weight")


#: parts of diffusers' AutoencoderKL: other classes share its first and last layers
_KL_PARTS = re.compile(
    r"(?:encoder|decoder)\.(?:conv_in|conv_out|conv_norm_out|mid_block\.(?:attentions|resnets)\.\d+|"
    r"(?:down|up)_blocks\.\d+\.(?:attentions|resnets|downsamplers|upsamplers)\.\d+)\.(?!spatial|temporal)"
)
#: beginnings of names that only classes of diffusers have
_DIFFUSERS_PARTS = ("encoder.mid_block.", "decoder.mid_block.", "encoder.down_blocks.", "decoder.up_blocks.")
#: of KVAE; its other names are Stable Diffusion's
_KVAE_PARTS = ("encoder.down.0.downsample.spatial_conv.", "decoder.up.1.upsample.spatial_conv.")
#: of VidTok and of KVAE for videos; their other names are HunyuanVideo's
_WRAPPED_NORMS = tuple(f"decoder.mid.block_1.norm1.{norm}.weight" for norm in ("norm", "norm_layer.norm_layer"))
#: dimensions of the kernels of an autoencoder of videos; one of sounds has fewer
_VIDEO_KERNEL = 5
#: discrete latents, which no diffusion model here has
_CODEBOOK = "quantize.embedding.weight"


def _is_discrete(shapes: Shapes) -> bool:
    """Whether its latents are entries of a codebook: its encoder writes no variances. Training tools leave a codebook
    in continuous autoencoders, too."""
    entry = shapes.get(_CODEBOOK, ())
    written = _dimension(shapes, "encoder.conv_out.weight", 0)
    return len(entry) == 2 and written in (0, entry[1])


def _is_of_diffusers(shapes: Shapes) -> bool:
    return _is_discrete(shapes) or any(key.startswith(_DIFFUSERS_PARTS) for key in shapes)


def _with_plain_convolutions(shapes: Shapes) -> VaeFacts | None:
    """Return the facts of latent diffusion autoencoders, and of later ones with the same key names; None for classes of
    diffusers, which share the first of them."""
    if _is_of_diffusers(shapes) or any(key.startswith(_KVAE_PARTS) for key in shapes):
        return None
    channels = _dimension(shapes, "decoder.conv_in.weight", 1) or _dimension(shapes, "encoder.conv_out.weight", 0) // 2
    if len(shapes.get("decoder.conv_in.weight", shapes.get("encoder.conv_in.weight", ()))) == 5:
        return replace(_HUNYUAN_IMAGE_3, latent_channels=channels)
    ratio = 2 ** (_levels(shapes) - 1)
    if _has_channel_shortcuts(shapes):
        return replace(_HUNYUAN_IMAGE, latent_channels=channels, encode_ratio=ratio, decode_ratio=ratio)
    if "bn.running_mean" in shapes:
        return replace(_FLUX2, latent_channels=channels * 4, encode_ratio=ratio * 2, decode_ratio=ratio * 2)
    formats = ("sd_x4",) if (channels, ratio) == (4, 4) else _FORMATS_BY_CHANNELS.get(channels, ())
    title = "Stable Diffusion x4 upscaler" if formats == ("sd_x4",) else _TITLES_BY_CHANNELS.get(channels, "KL")
    return VaeFacts("kl", title, channels, encode_ratio=ratio, decode_ratio=ratio, latent_formats=formats)


def _has_channel_shortcuts(shapes: Shapes) -> bool:
    """Return whether levels change by folding pixels into channels: the convolution changes the channel count."""
    for key in ("encoder.down.0.downsample.conv.weight", "decoder.up.0.upsample.conv.weight"):
        if key in shapes:
            return _dimension(shapes, key, 0) != _dimension(shapes, key, 1)
    return False


def _in_diffusers_naming(shapes: Shapes) -> VaeFacts | None:
    """Return the facts of autoencoders in diffusers' naming, if their weights determine the class."""
    if len(shapes.get("decoder.conv_in.weight", ())) != 4 or _is_discrete(shapes):
        return None
    if not all(_KL_PARTS.match(key) for key in shapes if key.startswith(("encoder.", "decoder."))):
        return None
    channels = _dimension(shapes, "decoder.conv_in.weight", 1)
    levels = len({key.split(".")[2] for key in shapes if key.startswith("decoder.up_blocks.")})
    ratio = 2 ** (levels - 1)
    if "bn.running_mean" in shapes:
        facts = replace(_FLUX2, latent_channels=channels * 4, encode_ratio=ratio * 2, decode_ratio=ratio * 2)
    else:
        formats = _FORMATS_BY_CHANNELS.get(channels, ())
        title = _TITLES_BY_CHANNELS.get(channels, "KL")
        facts = VaeFacts("kl", title, channels, encode_ratio=ratio, decode_ratio=ratio, latent_formats=formats)
    return replace(facts, layout="diffusers")


def _taesd(shapes: Shapes) -> VaeFacts | None:
    named = with_both_halves_names(shapes)
    if not any(len(named.get(f"{half}.conv.0.weight", ())) == 4 for half in ("taesd_decoder.3", "taesd_encoder.1")):
        return None
    last = max(half_numbers(named, ENCODER), default=0)
    channels = _dimension(named, "taesd_decoder.1.weight", 1) or _dimension(named, f"{ENCODER}{last}.weight", 0)
    formats = _FORMATS_BY_CHANNELS.get(channels, ())
    return VaeFacts("taesd", "TAESD", channels, latent_formats=formats)


def _ltx(shapes: Shapes) -> VaeFacts:
    folds = "encoder.down_blocks.1.conv.conv.bias" in shapes
    timed = "decoder.last_scale_shift_table" in shapes
    if not folds:
        return _LTX_V1 if timed else _LTX_V0
    return _LTX_V2 if timed else _LTX_2


def _with_causal_convolutions(shapes: Shapes) -> VaeFacts | None:
    is_video = len(shapes["decoder.conv_in.conv.weight"]) == _VIDEO_KERNEL
    if not is_video or _is_of_diffusers(shapes) or any(key in shapes for key in _WRAPPED_NORMS):
        return None
    channels = _dimension(shapes, "decoder.conv_in.conv.weight", 1)
    facts = _HUNYUAN_VIDEO_15 if _has_channel_shortcuts_3d(shapes) else _HUNYUAN
    return replace(facts, latent_channels=channels)


def _has_channel_shortcuts_3d(shapes: Shapes) -> bool:
    key = "decoder.up.0.upsample.conv.conv.weight"
    if key in shapes:
        return _dimension(shapes, key, 0) != _dimension(shapes, key, 1)
    return _dimension(shapes, "decoder.conv_in.conv.weight", 1) == _HUNYUAN_VIDEO_15.latent_channels


#: dimensions of the kernels of an autoencoder of images
_IMAGE_KERNEL = 4
#: channels of pixels with transparency
_WITH_OPACITY = 4


def _wan(shapes: Shapes) -> VaeFacts:
    nested = "decoder.upsamples.0.upsamples.0.residual.2.weight" in shapes
    # images alone, with convolutions of two dimensions
    if len(shapes.get("decoder.conv1.weight", ())) == _IMAGE_KERNEL:
        return _QWEN_IMAGE_21
    if nested:
        return _WAN_22
    in_layers = _WITH_OPACITY in (
        _dimension(shapes, "decoder.head.2.weight", 0), _dimension(shapes, "encoder.conv1.weight", 1)
    )  # fmt: skip
    return _QWEN_IMAGE_LAYERED if in_layers else _WAN_21


def _tiny_video(shapes: Shapes) -> VaeFacts:
    channels = _dimension(shapes, "decoder.1.weight", 1)
    fine = _TINY_VIDEO_16.get(channels)
    if fine is not None:
        name, title, formats = fine
        return replace(_TAEHV, name=name, title=title, latent_channels=channels, encode_ratio=16, decode_ratio=16,
                       latent_formats=formats)  # fmt: skip
    return replace(_TAEHV, latent_channels=channels)


#: kinds with frames that depend on few frames before them, so that parts of a video may be decoded apart: causal ones,
#: and kinds of single frames
TILED_IN_TIME = frozenset(
    {"kl", "kl_temporal", "hunyuan_video", "hunyuan_video_15", "ltx_v0", "ltx_v1", "ltx_v2", "ltx2", "wan21", "wan22"}
)

_TINY_VIDEO_16 = {
    48: ("taehv_wan22", "tiny autoencoder of Wan 2.2", ("wan22",)),
    32: ("taehv_hunyuan_15", "tiny autoencoder of HunyuanVideo 1.5", ("hunyuan_video_15",)),
}
_TAEHV = VaeFacts(
    "taehv", "tiny autoencoder of HunyuanVideo or Wan 2.1", 16, 3,
    temporal_ratio=4, latent_formats=("hunyuan_video", "wan21"),
)  # fmt: skip
_FLUX2 = VaeFacts("flux2", "Flux 2", 128, encode_ratio=16, decode_ratio=16, latent_formats=("flux2", "ideogram4"))
_HUNYUAN_IMAGE = VaeFacts(
    "hunyuan_image", "HunyuanImage 2.1", 64,
    encode_ratio=32, decode_ratio=32, latent_formats=("hunyuan_image",),
)  # fmt: skip
#: 3D convolutions without causal padding and with group norms; its latent format has not been published
_HUNYUAN_IMAGE_3 = VaeFacts(
    "hunyuan_image_3", "HunyuanImage 3", 32, 3, encode_ratio=16, decode_ratio=16, temporal_ratio=4,
    frames_are_batch=True,
)  # fmt: skip
_HUNYUAN_VIDEO_15 = VaeFacts(
    "hunyuan_video_15", "HunyuanVideo 1.5 or the refiner of HunyuanImage 2.1", 32, 3,
    encode_ratio=16, decode_ratio=16, temporal_ratio=4, latent_formats=("hunyuan_video_15", "hunyuan_image_refiner"),
)  # fmt: skip
#: an image of the refiner is one frame, and its VAE is a different class than the video's with the same tensors
HUNYUAN_IMAGE_REFINER = replace(
    _HUNYUAN_VIDEO_15, name="hunyuan_image_refiner", title="HunyuanImage 2.1 refiner",
    latent_formats=("hunyuan_image_refiner",),
)  # fmt: skip
_HUNYUAN = VaeFacts(
    "hunyuan_video", "HunyuanVideo", 16, 3,
    temporal_ratio=4, latent_formats=("hunyuan_video",),
)  # fmt: skip
_LTX_V0 = VaeFacts(
    "ltx_v0", "LTX-Video 0.9", 128, 3, encode_ratio=32, decode_ratio=32, temporal_ratio=8, latent_formats=("ltxv",)
)
_LTX_V1 = replace(_LTX_V0, name="ltx_v1", title="LTX-Video 0.9.1")
_LTX_V2 = replace(_LTX_V0, name="ltx_v2", title="LTX-Video 0.9.5")
_LTX_2 = replace(_LTX_V0, name="ltx2", title="LTX-2")
_WAN_21 = VaeFacts(
    "wan21", "Wan 2.1 or Qwen-Image", 16, 3,
    temporal_ratio=4, latent_formats=("wan21",),
)  # fmt: skip
_WAN_22 = VaeFacts(
    "wan22", "Wan 2.2", 48, 3, encode_ratio=16, decode_ratio=16,
    temporal_ratio=4, latent_formats=("wan22",),
)  # fmt: skip
#: each layer is encoded and decoded like an image
_QWEN_IMAGE_LAYERED = VaeFacts(
    "qwen_image_layered",
    "Qwen-Image layered",
    16,
    3,
    pixel_channels=_WITH_OPACITY,
    latent_formats=("qwen_image_layered",),
)
_QWEN_IMAGE_21 = VaeFacts(
    "qwen_image_21", "Qwen-Image 2.1", 64, encode_ratio=16, decode_ratio=16,
    latent_formats=("qwen_image_21",),
)  # fmt: skip
_STAGE_C_ENCODER = VaeFacts(
    "cascade_c_encoder", "Stable Cascade stage C, encoder", 16, encode_ratio=32, latent_formats=("cascade_c",)
)
_AUDIO_RATE_RATIO = 512 * 44100 / 16000

_KL = VaeFacts("kl", "Stable Diffusion or a relative")
_KL_TEMPORAL = VaeFacts("kl_temporal", "Stable Video Diffusion", latent_formats=("sd1",))
_TAESD = VaeFacts("taesd", "TAESD")
_CASCADE_A = VaeFacts(
    "cascade_a", "Stable Cascade stage A", encode_ratio=4, decode_ratio=4, latent_formats=("cascade_b",)
)
_OOBLECK = VaeFacts(
    "oobleck", "Stable Audio", 64, 1, pixel_channels=2, encode_ratio=2048, decode_ratio=2048,
    latent_formats=("stable_audio", "ace_step_15"),
)  # fmt: skip
_MOCHI = VaeFacts("mochi", "Mochi", 12, 3, temporal_ratio=6, latent_formats=("mochi",))
_DC = VaeFacts("dc", "Sana", 32, encode_ratio=32, decode_ratio=32, latent_formats=("sana",))
_COGVIDEOX = VaeFacts(
    "cogvideox", "CogVideoX", 16, 3, temporal_ratio=4,
    latent_formats=("cogvideox", "cogvideox_2b"),
)  # fmt: skip
_SAME = VaeFacts(
    "stable_audio_3", "Stable Audio 3", 256, 1, pixel_channels=2, encode_ratio=4096, decode_ratio=4096,
    latent_formats=("stable_audio_3",),
)  # fmt: skip
#: its authors decode in full precision
_ALLEGRO = VaeFacts("allegro", "Allegro", 4, 3, temporal_ratio=4, latent_formats=("allegro",))
_COSMOS = VaeFacts("cosmos", "Cosmos", 16, 3, temporal_ratio=8, latent_formats=("cosmos",))
#: facts of kinds with one architecture, by name; sizes as published
FACTS: Mapping[str, VaeFacts] = {
    facts.name: facts
    for facts in (
        _KL, _KL_TEMPORAL, _FLUX2, _TAESD, _CASCADE_A, _OOBLECK, _MOCHI, _COSMOS, _DC, _COGVIDEOX, _LTX_V0, _LTX_V1,
        _LTX_V2, _LTX_2, _HUNYUAN, _HUNYUAN_IMAGE, _HUNYUAN_VIDEO_15, HUNYUAN_IMAGE_REFINER, _WAN_21, _WAN_22,
        _QWEN_IMAGE_21, _QWEN_IMAGE_LAYERED, _ALLEGRO, _SAME,
    )
}  # fmt: skip

#: the first match wins
SIGNATURES: tuple[VaeSignature, ...] = (
    VaeSignature(("decoder.temp_conv_in.weight", "encoder.temp_conv_in.weight"), _ALLEGRO),
    VaeSignature(("decoder.up_blocks.0.resnets.0.norm1.weight",), _in_diffusers_naming),
    VaeSignature(("decoder.mid.block_1.mix_factor",), _KL_TEMPORAL),
    VaeSignature(("taesd_decoder.1.weight",), _taesd, encoder=("taesd_encoder.",), decoder=("taesd_decoder.",)),
    VaeSignature(DIFFUSERS_BLOCKS, _taesd),
    VaeSignature((DECODER_ALONE,), lambda shapes: _taesd(shapes) if is_decoder_alone(shapes) else None,
                 encoder=(ENCODER,), decoder=("1.",)),
    VaeSignature((ENCODER_ALONE,), lambda shapes: _taesd(shapes) if is_encoder_alone(shapes) else None,
                 encoder=("0.",), decoder=(DECODER,)),
    VaeSignature(
        ("vquantizer.codebook.weight",), _CASCADE_A, encoder=("in_block.",), decoder=("up_blocks.",)
    ),
    VaeSignature(
        ("backbone.1.0.block.0.1.num_batches_tracked", "backbone.1.0.block.0.1.running_mean"),
        _STAGE_C_ENCODER,
        encoder=("backbone.",), decoder=("previewer.",),
    ),
    VaeSignature(
        ("blocks.11.num_batches_tracked", "blocks.11.running_mean"),
        replace(_STAGE_C_ENCODER, name="cascade_c_previewer", title="Stable Cascade stage C, previewer"),
        decoder=("blocks.",),
    ),
    VaeSignature(
        ("encoder.backbone.1.0.block.0.1.num_batches_tracked", "encoder.backbone.1.0.block.0.1.running_mean"),
        replace(_STAGE_C_ENCODER, name="cascade_c", title="Stable Cascade stage C, encoder and previewer"),
        encoder=("encoder.backbone.",), decoder=("previewer.",),
    ),
    VaeSignature(_KL_HALVES, _with_plain_convolutions),
    VaeSignature(("decoder.layers.1.layers.0.beta",), _OOBLECK),
    VaeSignature(
        ("blocks.2.blocks.3.stack.5.weight", "decoder.blocks.2.blocks.3.stack.5.weight",
         "layers.4.layers.1.attn_block.attn.qkv.weight", "encoder.layers.4.layers.1.attn_block.attn.qkv.weight"),
        _MOCHI,
        encoder=("encoder.", "layers."), decoder=("decoder.", "blocks."),
    ),
    VaeSignature(("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight",), _ltx),
    # in the naming of diffusers, and of the original code
    VaeSignature(
        ("decoder.mid_block.resnets.0.norm1.norm_layer.weight", "decoder.mid.block_1.norm1.norm_layer.weight"),
        lambda shapes: None if "decoder.conv_in.weight" in shapes else _COGVIDEOX,  # KVAE has plain convolutions
    ),
    VaeSignature(("decoder.conv_in.conv.weight",), _with_causal_convolutions),
    VaeSignature(("decoder.unpatcher3d.wavelets",), _COSMOS),
    VaeSignature(("encoder.project_in.conv.bias", "decoder.project_in.main.conv.weight"), _DC),
    VaeSignature(("decoder.middle.0.residual.0.gamma",), _wan),
    VaeSignature(
        ("geo_decoder.cross_attn_decoder.ln_1.bias",),
        VaeFacts(
            "hunyuan3d", "Hunyuan3D", 64, 1,
            latent_formats=("hunyuan3d_2", "hunyuan3d_21", "hunyuan3d_2_mini"),
        ),
        decoder=("geo_decoder.",),
    ),
    VaeSignature(
        ("vocoder.backbone.channel_layers.0.0.bias",),
        VaeFacts(
            "ace_step", "ACE-Step", 8, pixel_channels=2, encode_ratio=4096, decode_ratio=4096,
            latent_formats=("ace_step",), extra_channels=16,
        ),
        encoder=("dcae.encoder.", "encoder."), decoder=("dcae.decoder.", "decoder."),
    ),
    VaeSignature(
        ("pixel_space_vae",),
        VaeFacts("pixel_space", "no VAE: pixels", 3, encode_ratio=1, decode_ratio=1, latent_formats=("pixels",)),
        encoder=("pixel_space_vae",), decoder=("pixel_space_vae",),
    ),
    VaeSignature(
        ("vocoder.activation_post.downsample.lowpass.filter",),
        VaeFacts(
            "mmaudio", "MMAudio", 20, 1, pixel_channels=1, encode_ratio=_AUDIO_RATE_RATIO,
            decode_ratio=_AUDIO_RATE_RATIO, crops_input=False,
        ),
        encoder=("vae.encoder.", "encoder."), decoder=("vae.decoder.", "decoder."),
    ),
    VaeSignature(("decoder.22.bias",), _tiny_video),
    VaeSignature(
        ("decoder.up_blocks.2.upsamplers.0.upscale_conv.weight",),
        VaeFacts("seedvr2", "SeedVR2", 16, 3, temporal_ratio=4, layout="diffusers"),
    ),
    VaeSignature(
        ("student.dconv_encoder.proj_out.weight",),
        VaeFacts("mage", "Mage", 128), encoder=("student.dconv_encoder.",),
    ),
    VaeSignature(
        ("vocoder.resblocks.0.convs1.0.weight",),
        VaeFacts("ltx_audio", "LTX-2, audio", 8, pixel_channels=2),
        encoder=("audio_vae.encoder.", "encoder."), decoder=("audio_vae.decoder.", "decoder."),
    ),
    VaeSignature(("decoder.layers.3.transformers.0.pre_norm.alpha",), _SAME),
    VaeSignature(("gs.base_offset_scale",), VaeFacts("triposplat", "TripoSplat", 0, 1), decoder=("gs.", "octree.")),
)  # fmt: skip
