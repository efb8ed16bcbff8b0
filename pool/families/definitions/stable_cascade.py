"""Stable Cascade: two models generate an image. Torch-free to import.

Each is published as a checkpoint or a diffusers folder: stage C (prior) generates a small latent from a text, stage B
(decoder) an image latent from that, which the VAE ("stage A") decodes. Stage C has a text encoder and no VAE, stage B a
VAE and no text encoder: it reads the pooled text of stage C. Stage C also reads the embeddings of images, by a vision
encoder in its file, and begins with the latent of an image, by an encoder in place of a VAE. Further parts of their
files are not run: a previewer of stage C's latents, and copies of stage C's text encoders with stage B.

Facts that shapes do not tell are constants, with their source. Legend: B batch, C channels, H W cells of a latent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.unet_layouts import CASCADE
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.two_stages import PRIOR_CELLS, PRIOR_PIXELS
from modelpool.pool.families.parts.unet_facts import UNET_PREFIX
from modelpool.pool.values.core.errors import UnknownArchitecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

#: cells of a patch of stage B; stage C reads cells. Source: the config.json of stabilityai/stable-cascade
STAGE_B_PATCH = 2
#: kinds of blocks, by a tensor that only that kind has
_BLOCKS = (
    ("depthwise.weight", "SDCascadeResBlock"),
    ("mapper.weight", "SDCascadeTimestepBlock"),
    ("kv_mapper.1.weight", "SDCascadeAttnBlock"),
)
#: optional further time conditions of a block, and their tensors
_TIME_CONDITIONS = ("sca", "crp")
#: parts of the published tensor, and the parameters that they become
_THIRDS = ("to_q", "to_k", "to_v")
_RENAMED = (
    (".attention.attn.out_proj.", ".attention.to_out.0."),
    (".attention.attn.to_", ".attention.to_"),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.StableCascadeUNet`, of either stage."""
    sizes: dict[str, Any] = dict(found)
    widths: tuple[int, ...] = sizes["c_hidden"]
    is_c = sizes["stable_cascade_stage"] == "c"
    patch = 1 if is_c else STAGE_B_PATCH
    pooled_rows, pooled_width = shapes["clip_txt_pooled_mapper.weight"]
    kv = shapes[_first(shapes, ".kv_mapper.1.weight")]
    time = _first(shapes, ".mapper.weight").removesuffix("mapper.weight")
    down, up = sizes["blocks"]
    return {
        "in_channels": shapes["embedding.1.weight"][1] // patch**2,
        "out_channels": shapes["clf.1.weight"][0] // patch**2,
        "patch_size": patch,
        "timestep_ratio_embedding_dim": shapes[f"{time}mapper.weight"][1],
        "timestep_conditioning_type": tuple(c for c in _TIME_CONDITIONS if f"{time}mapper_{c}.weight" in shapes),
        "conditioning_dim": kv[1],
        "clip_seq": pooled_rows // kv[1],
        "block_out_channels": widths,
        # -1 for a level without attention
        "num_attention_heads": tuple(heads if heads < 0 else max(1, heads) for heads in sizes["nhead"]),
        "down_num_layers_per_block": down,
        "up_num_layers_per_block": up,
        "down_blocks_repeat_mappers": sizes["block_repeat"][0],
        "up_blocks_repeat_mappers": sizes["block_repeat"][1],
        "block_types_per_layer": tuple(_layer(shapes, level, down[level]) for level in range(len(widths))),
        "clip_text_in_channels": shapes["clip_txt_mapper.weight"][1] if is_c else None,
        "clip_text_pooled_in_channels": pooled_width,
        "clip_image_in_channels": shapes["clip_img_mapper.weight"][1] if is_c else None,
        "effnet_in_channels": _width(shapes, "effnet_mapper.0.weight"),
        "pixel_mapper_in_channels": _width(shapes, "pixels_mapper.0.weight"),
        "kernel_size": shapes["down_blocks.0.0.depthwise.weight"][-1],
        "dropout": 0.1,
        # one convolution per level change, or convolutions with, in no published model, an additional fold
        "switch_level": (False,) * (len(widths) - 1) if "down_downscalers.1.1.blocks.0.weight" in shapes else None,
    }


def _first(shapes: fam.Shapes, end: str) -> str:
    """Return the first key with this ending. Raises UnknownArchitecture if there is none."""
    found = next((key for key in shapes if key.endswith(end)), None)
    if found is None:
        raise UnknownArchitecture(f"recognised as a stage of Stable Cascade, but without any tensor *{end}")
    return found


def _width(shapes: fam.Shapes, key: str) -> int | None:
    return shapes[key][1] if key in shapes else None


