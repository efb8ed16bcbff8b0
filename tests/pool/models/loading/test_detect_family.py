"""A file is recognised by its keys and shapes: run, or named and refused; never taken for something it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1, SD1_INPAINT
from modelpool.pool.families.definitions.stable_diffusion_xl import SDXL_INPAINT
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry, read_header
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.detection.published import shapes_of
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora


def header_of(layout: Layout, metadata: dict[str, str] | None = None, dtype: str = "F16") -> Header:
    """A header with `layout`, as if a file had it. Offsets play no part in recognising."""
    entries = {k: TensorEntry(k, "I64" if "position_ids" in k else dtype, s, 0, 0) for k, s in layout.items()}
    return Header("some/file.safetensors", 0, entries, metadata or {})


def refusal(layout: Layout, metadata: dict[str, str] | None = None, dtype: str = "F16") -> str:
    with pytest.raises(UnknownArchitecture) as caught:
        detect(header_of(layout, metadata, dtype))
    message = str(caught.value)
    assert message.startswith("some/file.safetensors: ")
    assert "expected a complete checkpoint of Stable Diffusion 1, " in message or "type" in message
    return message


@pytest.mark.parametrize("layout", [layouts.sd15, layouts.tiny_sd1])
def test_sd1_files_of_any_size_are_run(layout: object) -> None:
    assert callable(layout)
    assert detect(header_of(layout())) is SD1


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "F8_E5M2"])
def test_sd1_files_of_any_float_type_are_run(dtype: str) -> None:
    assert detect(header_of(layouts.tiny_sd1(), dtype=dtype)) is SD1


def test_the_old_spelling_of_the_text_encoder_is_understood() -> None:
    """Early files carry CLIP without its text_model level."""
    layout = {k.replace("transformer.text_model.", "transformer."): s for k, s in layouts.tiny_sd1().items()}
    assert detect(header_of(layout)) is SD1


def test_what_training_left_in_a_file_does_not_matter() -> None:
    leftovers: Layout = {
        "model_ema.decay": (),
        "betas": (1000,),
        "alphas_cumprod": (1000,),
        "first_stage_model.loss.logvar": (),
        "cond_stage_model.logit_scale": (),
    }
    assert detect(header_of({**layouts.tiny_sd1(), **leftovers})) is SD1


#: what tells ConsisID apart
CONSISID: Layout = {"patch_embed.text_proj.weight": (3072, 4096), "local_facial_extractor.latents": (1, 32, 1024)}


@pytest.mark.parametrize(("title", "layout"), [("Stable Diffusion 3", layouts.sd3), ("Flux dev", layouts.flux)])
def test_a_transformer_alone_is_told_what_it_runs_with(title: str, layout: Callable[[], layouts.Layout]) -> None:
    said = refusal(layout())
    assert f"recognised as {title}, but without its text encoder and second text encoder" in said
    assert "join separate files with `modelpool models assemble`" in said


#: a whole file of each model that was trained to fill holes, and a UNet of theirs as published
FILLING = {
    "sd1": (SD1_INPAINT, layouts.tiny_sd1(), layouts.TINY_UNET, layouts.LdmUnet()),
    "sdxl": (SDXL_INPAINT, layouts.tiny_sdxl(), layouts.TINY_SDXL_UNET, layouts.SDXL_UNET),
}


@pytest.mark.parametrize("name", FILLING)
def test_models_that_fill_holes_are_run(name: str) -> None:
    family, whole, unet, published = FILLING[name]
    assert detect(header_of({**whole, **layouts.ldm_unet(replace(unet, in_channels=9))})) is family
    alone = refusal(layouts.ldm_unet(replace(published, in_channels=9)))
    assert f"recognised as {family.title}, but without its text encoder" in alone
    odd = {**whole, **layouts.ldm_unet(replace(unet, in_channels=9))}
    odd["first_stage_model.decoder.conv_in.weight"] = (64, 5, 3, 3)
    assert "and 6 for the input image" in refusal(odd)


def test_other_published_architectures_are_called_by_name_with_what_is_missing() -> None:
    """Families that are not integrated yet are distinguished from families without an architecture in a dependency."""
    said = refusal(CONSISID)
    assert "recognised as ConsisID in the naming of diffusers, which this version cannot run yet: diffusers has" in said
    assert "but it is not integrated yet (docs/reference/families.md lists what runs); expected a complete" in said
    without = refusal(shapes_of("ace_step"))
    assert "ACE-Step 1, which this version cannot run yet: no dependency has its architecture" in without


VARIANTS = {
    "edm": ({"edm_mean": (4,)}, {}, "recognised as Stable Diffusion 1 with another noise schedule (EDM)"),
    "ends of noise": ({"edm_vpred.sigma_max": ()}, {}, "Stable Diffusion 1 with another noise schedule (EDM)"),
    "ztsnr": ({"ztsnr": ()}, {}, "zero terminal SNR) and without velocity prediction"),
}


def test_sdxl_with_a_mean_alone_is_refused() -> None:
    assert "Stable Diffusion XL with another noise" in refusal({**layouts.tiny_sdxl(), "edm_mean": (4,)})


def test_cosmos_that_reads_another_text_encoders_states_is_told_apart() -> None:
    """Predict 2.5 looks like 2 but for a projection; T5's states do not fit it."""
    own = {**shapes_of("cosmos_predict2_2b_i2v"), "crossattn_proj.0.weight": (1024, 100352)}
    said = refusal(own)
    assert (
        "Cosmos Predict 2 video with a projection of another text encoder's states (Cosmos Predict 2.5), which" in said
    )


