"""`modelpool convert`: dtypes, folders of diffusers, pickles; and that the model itself is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.actors.cli.conftest import Command
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def model(tmp_path: Path, command: Command) -> Path:
    """A model where the command runs."""
    (tmp_path / "models").mkdir()
    return write_tiny_checkpoint(tmp_path / "models" / "toy.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
def test_weights_get_the_dtype(command: Command, model: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    before = model.read_bytes()
    ended = command("convert", "toy", "-o", "out.safetensors", "--dtype", name)
    assert ended.code == 0
    assert "out.safetensors is written: 503 tensors" in ended.err
    assert "patched" not in ended.err
    converted = load_file(tmp_path / "out.safetensors")
    for key, value in load_file(model).items():
        assert torch.equal(converted[key], value.to(dtype) if value.is_floating_point() else value), key
    assert model.read_bytes() == before
    if name == "fp16":
        assert (tmp_path / "out.safetensors").read_bytes() == before


def test_a_folder_of_diffusers_is_replaced_with_force_and_another_is_not(command: Command, tmp_path: Path) -> None:
    arguments = ("convert", "toy", "--to", "diffusers", "-o")
    assert command(*arguments, "folder").code == 0
    assert (tmp_path / "folder" / "unet" / "config.json").is_file()
    assert command(*arguments, "folder").code == 2
    assert command(*arguments, "folder", "--force").code == 0
    refused = command(*arguments, "models", "--force")
    assert refused.code == 2
    assert "models: holds other things" in refused.err
    assert (tmp_path / "models" / "toy.safetensors").is_file()


def test_a_pickle_becomes_safetensors_where_it_is_allowed(command: Command, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model)
    torch.save({"state_dict": tensors}, tmp_path / "old.ckpt")
    assert command("convert", "old.ckpt", "-o", "new.safetensors").code == 2
    assert not (tmp_path / "new.safetensors").exists()
    ended = command("convert", "old.ckpt", "-o", "new.safetensors", "--allow-pickle")
    assert ended.code == 0, ended.err
    converted = load_file(tmp_path / "new.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[key], value) for key, value in tensors.items())
