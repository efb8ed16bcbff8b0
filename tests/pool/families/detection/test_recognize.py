"""What is inside a file: its components with their sizes, how they are stored, what it says of its predictions."""

from __future__ import annotations

import math

import pytest

from modelpool.pool.families.detection.file_facts import Contents, Kind, Stored
from modelpool.pool.families.detection.recognize import recognise_contents
from modelpool.pool.families.detection.vision import recognise_vision
from tests.pool.families.detection.published import Shapes, shapes_of
from tests.pool.models.loading import layouts

BITS = {"F16": 16, "F32": 32, "F8_E4M3": 8}


def contents(shapes: Shapes, metadata: dict[str, str] | None = None, dtype: str = "F16") -> Contents:
    stored = {key: Stored(dtype, math.prod(shape) * BITS[dtype] // 8) for key, shape in shapes.items()}
    return Contents(shapes, stored, metadata or {})


def test_an_sdxl_file_has_two_text_encoders_and_a_vae() -> None:
    shapes = layouts.sdxl()
    facts = recognise_contents(contents(shapes))
    assert (facts.kind, facts.title) == (Kind.CHECKPOINT, "Stable Diffusion XL")
    assert [(c.kind, c.name) for c in facts.components] == [
        (Kind.DIFFUSION_MODEL, "sdxl"),
        (Kind.TEXT_ENCODER, "clip_l"),
        (Kind.TEXT_ENCODER, "clip_g"),
        (Kind.VAE, "kl"),
    ]
    model = facts.diffusion
    assert model is not None
    assert (model.prefix, model.dtype, model.latent) == ("model.diffusion_model.", "F16", "sdxl")
    assert model.parameters == 2_567_463_684
    assert model.storage_bytes == 2 * model.parameters


def test_every_tensor_is_counted_once() -> None:
    shapes = {**layouts.sd15(), "model_ema.decay": (), "betas": (1000,)}
    facts = recognise_contents(contents(shapes))
    assert facts.other_tensors == 2
    assert sum(c.tensors for c in facts.components) + facts.other_tensors == len(shapes)
    assert sum(c.parameters for c in facts.components) + 1001 == sum(math.prod(shape) for shape in shapes.values())
    assert sum(c.storage_bytes for c in facts.components) + facts.other_bytes == 2 * sum(
        map(math.prod, shapes.values())
    )


def test_a_model_without_prefix_beside_other_components_has_its_own_tensors_only() -> None:
    vae = {key: s for key, s in layouts.sd15().items() if key.startswith("first_stage_model.")}
    facts = recognise_contents(contents({**shapes_of("flux_schnell"), **vae}))
    assert [(c.name, c.tensors) for c in facts.components] == [("flux_schnell", 776), ("kl", len(vae))]


def test_the_type_of_most_bytes_counts() -> None:
    shapes = shapes_of("flux_dev")
    whole = contents(shapes, dtype="F8_E4M3")
    stored = dict(whole.stored) | {"img_in.weight": Stored("F32", 3072 * 64 * 4)}
    facts = recognise_contents(Contents(shapes, stored))
    assert facts.diffusion is not None
    assert facts.diffusion.dtype == "F8_E4M3"
    assert list(facts.diffusion.dtypes) == ["F8_E4M3", "F32"]
    unknown = recognise_contents(Contents(shapes))
    assert unknown.diffusion is not None
    assert (unknown.diffusion.dtype, unknown.diffusion.storage_bytes) == ("", 0)


@pytest.mark.parametrize(
    ("extra", "metadata", "kinds"),
    [
        ({}, {}, ()),
        ({"v_pred": (1,)}, {}, ("v",)),
        ({"v_pred": (1,), "ztsnr": (1,)}, {"modelspec.prediction_type": "v"}, ("v", "zero-terminal-snr", "v")),
        ({"edm_vpred.sigma_max": (1,), "edm_vpred.sigma_min": (1,)}, {}, ("edm-v",)),
        ({"edm_mean": (4,), "edm_std": (4,)}, {}, ("edm",)),
        ({}, {"modelspec.predict_key": "epsilon"}, ("epsilon",)),
        ({}, {"modelspec.prediction_type": " v_prediction "}, ("v",)),
        ({}, {"modelspec.prediction_type": "something new"}, ("something new",)),
        ({}, {"modelspec.prediction_type": " "}, ()),
    ],
)
def test_what_a_file_says_of_its_predictions(extra: Shapes, metadata: dict[str, str], kinds: tuple[str, ...]) -> None:
    facts = recognise_contents(contents({**layouts.sdxl(), **extra}, metadata))
    assert tuple(hint.kind for hint in facts.prediction) == kinds


PARTS: dict[str, tuple[Shapes, Kind, str]] = {
    "vae": (
        {k.removeprefix("first_stage_model."): s for k, s in layouts.sd15().items() if "first_" in k},
        Kind.VAE,
        "kl",
    ),
    "vae under its prefix": ({k: s for k, s in layouts.sd15().items() if "first_stage" in k}, Kind.VAE, "kl"),
    "text encoder": (
        {k.removeprefix("cond_stage_model.transformer."): s for k, s in layouts.sd15().items() if "cond_st" in k},
        Kind.TEXT_ENCODER,
        "clip_l",
    ),
    "vision encoder": (
        {"vision_model.embeddings.patch_embedding.weight": (1280, 3, 14, 14), "visual_projection.weight": (1024, 1280)},
        Kind.VISION_ENCODER,
        "clip_vision_h",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_components_on_their_own_are_recognised(part: str) -> None:
    shapes, kind, name = PARTS[part]
    facts = recognise_contents(contents(shapes))
    [found] = facts.components
    assert (facts.kind, found.kind, found.name, found.tensors) == (kind, kind, name, len(shapes))


@pytest.mark.parametrize("shape", [(), (3,), (7, 7), (2,) * 7])
def test_a_component_with_a_tensor_of_a_strange_shape_is_no_crash(shape: tuple[int, ...]) -> None:
    """Found by damaging files at random: a downsampling convolution of one dimension was one index too far."""
    for key in ("downsample.conv.weight", "block.0.conv1.weight"):
        shapes = {**layouts.sd15(), f"first_stage_model.encoder.down.0.{key}": shape}
        facts = recognise_contents(contents(shapes))
        assert facts.components[0].name == "sd1"
        assert Kind.VAE in {c.kind for c in facts.components}


def test_parts_without_a_diffusion_model_are_parts() -> None:
    shapes = {k: s for k, s in layouts.sd15().items() if not k.startswith("model.")}
    facts = recognise_contents(contents(shapes))
    assert facts.kind is Kind.PARTS
    assert {c.kind for c in facts.components} == {Kind.VAE, Kind.TEXT_ENCODER}
    assert facts.diffusion is None


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        (("lora_unet_x.lora_up.weight", "lora_unet_x.lora_down.weight"), "a LoRA"),
        (("control_model.input_blocks.0.0.weight",), "a ControlNet"),
        (("controlnet_cond_embedding.conv_in.weight",), "a ControlNet in the naming of diffusers"),
        (("controlnet_blocks.0.weight", "x_embedder.weight"), "a ControlNet for a transformer"),
        (("emb_params",), "a textual inversion embedding"),
        (("clip_l", "clip_g"), "a textual inversion embedding"),
        (("image_proj.proj.weight",), "an IP-Adapter"),
        (("redux_up.weight", "redux_down.weight"), "a Redux style model"),
        (("down_blocks.0.motion_modules.0.norm.weight",), "an AnimateDiff motion module"),
        (("detector.backbone.vision_backbone.trunk.blocks.0.attn.qkv.weight",), "a SAM 3 segmentation model"),
        (("encoder.pan_blocks.1.cv4.conv.weight",), "an RT-DETR v4 detector"),
        (("conv_first.weight",), "an upscaler"),
        ((), "the file holds no tensors"),
        (("something.else",), "unknown content"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(keys: tuple[str, ...], title: str) -> None:
    facts = recognise_contents(contents(dict.fromkeys(keys, (4, 4))))
    assert (facts.title, facts.components, facts.other_tensors) == (title, (), len(keys))
    known = {"a LoRA": Kind.LORA, "the file holds no tensors": Kind.UNKNOWN}
    assert facts.kind is known.get(title, Kind.UNKNOWN if "unknown" in title else Kind.OTHER)


def test_the_sizes_of_vision_encoders_tell_them_apart() -> None:
    key = "vision_model.embeddings.patch_embedding.weight"
    assert recognise_vision({key: (1024, 3, 14, 14)}) == ("clip_vision_l", "CLIP vision L/14")
    assert recognise_vision({key: (1152, 3, 14, 14)}) == ("siglip_vision", "SigLIP vision so400m/14")
    for shape in ((), (1024,), (1024, 3, 14), (77, 3, 14, 14), (1024, 4, 14, 14)):
        assert recognise_vision({key: shape}) is None