def _layer(shapes: fam.Shapes, level: int, layers: int) -> tuple[str, ...]:
    """Return the kinds of blocks in each layer of `level`."""
    kinds = {
        int(key.split(".")[2]): kind
        for key in shapes
        for end, kind in _BLOCKS
        if key.startswith(f"down_blocks.{level}.") and key.split(".", 3)[3] == end
    }
    return tuple(kinds[block] for block in sorted(kinds)[: len(kinds) // layers])


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of either stage, with queries, keys and values in one tensor as published, or separate as
    other programs write them."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        stem, found, end = key.partition("attn.in_proj_")
        if found:
            thirds = zip(_THIRDS, tensor.chunk(len(_THIRDS)), strict=True)
            converted |= {f"{stem}{name}.{end}": third for name, third in thirds}
            continue
        name = "clip_txt_pooled_mapper." + key.removeprefix("clip_mapper.") if key.startswith("clip_mapper.") else key
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        converted[name] = tensor
    return converted


def forward_c(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the noise of stage C; `level_B` is the position on its cosine schedule."""
    pooled = kwargs["pooled"]
    image = kwargs.get("image_context")
    if image is None:
        image = pooled.new_zeros(pooled.shape[0], 1, fam.config_of(module).clip_image_in_channels)
    return fam.sample_of(
        module(
            sample=x_BCHW,
            timestep_ratio=level_B,
            clip_text_pooled=pooled.unsqueeze(1),
            clip_text=kwargs["context"],
            clip_img=image,
            return_dict=False,
        )
    )


def forward_b(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the noise of stage B, which reads the output of stage C ("prior"); zeros on the unconditional side."""
    return fam.sample_of(
        module(
            sample=x_BCHW,
            timestep_ratio=level_B,
            clip_text_pooled=kwargs["pooled"].unsqueeze(1),
            effnet=kwargs["prior"],
            return_dict=False,
        )
    )


#: key prefix of its text encoder. Source: the names under which ComfyUI writes and reads CLIP-G there
_TEXT_PREFIX, _VAE_PREFIX = "text_encoder.clip_g.", "vae."
#: key prefix of the encoder of images in files of stage C, CLIP L with a projection
_VISION_PREFIX = "clip_l_vision."
#: key prefix of the encoder of images in files of stage C; it makes the latents that stage C generates
_ENCODER_PREFIX = "vae.encoder."
_STAGES_B = ("cascade_b", "cascade_b_lite")
#: Both draw new noise in each step, as DDPM does; steps are spaced evenly on the cosine schedule. Source:
#: DDPMWuerstchenScheduler of diffusers
_SAMPLER, _SCHEDULE = "euler_ancestral", "simple"
_LATENT_C, _LATENT_B = fam.LATENT_FORMATS["cascade_c"], fam.LATENT_FORMATS["cascade_b"]

#: Source of guidance and steps: StableCascadePriorPipeline of diffusers (ComfyUI shifts its levels by 2); of dtypes:
#: the classes of ComfyUI
STAGE_C = fam.LocatedFamily(
    name="cascade_c",
    title="Stable Cascade C",
    prefixes={fam.Role.TEXT_ENCODER: _TEXT_PREFIX, fam.Role.DIFFUSION_MODEL: UNET_PREFIX},
    architectures={
        fam.Role.TEXT_ENCODER: fam.Architecture.TEXT_MODEL,
        fam.Role.DIFFUSION_MODEL: fam.Architecture.DIFFUSION_TRANSFORMER,
    },
    texts={fam.Role.TEXT_ENCODER: fam.TextFacts(encoder="clip_g")},
    native_pixels=1024,
    scaling_factor=_LATENT_C.scale,
    sampling=fam.SamplingFacts(
        prediction=fam.Prediction.NOISE,
        noise=fam.NoiseFacts(fam.NoiseKind.COSINE),
        model="cascade_c",
        reads=frozenset({"context", "pooled", "image_context"}),
        side_multiple=128,
        defaults=fam.SamplingDefaults(20, 4.0, _SAMPLER, _SCHEDULE, fam.Guidance.CLASSIFIER_FREE),
        decoders=_STAGES_B,
        seen_as=fam.SeenAs.STATES,
    ),
    text_set="cascade_c",
    latent_format="cascade_c",
    dtypes=fam.NO_FLOAT16,
    relative="cascade",
    latent=fam.LatentFacts(_LATENT_C.channels, PRIOR_PIXELS, _LATENT_C.scale, cells=PRIOR_CELLS, vae=""),
    carried_vision=_VISION_PREFIX,
    carried_encoder=_ENCODER_PREFIX,
)
#: Source of guidance and steps: StableCascadeDecoderPipeline of diffusers
STAGE_B = fam.LocatedFamily(
    name="cascade_b",
    title="Stable Cascade B",
    prefixes={fam.Role.DIFFUSION_MODEL: UNET_PREFIX, fam.Role.VAE: _VAE_PREFIX},
    architectures={
        fam.Role.DIFFUSION_MODEL: fam.Architecture.DIFFUSION_TRANSFORMER,
        fam.Role.VAE: fam.Architecture.VAE,
    },
    texts={},
    native_pixels=1024,
    scaling_factor=_LATENT_B.scale,
    sampling=fam.SamplingFacts(
        prediction=fam.Prediction.NOISE,
        noise=fam.NoiseFacts(fam.NoiseKind.COSINE),
        model="cascade_b",
        reads=frozenset({"pooled", "prior"}),
        side_multiple=128,
        defaults=fam.SamplingDefaults(10, 1.0, _SAMPLER, _SCHEDULE, fam.Guidance.NONE),
    ),
    latent_format="cascade_b",
    dtypes=fam.HALF_FIRST,
    relative="cascade",
    carried_text=fam.CarriedText(_TEXT_PREFIX, STAGE_C.texts, STAGE_C.text_set),
)


def _lite(family: fam.LocatedFamily) -> fam.LocatedFamily:
    """Return the family of the smaller model of a stage."""
    name = f"{family.name}_lite"
    return replace(
        family,
        name=name,
        title=f"{family.title} lite",
        sampling=replace(family.sampling, model=name),
        text_set=name if family.text_set else "",
    )


def _queries(names_by_source: fam.BaseNames) -> Iterator[tuple[fam.NameSource, str, fam.Ranges]]:
    """Separate names for queries, keys and values, which a published file has in one tensor: the names in files that
    have them separately."""
    for base, ranges in names_by_source[fam.NameSource.DIFFUSERS].items():
        stem, found, part = base.partition(".attention.to_")
        if found and part in ("q", "k", "v"):
            yield fam.NameSource.CHECKPOINT, f"{stem}.attention.attn.to_{part}", ranges


_LORA_C = fam.LoraNaming(
    (
        *fam.GENERIC.rules,
        *fam.joined_names(fam.NameSource.CHECKPOINT, "lora_prior_unet_"),
        *fam.joined_names(fam.NameSource.DIFFUSERS, "lora_prior_unet_"),
        *fam.dotted(fam.NameSource.DIFFUSERS, "prior."),
        fam.NameRule("prior.", fam.NameSource.DIFFUSERS, transform=fam.as_attention_processor),
        *fam.dotted(fam.NameSource.CHECKPOINT, "prior."),
    ),
    _queries,
)
#: the stages share names of weights: a LoRA for the prior is none for the decoder
_LORA_B = fam.LoraNaming(
    (
        *fam.GENERIC.rules,
        *fam.dotted(fam.NameSource.DIFFUSERS, "decoder."),
        fam.NameRule("decoder.", fam.NameSource.DIFFUSERS, transform=fam.as_attention_processor),
        *fam.dotted(fam.NameSource.CHECKPOINT, "decoder."),
    ),
    _queries,
)
_PIPELINE_C = fam.PipelineFacts(
    "StableCascadePriorPipeline",
    {
        fam.Role.TEXT_ENCODER: "text_encoder",
        fam.Role.DIFFUSION_MODEL: "prior",
        fam.Role.VISION_ENCODER: "image_encoder",
    },
    {"feature_extractor": fam.NOTHING, "image_encoder": fam.NOTHING, "resolution_multiple": 42.67},
    processor="feature_extractor",
)
# published folders name "wuerstchen" for the VAE, which newer versions of diffusers refuse even if one is passed; with
# this name they take it from the caller: `from_pretrained(folder, vqgan=PaellaVQModel.from_pretrained(...))`
_PIPELINE_B = fam.PipelineFacts(
    "StableCascadeDecoderPipeline",
    {fam.Role.TEXT_ENCODER: "text_encoder", fam.Role.DIFFUSION_MODEL: "decoder", fam.Role.VAE: "vqgan"},
    {"text_encoder": fam.NOTHING, "tokenizer": fam.NOTHING, "latent_dim_scale": 10.67},
    libraries={"vqgan": "stable_cascade"},
)


def _definition(family: fam.LocatedFamily, when: fam.Condition) -> fam.UNetDefinition:
    is_b = family.sampling.is_decoder_stage
    forward: fam.Call = forward_b if is_b else forward_c
    return fam.UNetDefinition(
        family=family,
        detect=fam.Detection(CASCADE, when, "Stable_Cascade_B" if is_b else "Stable_Cascade_C"),
        module="StableCascadeUNet",
        latent=family.latent_format,
        text=fam.TextInputs(
            # as `StableCascadePriorPipeline`: the last state without its norm, and the encoder gets the mask
            (fam.Reading("clip_g", 1280, is_masked=True, final_norm=False, pooled=fam.Pooled.PROJECTED),),
            set_name="stable_cascade",
        ),
        lora=_LORA_B if is_b else _LORA_C,
        pipeline=_PIPELINE_B if is_b else _PIPELINE_C,
        build=fam.ModelBuild(
            "StableCascadeUNet",
            config,
            convert,
            forward,
            family.dtypes,
            optional_inputs=frozenset() if is_b else frozenset({"image_context"}),
        ),
    )


FAMILIES = (
    _definition(_lite(STAGE_C), fam.having(c_cond=1536)),
    _definition(STAGE_C, fam.having(stable_cascade_stage="c")),
    _definition(_lite(STAGE_B), fam.having(c_hidden=(320, 576, 1152, 1152))),
    _definition(STAGE_B, fam.having(stable_cascade_stage="b")),
)
