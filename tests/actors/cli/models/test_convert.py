"""`modelpool convert`: dtypes, folders of diffusers, pickles; and that the model itself is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actors.cli.conftest import Command
from tests.pool.families.tiny_transformers import FAMILIES, seeded
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora


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
    assert "written: out.safetensors (503 tensors" in ended.err
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
    assert "models: contains other files, which would be lost: toy.safetensors" in refused.err
    assert (tmp_path / "models" / "toy.safetensors").is_file()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    refused = command(*arguments, "folder", "--force")
    assert refused.code == 2
    assert "folder: contains other files, which would be lost: notes.txt; expected a new name" in refused.err
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"


def test_a_folder_of_diffusers_becomes_a_file_again(command: Command, model: Path, tmp_path: Path) -> None:
    """As `convert` and `merge` do unasked; a folder of transformers does not."""
    assert command("convert", "toy", "-o", "folder", "--to", "diffusers").code == 0
    ended = command("convert", "./folder", "-o", "again.safetensors")
    assert ended.code == 0, ended.err
    assert "written: again.safetensors (502 tensors" in ended.err
    before, after = load_file(model), load_file(tmp_path / "again.safetensors")
    assert before.keys() - after.keys() == {"cond_stage_model.transformer.text_model.embeddings.position_ids"}
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "light.safetensors")
    ended = command("merge", "./folder", "loras/light.safetensors:0.5", "-o", "merged.safetensors", "--dtype", "bf16")
    assert ended.code == 0, ended.err
    assert "6 weights patched" in ended.err
    assert {value.dtype for value in load_file(tmp_path / "merged.safetensors").values()} == {torch.bfloat16}
    family = FAMILIES["flux_dev"]
    save_file(family.file(), tmp_path / "models" / "flux.safetensors")
    assert command("convert", "flux", "-o", "other", "--to", "diffusers").code == 0
    refused = command("convert", "./other", "-o", "flux.safetensors")
    assert refused.code == 2
    assert "a folder of diffusers of Flux dev, expected to save it as a folder" in " ".join(refused.err.split())
    assert not (tmp_path / "flux.safetensors").exists()


def test_tensors_that_a_folder_has_no_place_for_are_told(command: Command, model: Path) -> None:
    """How many, and the first of them, as people and as programs read it."""
    arguments, tensors = ("convert", "toy", "--to", "diffusers", "--force", "-o", "folder"), load_file(model)
    assert "left out" not in command(*arguments).err
    [said] = command(*arguments, "--json").objects
    assert said["left_out"] == {"tensors": 0, "first": []}
    save_file({**tensors, "extra.0": torch.ones(1)}, model)
    assert "1 tensor that belongs to no component was left out: extra.0" in " ".join(command(*arguments).err.split())
    names = [f"extra.{i}" for i in range(7)]
    save_file({**tensors, **{name: torch.ones(1) for name in names}}, model)
    told = "7 tensors that belong to no component were left out: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more"
    assert told in " ".join(command(*arguments).err.split())
    [said] = command(*arguments, "--json").objects
    assert said["left_out"] == {"tensors": 7, "first": names[:5]}


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


def test_a_diffusion_model_alone_becomes_a_folder_and_what_that_lacks_is_told(command: Command, tmp_path: Path) -> None:
    """As people and as programs read it. It cannot be run so, and is refused by what makes images."""
    family = FAMILIES["flux_dev"]
    own = family.publish(seeded(family.model, 1).state_dict())
    save_file(
        {key: value.contiguous().clone() for key, value in own.items()}, tmp_path / "models" / "alone.safetensors"
    )
    ended = command("convert", "alone", "-o", "folder", "--to", "diffusers")
    assert ended.code == 0, ended.err
    assert "without text_encoder_2: the checkpoint has no t5xxl" in ended.err
    assert "without vae: the checkpoint has no VAE with latents of flux" in ended.err
    assert (tmp_path / "folder" / "transformer" / "config.json").is_file()
    again = command(
        "convert", "./models/alone.safetensors", "-o", "half", "--to", "diffusers", "--dtype", "bf16", "--json"
    )
    [said] = again.objects
    assert [lack.partition(":")[0] for lack in said["lacks"]] == [
        "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae",
    ]  # fmt: skip
    assert command("convert", "./folder", "-o", "again", "--to", "diffusers").code == 0
    assert command("convert", "./folder", "-o", "file.safetensors").code == 2
    assert command("convert", "alone", "-o", "other.safetensors").code == 0
    assert load_file(tmp_path / "other.safetensors").keys() == own.keys()
