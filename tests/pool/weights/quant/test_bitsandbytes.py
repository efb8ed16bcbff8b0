"""Layers in the 4-bit formats of bitsandbytes (NF4, FP4; plain and quantized scales) are read as that package does.

Proves, without the package: values follow from the published definition; those of tensors that bitsandbytes 0.50 wrote
are the bytes that it computes; layers stay packed, row slices included; complete checkpoints in the layout of
lllyasviel's Flux NF4 and folders of diffusers open; a LoRA applies; damaged layers are refused by name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.shapes.checker import matches, read_image
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.quant.state_dict import load, save
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.weights.quant.test_checkpoints import PROMPT, SHAPES, draw

GOLDEN = json.loads((Path(__file__).parent / "bitsandbytes_golden.json").read_text())
#: the table of QLoRA, appendix E
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
UNET = "model.diffusion_model."


def tensor_of(entry: Mapping[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(entry["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, entry["dtype"])).reshape(entry["shape"])


def nf4(weight: Tensor, nested: bool = False, block: int = 64) -> dict[str, Tensor]:
    """The stored tensors of a weight, quantized from the definition: nearest entries of the table, the largest value of
    each block as its scale."""
    flat = weight.float().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    near = (blocks / scales.clamp(min=1e-12)[:, None]).reshape(-1)[: flat.numel()]
    codes = (near[:, None] - torch.tensor(NF4)).abs().argmin(1).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2))
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    found = {"weight": (codes[::2] * 16 + codes[1::2])[:, None], "weight.quant_map": torch.tensor(NF4)}
    if nested:
        offset = float(scales.mean())
        grouped = torch.nn.functional.pad(scales - offset, (0, -scales.numel() % 256)).view(-1, 256)
        factors, table = grouped.abs().amax(1), torch.linspace(-1, 1, 256)
        near = (grouped / factors.clamp(min=1e-12)[:, None]).reshape(-1)[: scales.numel()]
        found["weight.absmax"] = (near[:, None] - table).abs().argmin(1).to(torch.uint8)
        found["weight.nested_absmax"], found["weight.nested_quant_map"] = factors, table
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        found["weight.absmax"] = scales
    text = json.dumps(state).encode()
    return {**found, "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}


def by_definition(stored: Mapping[str, Tensor]) -> Tensor:
    """The values, one after the other, as the definition has them."""
    state = json.loads(bytes(stored["weight.quant_state.bitsandbytes__nf4"].tolist()))
    scales, block = stored["weight.absmax"], state["blocksize"]
    if "nested_blocksize" in state:
        scales = torch.tensor([
            float(stored["weight.nested_quant_map"][int(code)] * stored["weight.nested_absmax"][i // 256])
            + state["nested_offset"]
            for i, code in enumerate(scales)
        ])  # fmt: skip
    codes = [half for byte in stored["weight"].flatten().tolist() for half in (byte >> 4, byte & 15)]
    table = stored["weight.quant_map"]
    count = int(np.prod(state["shape"]))
    return torch.stack([table[codes[i]] * scales[i // block] for i in range(count)]).view(state["shape"])


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_tensors_of_bitsandbytes_have_the_values_that_it_computes(number: int) -> None:
    case = GOLDEN["cases"][number]
    stored = {f"some.{key}": tensor_of(entry) for key, entry in case["tensors"].items()}
    loaded = load(stored)
    assert list(loaded) == ["some.weight"]
    packed = loaded["some.weight"]
    assert isinstance(packed, PackedWeight)
    assert list(packed.shape) == case["shape"]
    values = packed.unpack(getattr(torch, case["dtype"]))
    assert values.flatten()[:4].float().tolist() == case["first"]
    assert hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest() == case["values_sha256"]
    saved = save(loaded)
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[key], stored[key]) for key in stored)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(8, 64), (3, 40), (1, 7), (20, 16, 2, 2)])
def test_values_follow_from_the_definition(shape: tuple[int, ...], nested: bool) -> None:
    """Also of blocks that cross rows, of an odd number of values, and of convolutions."""
    stored = nf4(torch.randn(shape, generator=torch.Generator().manual_seed(1)), nested)
    packed = load(stored)["weight"]
    assert isinstance(packed, PackedWeight)
    torch.testing.assert_close(packed.unpack(torch.float32), by_definition(stored), rtol=0, atol=1e-6)
    assert packed.unpack(torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("nested", [False, True])
def test_rows_stay_packed_where_their_scales_are_separate(nested: bool) -> None:
    """Of 48 blocks a row, 256 of which share a factor, 16 rows have their own: as in the fused layers of Flux."""
    weight = torch.randn(48, 48 * 64, generator=torch.Generator().manual_seed(2))
    packed = load(nf4(weight, nested))["weight"]
    assert isinstance(packed, PackedWeight)
    whole = packed.unpack(torch.float32)
    for start in (0, 16, 32):
        part = packed[start : start + 16]
        assert isinstance(part, PackedWeight)
        assert stored_bytes(part) < 0.4 * stored_bytes(packed)
        assert torch.equal(part.unpack(torch.float32), whole[start : start + 16])
    assert isinstance(packed[3:7], PackedWeight) is not nested
    assert torch.equal(torch.as_tensor(packed[3:7]).float(), whole[3:7].bfloat16().float()) or not nested
    ids = torch.tensor([[5, 0], [47, 5]])
    assert torch.equal(packed.rows_for(ids, torch.float32), whole[ids])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t, s: t.pop("weight.absmax"), r"weight\.absmax'.*found nothing"),
        (lambda t, s: t.update({"weight.quant_map": torch.zeros(15)}), r"found shape \(15,\)"),
        (lambda t, s: t.update({"weight": t["weight"][1:]}), r"found shape"),
        (lambda t, s: s.update(shape=[0, -1]), r"found shape \[0, -1\], expected a list of sizes"),
        (lambda t, s: s.update(blocksize=65), r"found blocksize 65, expected a power of 2"),
        (lambda t, s: s.update(quant_type="nf5"), r"found quant_type 'nf5', expected nf4 or fp4"),
        (lambda t, s: s.update(nested_blocksize=256), r"nested_absmax'.*found nothing"),
        (lambda t, s: t.pop("weight"), r"describes a layer without a weight"),
    ],
)
def test_damaged_layers_are_refused_by_name(change: Any, match: str) -> None:
    stored = nf4(torch.randn(4, 64))
    key = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(stored[key].tolist()))
    change(stored, state)
    stored[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(BadQuantization, match=match):
        load(stored, file="some.safetensors")


def quantized(tensors: Mapping[str, Tensor], beginnings: tuple[str, ...], nested: bool) -> dict[str, Tensor]:
    """`tensors` with every matrix of a linear layer under `beginnings` as NF4."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.startswith(beginnings) and key.endswith(".weight") and tensor.dim() == 2 and tensor.shape[1] % 64 == 0:
            found |= {key.removesuffix("weight") + part: x for part, x in nf4(tensor, nested).items()}
        else:
            found[key] = tensor
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_a_flux_in_the_layout_of_lllyasviel_is_the_model_of_its_values(nested: bool, tmp_path: Path) -> None:
    """flux1-dev-bnb-nf4 (quantized scales) and its version 2 (plain scales): a whole checkpoint."""
    tensors = dict(FAMILIES["flux_dev"].file())
    packed_file = quantized(tensors, (f"{UNET}double_blocks.", f"{UNET}single_blocks."), nested)
    save_file({key: x.contiguous() for key, x in packed_file.items()}, tmp_path / "nf4.safetensors")
    values = {**tensors, **{
        key: x.unpack(torch.float32) for key, x in load(packed_file).items() if isinstance(x, PackedWeight)
    }}  # fmt: skip
    save_file({key: x.contiguous() for key, x in values.items()}, tmp_path / "values.safetensors")
    packed, plain = (open_checkpoint(tmp_path / f"{name}.safetensors") for name in ("nf4", "values"))
    assert packed.family.name == plain.family.name == "flux_dev"
    counted = packed.quantization(Role.DIFFUSION_MODEL)
    assert counted["bitsandbytes_nf4"] >= 8
    ours = packed.build(Role.DIFFUSION_MODEL).module.state_dict()
    theirs = plain.build(Role.DIFFUSION_MODEL).module.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        found = ours[key].unpack(torch.float32) if isinstance(ours[key], PackedWeight) else ours[key]
        torch.testing.assert_close(found.float(), value.float(), rtol=0.01 if nested else 0, atol=0, msg=key)
    save_checkpoint(packed, tmp_path / "again.safetensors")
    before, after = load_file(tmp_path / "nf4.safetensors"), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_folder_of_diffusers_with_a_4_bit_transformer_is_the_model_of_its_values(tmp_path: Path) -> None:
    """As diffusers saves a model that bitsandbytes has quantized: described in the configuration, too."""
    family = FAMILIES["flux_dev"]
    save_file(family.file(), tmp_path / "whole.safetensors")
    write_tokenizers(tmp_path, family)
    save_diffusers(open_checkpoint(tmp_path / "whole.safetensors"), tmp_path / "folder")
    weights = tmp_path / "folder/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    packed = quantized(tensors, ("transformer_blocks.", "single_transformer_blocks."), True)
    save_file(packed, weights, metadata={"format": "pt"})
    config = json.loads((weights.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (weights.parent / "config.json").write_text(json.dumps(config))
    folder = open_checkpoint(tmp_path / "folder")
    assert folder.family.name == "flux_dev"
    assert folder.quantization(Role.DIFFUSION_MODEL)["bitsandbytes_nf4"] >= 8
    built = folder.build(Role.DIFFUSION_MODEL).module.state_dict()
    for key, value in load(packed).items():
        if isinstance(value, PackedWeight):
            assert isinstance(built[key], PackedWeight)
            assert torch.equal(built[key].unpack(torch.float32), value.unpack(torch.float32))


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("nf4")
    tensors = load_file(SHAPES / "models" / "shapes.safetensors")
    packed = quantized(tensors, (f"{UNET}input_blocks.", f"{UNET}middle_block.", f"{UNET}output_blocks."), True)
    save_file(packed, folder / "packed.safetensors")
    values = load(packed)
    save_file(
        {k: x.unpack(torch.float32) if isinstance(x, PackedWeight) else x for k, x in values.items()},
        folder / "values.safetensors",
    )
    return Catalog([folder], [SHAPES / "loras"], "sim")


def test_the_image_is_correct_and_that_of_the_values_with_a_lora(catalog: Catalog) -> None:
    image = draw(catalog, "packed", "sim", 0)
    assert matches(read_image(image), PROMPT)
    lora = next(path.stem for path in sorted((SHAPES / "loras").glob("*.safetensors")))
    with_lora = draw(catalog, "packed", "sim", lora=lora)
    assert np.abs(image.astype(int) - with_lora).max() > 30
    assert np.abs(draw(catalog, "values", "sim", lora=lora).astype(int) - with_lora).max() <= 2


def test_the_plan_counts_packed_bytes(catalog: Catalog) -> None:
    packed, plain = (
        catalog.components(catalog.find_model(name))[Role.DIFFUSION_MODEL].upload_bytes for name in ("packed", "values")
    )
    assert 0 < packed < plain