VELOCITY_WORDS = ({"modelspec.prediction_type": "v"}, {"modelspec.predict_key": "v"})


@pytest.mark.parametrize("metadata", VELOCITY_WORDS)
def test_noise_that_ends_in_noise_alone_goes_with_velocity(metadata: dict[str, str]) -> None:
    family = detect(header_of({**layouts.tiny_sd1(), "ztsnr": ()}, metadata))
    assert (family.sampling.prediction, family.sampling.noise.kind) == (Prediction.VELOCITY, NoiseKind.ZERO_TERMINAL)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_that_would_run_wrongly_are_refused(variant: str) -> None:
    extra, metadata, message = VARIANTS[variant]
    assert message in refusal({**layouts.tiny_sd1(), **extra}, metadata)


def test_weights_that_are_no_floats_are_refused() -> None:
    assert "found type I8, expected one of BF16, F16, F32" in refusal(layouts.tiny_sd1(), dtype="I8")


def test_a_checkpoint_without_a_component_says_which() -> None:
    assert "without its text encoder and VAE" in refusal(layouts.ldm_unet(layouts.SD15_UNET))
    without_vae = {k: s for k, s in layouts.sd15().items() if not k.startswith("first_stage_model.")}
    assert "without its VAE (no tensors first_stage_model.*)" in refusal(without_vae)


def test_a_checkpoint_whose_parts_do_not_fit_says_why() -> None:
    layout = {**layouts.tiny_sd1(), **layouts.hf_clip(layouts.ClipText(hidden=64, layers=2, mlp=128))}
    assert "recognised as Stable Diffusion 1, but the text encoder is 64 wide" in refusal(layout)


OTHERS = {
    "down_blocks.0.resnets.0.norm1.weight": "a UNet in the naming of diffusers, one part of a model folder",
    "decoder.up_blocks.0.resnets.0.norm1.weight": "a VAE in the naming of diffusers",
    "decoder.conv_in.weight": "a VAE on its own",
    "text_model.encoder.layers.0.mlp.fc1.weight": "a CLIP text encoder on its own",
    "control_model.input_blocks.0.0.weight": "a ControlNet",
    "emb_params": "a textual inversion embedding",
    "something.else": "its 1 tensor matches no known architecture (the first are something.else)",
}


@pytest.mark.parametrize("key", OTHERS)
def test_files_that_are_no_checkpoint_are_called_by_name(key: str) -> None:
    assert OTHERS[key] in refusal({key: (1,)})


def test_a_lora_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="this is a LoRA, not a checkpoint"):
        detect(read_header(write_tiny_lora(tmp_path / "lora.safetensors")))


def test_a_file_without_tensors_is_said_to_be_empty(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(UnknownArchitecture, match="the file holds no tensors"):
        detect(read_header(tmp_path / "none.safetensors"))


def test_a_unet_key_of_a_strange_shape_is_no_crash() -> None:
    for shape in ((), (4,), (4, 4)):
        assert "expected" in refusal({"model.diffusion_model.input_blocks.0.0.weight": shape})


SAID = {
    "the surest of two counts": (
        {"modelspec.prediction_type": "epsilon", "modelspec.predict_key": "v"},
        Prediction.NOISE,
    ),
    "velocity": ({"modelspec.prediction_type": "v_prediction"}, Prediction.VELOCITY),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_file_says_of_its_prediction_counts(case: str) -> None:
    metadata, expected = SAID[case]
    assert detect(header_of(layouts.tiny_sd1(), metadata)).sampling.prediction is expected


@pytest.mark.parametrize("word", ["flow", "sample", "VLB stuff"])
def test_a_file_that_predicts_something_else_is_refused(word: str) -> None:
    """Found in review: it ran as if it predicted noise, or, beginning with a v, velocity."""
    assert f"that predicts {word!r}" in refusal(layouts.tiny_sdxl(), {"modelspec.prediction_type": word})


def test_a_projection_beside_clip_l_is_left_alone() -> None:
    """Some files carry it; no family that this version runs reads CLIP-L's."""
    key = "cond_stage_model.transformer.text_model.text_projection.weight"
    family = detect(header_of({**layouts.tiny_sd1(), key: (32, 32)}))
    assert key not in family.shapes_of(Role.TEXT_ENCODER, {key: (32, 32)})
