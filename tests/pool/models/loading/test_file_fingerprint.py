"""Fingerprints of files: equal for copies, different for other weights, and an error that names the missing parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role

SHAPES = Path("examples/shapes")


def checkpoint() -> Path:
    return max(SHAPES.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_a_copy_has_the_same_fingerprint_and_other_weights_another(tmp_path: Path) -> None:
    """The same names, shapes and header with other bytes of one component: only that component differs."""
    original = checkpoint()
    copy, changed = tmp_path / "copy.safetensors", tmp_path / "changed.safetensors"
    for path in (copy, changed):
        shutil.copyfile(original, path)
    header = read_single_header(original)
    vae = [entry for name, entry in header.tensors.items() if name.startswith("first_stage_model.")]
    assert vae, "the example model has a VAE in its file"
    with changed.open("r+b") as file:
        for entry in vae:
            file.seek(entry.begin)
            file.write(b"\x3c" * (entry.end - entry.begin))
    for role in (Role.DIFFUSION_MODEL, Role.VAE):
        expected = fingerprint(FilePart(str(original), role))
        assert fingerprint(FilePart(str(copy), role)) == expected
        assert (fingerprint(FilePart(str(changed), role)) == expected) == (role is Role.DIFFUSION_MODEL), role


def test_another_header_or_size_is_another_file(tmp_path: Path) -> None:
    """Its SHA-256 is another one, too: it need not be read completely to know that."""
    original = checkpoint()
    expected = fingerprint(FilePart(str(original), Role.DIFFUSION_MODEL))
    annotated, longer = tmp_path / "annotated.safetensors", tmp_path / "longer.safetensors"
    save_file(load_file(original), annotated, metadata={"comment": "the same weights"})
    assert fingerprint(FilePart(str(annotated), Role.DIFFUSION_MODEL)) != expected
    weights = tmp_path / "weights.pth"
    weights.write_bytes(bytes(200_000))
    before = fingerprint(FilePart(str(weights)))
    longer.write_bytes(bytes(200_001))
    assert fingerprint(FilePart(str(longer))) != before


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
