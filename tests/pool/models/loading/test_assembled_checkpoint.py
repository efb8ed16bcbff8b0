"""Separate files as one header: what each part carries along, who stands where, and what has no place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.families.definitions.stable_diffusion_2 import SD2
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.files.formats.weights_file import read_part
from modelpool.pool.models.components.text_encoder_aliases import with_detected_text_encoders
from modelpool.pool.models.loading.assembled_checkpoint import assembled_header
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture, UnsafeFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.detect_layers import MARKER, METADATA_KEY
from modelpool.pool.weights.quant.quantize import quantize
from modelpool.pool.weights.quant.state_dict import save
from tests.pool.families.detection.published import shapes_of
from tests.pool.families.tiny_transformers import QWEN_VAE
from tests.pool.models.components.vision.test_qwen import PUBLISHED
from tests.pool.models.components.vision.test_qwen import shapes as seeing_shapes
from tests.pool.models.loading import layouts
from tests.pool.separate import ENCODERS, UNET, split_up, write_atomically


def assembly_of(parts: dict[str, Path], layout: str, **other: str) -> Assembly:
    files = {"diffusion_model": str(parts["unet"]), "vae": str(parts["vae"])}
    encoders = tuple(str(parts[name]) for name in ENCODERS[layout])
    return Assembly("paint", **{**files, **other}, text_encoders=encoders)


def apart(tmp_path: Path, layout: str) -> tuple[Path, Assembly]:
    whole = write_atomically(tmp_path / "whole.safetensors", layout)
    return whole, assembly_of(split_up(whole, layout, tmp_path), layout)


@pytest.mark.parametrize("layout", ENCODERS)
def test_it_is_saved_as_the_whole_file(tmp_path: Path, layout: str) -> None:
    """Tensor for tensor, under the names of the whole file."""
    whole, found = apart(tmp_path, layout)
    save_checkpoint(open_checkpoint(found), tmp_path / "again.safetensors")
    before, after = load_file(whole), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_quantized_layers_stay_quantized_whichever_way_they_are_marked(tmp_path: Path) -> None:
    whole, found = apart(tmp_path, "tiny_sd1")
    tensors = load_file(whole)
    chosen = [key for key in tensors if key.startswith(UNET) and key.endswith("attn1.to_q.weight")]
    marked = save({**tensors, **{key: quantize(tensors[key], "float8_e4m3fn", {}) for key in chosen}})
    unet = {key.removeprefix(UNET): tensor for key, tensor in marked.items() if key.startswith(UNET)}
    save_file(unet, found.diffusion_model)
    assert open_checkpoint(found).layers.keys() == set(chosen)
    # as others say it: in the metadata, by names without prefix
    plain = {key: tensor for key, tensor in unet.items() if not key.endswith(MARKER)}
    names = [key.removeprefix(UNET).removesuffix(".weight") for key in chosen]
    settings = {"layers": {name: {"format": "float8_e4m3fn"} for name in names}}
    save_file(plain, found.diffusion_model, {METADATA_KEY: json.dumps(settings), "title": "paint"})
    opened = open_checkpoint(found)
    assert opened.layers.keys() == set(chosen)
    assert opened.header.metadata["title"] == "paint"
    assert opened.quantization(Role.DIFFUSION_MODEL) == {"float8_e4m3fn": len(chosen)}
    # a checkpoint whose quantized diffusion model another one takes the place of
    save_file(marked, tmp_path / "quantized.safetensors")
    plain_unet = split_up(whole, "tiny_sd1", tmp_path, "plain")["unet"]
    mixed = Assembly("mixed", checkpoint=str(tmp_path / "quantized.safetensors"), diffusion_model=str(plain_unet))
    assert open_checkpoint(mixed).layers == {}


def test_what_trainers_say_of_the_prediction_comes_along(tmp_path: Path) -> None:
    _, found = apart(tmp_path, "tiny_sd1")
    unet = load_file(found.diffusion_model)
    save_file({**unet, "v_pred": torch.empty(0), "ztsnr": torch.empty(0)}, found.diffusion_model)
    said = open_checkpoint(found)
    assert said.family.sampling.prediction.value == "velocity"
    # and goes with the diffusion model that it speaks of
    other = write_atomically(tmp_path / "other.safetensors", "tiny_sd1", seed=2)
    save_file({**load_file(other), "v_pred": torch.empty(0)}, other)
    plain = split_up(
        write_atomically(tmp_path / "third.safetensors", "tiny_sd1", seed=3), "tiny_sd1", tmp_path, "third"
    )
    mixed = Assembly("mixed", checkpoint=str(other), diffusion_model=str(plain["unet"]))
    assert open_checkpoint(mixed).family.sampling.prediction.value == "noise"


@pytest.mark.parametrize("prefix", ["", UNET, "diffusion_model."])
def test_files_of_a_diffusion_model_may_have_a_prefix(tmp_path: Path, prefix: str) -> None:
    whole, found = apart(tmp_path, "tiny_sd1")
    unet = load_file(found.diffusion_model)
    save_file({prefix + key: tensor for key, tensor in unet.items()}, found.diffusion_model)
    opened = open_checkpoint(found)
    assert opened.shapes.keys() == open_checkpoint(whole).shapes.keys()


def test_a_part_may_be_taken_of_a_whole_checkpoint(tmp_path: Path) -> None:
    whole, found = apart(tmp_path, "tiny_sdxl")
    donor = Assembly("d", diffusion_model=found.diffusion_model, vae=str(whole), text_encoders=found.text_encoders)
    built, expected = open_checkpoint(donor).build(Role.VAE), open_checkpoint(found).build(Role.VAE)
    for name, value in expected.module.state_dict().items():
        assert torch.equal(built.module.state_dict()[name], value)
    assert len(read_weights_header(donor).files) == 4


@pytest.mark.parametrize("level", ["text_model.", ""])
def test_a_second_text_encoder_in_the_spelling_of_transformers_is_the_same_module(tmp_path: Path, level: str) -> None:
    """As it is published in a file of its own."""
    whole, found = apart(tmp_path, "tiny_sdxl")
    expected = open_checkpoint(whole).build(Role.TEXT_ENCODER_2).module
    spelled = {
        (key if key.startswith("text_projection") else level + key.removeprefix("text_model.")): value.contiguous()
        for key, value in expected.state_dict().items()
    }
    save_file(spelled, tmp_path / "g.safetensors")
    first = next(file for file in found.text_encoders if file.endswith("clip_l.safetensors"))
    other = Assembly(
        "paint",
        diffusion_model=found.diffusion_model,
        vae=found.vae,
        text_encoders=(first, str(tmp_path / "g.safetensors")),
    )
    opened = open_checkpoint(other)
    built = opened.build(Role.TEXT_ENCODER_2).module
    assert type(built) is type(expected)
    assert built.config.hidden_act == expected.config.hidden_act == "gelu"
    for name, value in expected.state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name


def test_clip_h_as_folders_have_it_is_read_to_its_end() -> None:
    """23 layers of 24: the one that SD2 does not read is not there."""
    prefix = SD2.prefixes[Role.TEXT_ENCODER]
    shapes = {
        f"{prefix}text_model.embeddings.token_embedding.weight": (49408, 1024),
        f"{prefix}text_model.embeddings.position_embedding.weight": (77, 1024),
        f"{prefix}text_model.final_layer_norm.weight": (1024,),
        **{f"{prefix}text_model.encoder.layers.{n}.mlp.fc1.weight": (4096, 1024) for n in range(23)},
    }
    short = with_detected_text_encoders(SD2, shapes)
    assert short.texts[Role.TEXT_ENCODER].layers_left_out == 0
    assert short.configs[Role.TEXT_ENCODER]["hidden_act"] == "gelu"
    whole = with_detected_text_encoders(
        SD2, {**shapes, f"{prefix}text_model.encoder.layers.23.mlp.fc1.weight": (4096, 1024)}
    )
    assert whole.texts[Role.TEXT_ENCODER].layers_left_out == 1
    assert with_detected_text_encoders(SD2, layouts.tiny_sd2()) is SD2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vae": "clip_l"}, "found no known VAE in it"),
        ({"diffusion_model": "vae"}, "found no known diffusion model in it"),
        ({"vae": ""}, "a VAE with latents of sdxl is missing: Stable Diffusion XL reads clip_l, clip_g"),
    ],
)
def test_wrong_parts_are_told(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    whole = write_atomically(tmp_path / "whole.safetensors", "tiny_sdxl")
    parts = split_up(whole, "tiny_sdxl", tmp_path)
    other = {key: str(parts[part]) if part else "" for key, part in changed.items()}
    with pytest.raises(MissingParts, match=message):
        read_weights_header(assembly_of(parts, "tiny_sdxl", **other))


def test_a_vae_of_other_latents_and_a_text_encoder_too_many_are_told_together(tmp_path: Path) -> None:
    whole = write_atomically(tmp_path / "whole.safetensors", "tiny_sd1")
    parts = split_up(whole, "tiny_sd1", tmp_path)
    vae = load_file(parts["vae"])
    rows = {"decoder.conv_in.weight": (1, 4), "post_quant_conv.weight": (0, 4), "post_quant_conv.bias": (0, 4)}
    wide = {key: torch.cat([x] * rows[key][1], rows[key][0]) if key in rows else x for key, x in vae.items()}
    save_file({k: v for k, v in wide.items() if "quant_conv" not in k}, tmp_path / "wide.safetensors")
    encoder = str(parts["clip_l"])
    said = Assembly(
        "paint",
        diffusion_model=str(parts["unet"]),
        vae=str(tmp_path / "wide.safetensors"),
        text_encoders=(encoder, encoder),
    )
    with pytest.raises(MissingParts) as raised:
        read_weights_header(said)
    text = str(raised.value)
    assert f"{encoder} is CLIP-L, which is not used: Stable Diffusion 1 reads clip_l" in text
    assert "wide.safetensors is the VAE of" in text
    assert "and Stable Diffusion 1 has those of sd1" in text


def test_a_diffusion_model_that_does_not_run_is_told_by_name() -> None:
    """Before anybody asks for its text encoders."""
    entries = {key: TensorEntry(key, "F16", shape, 0, 0) for key, shape in shapes_of("ace_step").items()}
    with pytest.raises(UnknownArchitecture, match=r"ace: recognised as ACE-Step.*, which this version cannot run yet"):
        assembled_header(Assembly("paint", diffusion_model="ace"), lambda path: Header(path, 0, entries, {}))


@pytest.mark.parametrize("level", ["visual.", "model.visual."])
def test_the_part_of_a_text_encoder_that_sees_images_is_a_component(level: str) -> None:
    """It comes with the text encoder's file, whatever that is called there, and is no part of what reads texts; without
    it Qwen-Image takes no image to work from."""
    make, publish = QWEN_VAE
    text = {
        "model.embed_tokens.weight": (152064, 3584),
        "model.layers.0.self_attn.k_proj.weight": (512, 3584),
        "model.layers.0.self_attn.k_proj.bias": (512,),
    }
    seeing = {level + key.removeprefix("visual."): shape for key, shape in seeing_shapes(PUBLISHED).items()}
    vae = {key: tuple(value.shape) for key, value in publish(make().state_dict()).items()}
    files = {"model": shapes_of("qwen_image"), "text": {**text, **seeing}, "blind": text, "vae": vae}

    def read(path: str) -> Header:
        entries = {key: TensorEntry(key, "BF16", shape, 0, 0) for key, shape in files[path].items()}
        return Header(path, 0, entries, {})

    parts = {
        name: Assembly("p", diffusion_model="model", vae="vae", text_encoders=(name,)) for name in ("text", "blind")
    }
    header = assembled_header(parts["text"], read)
    family = detect(header)
    start = family.prefixes[Role.TEXT_ENCODER]
    assert family.prefixes[Role.VISION_ENCODER] == start + level
    assert family.shapes_of(Role.VISION_ENCODER, header.shapes).keys() == {start + key for key in seeing}
    assert family.shapes_of(Role.TEXT_ENCODER, header.shapes).keys() == {start + key for key in text}
    assert family.sampling.takes_reference
    blind = detect(assembled_header(parts["blind"], read))
    assert Role.VISION_ENCODER not in blind.prefixes
    assert not blind.sampling.takes_reference


def test_pickles_among_the_parts_have_to_be_allowed(tmp_path: Path) -> None:
    _, found = apart(tmp_path, "tiny_sd1")
    torch.save(load_file(found.vae), tmp_path / "vae.pt")
    other = Assembly(
        "p", diffusion_model=found.diffusion_model, vae=str(tmp_path / "vae.pt"), text_encoders=found.text_encoders
    )
    with pytest.raises(UnsafeFile, match=r"vae\.pt: a PyTorch pickle"):
        open_checkpoint(other)
    assert open_checkpoint(other, allow_pickle=True).build(Role.VAE).module is not None


def test_each_component_is_read_from_its_own_file(tmp_path: Path) -> None:
    _, found = apart(tmp_path, "tiny_sd1")
    for role, file in ((Role.VAE, found.vae), (Role.TEXT_ENCODER, found.text_encoders[0])):
        [(path, ranges)] = byte_ranges(FilePart("/[models]/paint", role, found)).items()
        entries = [entry for entry in read_part(file).tensors.values() if not entry.name.endswith("position_ids")]
        assert path == file
        assert (ranges[0][0], ranges[-1][1]) == (min(e.begin for e in entries), max(e.end for e in entries))
