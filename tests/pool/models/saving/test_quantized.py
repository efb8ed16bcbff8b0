"""Saving quantized checkpoints: layers without patches are carried as they are, patched ones are quantized again.

Proves: nothing but the patched layers changes, and those are what a resident patched weight is, byte for byte; with a
dtype they become plain numbers and no mark of a format stays; a layer that patches cannot go into is refused before
anything is written.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.patches.stochastic_rounding import seed_of
from modelpool.pool.weights.quant.quantize import PER_ROW, quantize, requantize
from modelpool.pool.weights.quant.state_dict import save
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.models.saving.models import bits, changed, opened
from tests.pool.toy import make_patch

UNET = "model.diffusion_model."
BLOCK = "input_blocks.1.1.transformer_blocks.0.attn1."
OWN = "down_blocks.0.attentions.0.transformer_blocks.0.attn1."
PATCHES = {Role.DIFFUSION_MODEL: PatchSet((make_patch(f"{OWN}to_q.weight", (48, 48), "p"),))}
FORMS: dict[str, dict[str, object]] = {"float8_e4m3fn": {}, "int8_tensorwise": {PER_ROW: True}, "mxfp8": {}}


def quantized(tensors: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """`tensors` with the first attention of the UNet in a format, as published."""
    chosen = {
        key: quantize(tensor, form, FORMS[form])
        for key, tensor in tensors.items()
        if key.startswith(UNET + BLOCK) and tensor.dim() == 2
    }
    assert len(chosen) == 4
    return save({**tensors, **chosen})


@pytest.fixture(params=FORMS)
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    plain = write_tiny_checkpoint(tmp_path / "plain.safetensors")
    save_file(quantized(load_file(plain), request.param), tmp_path / "a.safetensors", {"format": "pt"})
    return tmp_path / "a.safetensors"


def test_layers_without_patches_are_carried_as_they_are(tmp_path: Path, source: Path) -> None:
    save_checkpoint(opened(source), tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == source.read_bytes()


def test_a_patched_layer_is_quantized_again_and_no_other(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "b.safetensors"
    save_checkpoint(opened(source), out, patches=PATCHES)
    differing = changed(source, out)
    assert f"{UNET}{BLOCK}to_q.weight" in differing
    assert differing <= {f"{UNET}{BLOCK}to_q.weight", f"{UNET}{BLOCK}to_q.weight_scale"}
    name = f"{OWN}to_q.weight"
    host = open_checkpoint(source).build(Role.DIFFUSION_MODEL).module.get_parameter(name).data
    assert isinstance(host, PackedWeight)
    wanted = requantize(
        PATCHES[Role.DIFFUSION_MODEL].functions(name)[0](host.unpack(torch.float32)), host, seed_of(name)
    )
    found = open_checkpoint(out).build(Role.DIFFUSION_MODEL).module.get_parameter(name).data
    assert isinstance(found, PackedWeight)
    assert {k: bits(p) for k, p in found.parts.items()} == {k: bits(p) for k, p in wanted.parts.items()}


def test_with_a_dtype_quantized_weights_become_plain(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "b.safetensors"
    save_checkpoint(opened(source), out, dtype=torch.bfloat16)
    saved, plain = load_file(out), load_file(tmp_path / "plain.safetensors")
    assert {key: tuple(value.shape) for key, value in saved.items()} == {k: tuple(v.shape) for k, v in plain.items()}
    assert not open_checkpoint(out).layers
    module = open_checkpoint(source).build(Role.DIFFUSION_MODEL).module
    for part in ("to_q", "to_k", "to_v", "to_out.0"):
        packed = module.get_parameter(f"{OWN}{part}.weight").data
        assert isinstance(packed, PackedWeight)
        assert torch.equal(saved[f"{UNET}{BLOCK}{part}.weight"], packed.unpack(torch.float32).bfloat16())


def test_a_folder_of_diffusers_has_plain_weights(tmp_path: Path, source: Path) -> None:
    save_diffusers(opened(source), tmp_path / "folder", patches=PATCHES)
    saved = load_file(tmp_path / "folder" / "unet" / "diffusion_pytorch_model.safetensors")
    packed = open_checkpoint(source).build(Role.DIFFUSION_MODEL).module.get_parameter(f"{OWN}to_q.weight").data
    assert isinstance(packed, PackedWeight)
    patched = PATCHES[Role.DIFFUSION_MODEL].functions(f"{OWN}to_q.weight")[0](packed.unpack(torch.float32))
    assert torch.equal(saved[f"{OWN}to_q.weight"], patched.to(packed.dtype))


def test_what_the_header_says_of_formats_goes_with_them(tmp_path: Path) -> None:
    plain = write_tiny_checkpoint(tmp_path / "plain.safetensors")
    tensors = quantized(load_file(plain), "float8_e4m3fn")
    marks = [key for key in tensors if key.endswith(".comfy_quant")]
    layers = ",".join(f'"{key.removesuffix(".comfy_quant")}":{{"format":"float8_e4m3fn"}}' for key in marks)
    for key in marks:
        del tensors[key]
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(tensors, source, {"_quantization_metadata": f'{{"layers":{{{layers}}}}}', "note": "kept"})
    save_checkpoint(opened(source), out, patches=PATCHES)
    assert len(open_checkpoint(out).layers) == 4
    save_checkpoint(opened(source), out, dtype=torch.float16, overwrite=True)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"note": "kept"}
    assert load_file(out).keys() == load_file(plain).keys()


def test_a_layer_that_the_model_has_in_another_form_is_refused(tmp_path: Path) -> None:
    """The VAE's attention is of 1x1 convolutions in the file and of matrices in the module: this format has rows only,
    so that it is loaded as plain numbers, and cannot be patched where it is stored."""
    plain = write_tiny_checkpoint(tmp_path / "plain.safetensors")
    key, name = "first_stage_model.decoder.mid.attn_1.q.weight", "decoder.mid_block.attentions.0.to_q.weight"
    tensors = load_file(plain)
    tensors = save({**tensors, key: quantize(tensors[key], "float8_e4m3fn")})
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(tensors, source)
    patches = {Role.VAE: PatchSet((make_patch(name, (64, 64), "v"),))}
    with pytest.raises(BadQuantization, match=r"attn_1\.q\.weight.*expected a format that can be written, or a dtype"):
        save_checkpoint(opened(source), out, patches=patches)
    assert not out.exists()
    save_checkpoint(opened(source), out, patches=patches, dtype=torch.float32)
    values = load_file(out)[key].flatten(1)
    wanted = open_checkpoint(source).build(Role.VAE).module.get_parameter(name).data.float()
    assert torch.equal(values, patches[Role.VAE].functions(name)[0](wanted.clone()))


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_of_a_folder_are_plain_in_its_file(tmp_path: Path, form: str) -> None:
    """Of the type that they stand for, or of another; no factor of theirs stays, and the rest is the same bits."""
    save_diffusers(open_checkpoint(write_tiny_checkpoint(tmp_path / "plain.safetensors")), tmp_path / "folder")
    weights = tmp_path / "folder" / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    chosen = {f"{OWN}{part}.weight" for part in ("to_q", "to_k", "to_v", "to_out.0")}
    save_file(save({**tensors, **{key: quantize(tensors[key], form, FORMS[form]) for key in chosen}}), weights)
    checkpoint, before = open_checkpoint(tmp_path / "folder"), load_file(tmp_path / "plain.safetensors")
    assert len(checkpoint.layers) == 4
    for dtype in (None, torch.float32):
        saved = save_checkpoint(checkpoint, tmp_path / f"{dtype}.safetensors", dtype=dtype)
        found, module = load_file(saved.path), checkpoint.build(Role.DIFFUSION_MODEL).module
        assert not open_checkpoint(saved.path).layers
        assert saved.left_out == ()
        assert found.keys() == {key for key in before if not key.endswith(".position_ids")}
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            packed = module.get_parameter(f"{OWN}{part}.weight").data
            assert isinstance(packed, PackedWeight)
            value = found.pop(f"{UNET}{BLOCK}{part}.weight")
            assert torch.equal(value, packed.unpack(torch.float32).to(dtype or packed.dtype))
        assert all(torch.equal(value, before[key].to(value.dtype)) for key, value in found.items())
