"""One checkpoint as a file, as shards, and as both kinds of PyTorch file: recognised, described and built the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import UnsafeFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("forms") / "tiny.safetensors")


@pytest.fixture(scope="module")
def shards(whole: Path) -> Path:
    """Its tensors dealt to three files in turn, so that every component is in all of them."""
    tensors = load_file(whole)
    places = {key: f"tiny-{number % 3}.safetensors" for number, key in enumerate(sorted(tensors))}
    for name in set(places.values()):
        save_file({key: tensors[key] for key in tensors if places[key] == name}, whole.parent / name)
    index = whole.parent / "tiny.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("role", [Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE])
def test_components_from_shards_equal_those_from_one_file(whole: Path, shards: Path, role: Role) -> None:
    expected = open_checkpoint(whole).build(role).module.state_dict()
    found = open_checkpoint(shards).build(role).module.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert len(storages) >= 3, "views of each of the three files"
    assert len(byte_ranges(FilePart(str(shards), role))) == 3


def test_shards_are_described_as_the_file_is(whole: Path, shards: Path) -> None:
    one, three = describe(whole), describe(shards)
    assert (three.family, three.components, three.other_bytes) == (one.family, one.components, one.other_bytes)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_torch_file_holds_the_same(whole: Path, tmp_path: Path, new: bool) -> None:
    expected = load_file(whole)
    path = tmp_path / "tiny.ckpt"
    torch.save({"state_dict": expected, "global_step": 7}, path, _use_new_zipfile_serialization=new)
    with pytest.raises(UnsafeFile):
        open_checkpoint(path)
    mapped = MappedFile.open(path, allow_pickle=True)
    assert detect(mapped.header) == detect(MappedFile.open(whole).header)
    assert mapped.header.shapes == {key: tuple(tensor.shape) for key, tensor in expected.items()}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in mapped.tensors().items())
    assert mapped.header.metadata == {"global_step": "7"}
