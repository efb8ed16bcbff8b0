"""Fingerprints of files: equal for copies, different for other weights, and an error that names what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.loading.file_fingerprint import fingerprint
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import Role

SHAPES = Path("examples/shapes")


def checkpoint() -> Path:
    return max(SHAPES.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_a_copy_has_the_same_fingerprint_and_other_weights_another(tmp_path: Path) -> None:
    """The same shapes and names with one component trained further: only that component differs."""
    original = checkpoint()
    copy, trained = tmp_path / "copy.safetensors", tmp_path / "trained.safetensors"
    shutil.copyfile(original, copy)
    tensors = load_file(original)
    vae = [name for name in tensors if name.startswith("first_stage_model.")]
    assert vae, "the example model has a VAE in its file"
    save_file({name: t + 0.01 if name in vae else t for name, t in tensors.items()}, trained)
    for role in (Role.DIFFUSION_MODEL, Role.VAE):
        expected = fingerprint(FilePart(str(original), role))
        assert fingerprint(FilePart(str(copy), role)) == expected
        assert (fingerprint(FilePart(str(trained), role)) == expected) == (role is Role.DIFFUSION_MODEL), role


def test_a_small_file_is_covered_completely(tmp_path: Path) -> None:
    for size in (1, 100, 5000, 70_000):
        path = tmp_path / f"{size}.safetensors"
        path.write_bytes(bytes(size))
        before = fingerprint(FilePart(str(path)))
        path.write_bytes(bytes(size - 1) + b"x")
        assert fingerprint(FilePart(str(path))) != before, size


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for part in (FilePart(str(tmp_path / "no.safetensors"), Role.VAE), FilePart(str(tmp_path / "lora.safetensors"))):
        with pytest.raises(CorruptFile, match=part.path):
            fingerprint(part)


def test_a_truncated_file_is_no_copy(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.zeros(1000), "b": torch.ones(1000)}, whole)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    assert fingerprint(FilePart(str(cut))) != fingerprint(FilePart(str(whole)))
