"""`modelpool merge`: the file that it writes, what it says to people and to programs, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.actors.cli.conftest import Command
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora


@pytest.fixture(autouse=True)
def here(tmp_path: Path, command: Command) -> Path:
    """A folder with a model and LoRAs, as a person has them; the command runs in it."""
    for folder in ("models", "loras"):
        (tmp_path / folder).mkdir()
    write_tiny_checkpoint(tmp_path / "models" / "toy.safetensors")
    write_tiny_lora(tmp_path / "loras" / "light.safetensors", seed=1)
    write_tiny_lora(tmp_path / "loras" / "dark.safetensors", seed=2, text=False)
    return tmp_path


def test_loras_are_merged_at_their_strengths_in_order(command: Command, here: Path) -> None:
    ended = command("merge", "toy", "light:0.8", "loras/dark.safetensors:-0.5", "-o", "out.safetensors")
    assert ended.code == 0
    assert ended.out == ""
    assert "written: out.safetensors (503 tensors, 9.6 MiB, 6 weights patched)\n" in ended.err
    assert ended.opened == ()
    with safe_open(here / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    merged = json.loads(metadata["modelpool.merged"])
    assert [(each["name"], each["strength"]) for each in merged] == [("light", 0.8), ("dark", -0.5)]
    assert metadata["modelspec.merged_from"] == "toy, light, dark"
    before, after = load_file(here / "models" / "toy.safetensors"), load_file(here / "out.safetensors")
    assert sum(not before[key].equal(after[key]) for key in before) == 6


def test_programs_are_told_what_was_written(command: Command, here: Path) -> None:
    write_tiny_lora(here / "loras" / "odd.safetensors", seed=3)
    tensors = load_file(here / "loras" / "odd.safetensors")
    for end in ("up", "down"):
        tensors[f"lora_unet_nowhere.lora_{end}.weight"] = torch.ones(4, 4)
    save_file(tensors, here / "loras" / "odd.safetensors")
    ended = command("merge", "toy", "odd", "-o", "folder", "--to", "diffusers", "--dtype", "fp32", "--json")
    (said,) = ended.objects
    assert (said["kind"], said["path"], said["patched"]) == ("saved", "folder", 6)
    assert said["tensors"] == 502
    assert "nowhere" in said["warnings"]["odd"]
    assert "LoRA odd: 6 of 7 keys matched" in ended.err
    assert (here / "folder" / "model_index.json").is_file()


def test_a_lora_for_one_of_two_models_is_refused_where_a_model_is_one(command: Command, here: Path) -> None:
    """Found in a review: it was merged as if it were for all of it, or not at all."""
    for half in ("high", "low"):
        ended = command("merge", "toy", f"light:1:{half}", "-o", "out.safetensors")
        assert ended.code != 0
        assert (
            f"loras.noise: found '{half}', not supported by model 'toy', which has a single diffusion model"
            in ended.err
        )
    assert not (here / "out.safetensors").exists()


def test_nothing_is_written_over_without_force(command: Command, here: Path) -> None:
    (here / "out.safetensors").write_bytes(b"before")
    refused = command("merge", "toy", "light", "-o", "out.safetensors")
    assert refused.code == 2
    assert "out.safetensors: already exists; use --force to overwrite it" in refused.err
    assert (here / "out.safetensors").read_bytes() == b"before"
    assert command("merge", "toy", "light", "-o", "out.safetensors", "--force").code == 0
    assert len(load_file(here / "out.safetensors")) == 503


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["toy", "light:0", "-o", "o.safetensors"], "LORA:STRENGTH: found 'light:0', expected a strength other than 0"),
        (["toy", "light:x", "-o", "o.safetensors"], "strength: found 'x', expected a number"),
        (["toy", "none:1", "-o", "o.safetensors"], "unknown LoRA 'none'"),
        (["toy", "toy:1", "-o", "o.safetensors"], "'toy' is a checkpoint, expected a LoRA"),
        (["nobody", "light", "-o", "o.safetensors"], "unknown model 'nobody'"),
        (["toy", "light", "-o", "o.ckpt"], "found 'o.ckpt', expected a name that ends in .safetensors"),
        (["toy", "light", "-o", "no/o.safetensors"], "there is no folder no"),
        (["toy", "light", "-o", "o", "--to", "diffusers", "--ema"], "--ema: diffusers folders cannot hold EMA weights"),
        (["toy", "light:1e9", "-o", "o.safetensors"], "beyond the range of F16"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    command: Command, here: Path, arguments: list[str], expected: str
) -> None:
    before = sorted(here.rglob("*"))
    ended = command("merge", *arguments)
    assert ended.code == 2
    assert expected in ended.err
    assert sorted(path for path in here.rglob("*") if "state" not in str(path)) == before


def test_a_lora_of_another_model_is_refused(command: Command, here: Path) -> None:
    tensors = load_file(here / "loras" / "light.safetensors")
    strange = {
        key.replace("attentions_0", "attentions_9").replace("layers_", "layers_9"): v for key, v in tensors.items()
    }
    shutil.rmtree(here / "loras")
    (here / "loras").mkdir()
    save_file(strange, here / "loras" / "other.safetensors")
    ended = command("merge", "toy", "other", "-o", "o.safetensors")
    assert ended.code == 2
    assert "other" in ended.err
    assert not (here / "o.safetensors").exists()
