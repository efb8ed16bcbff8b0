"""`modelpool inspect` of GGUF files of text encoders: named and measured, whole or split; a later part says which to
give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.actors.cli.conftest import Command
from tests.pool.files.formats.gguf_files import write_gguf
from tests.pool.models.components.text.gguf_encoders import PUBLISHED, published


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_text_encoder_of_a_published_size_is_named(command: Command, tmp_path: Path, name: str) -> None:
    [found] = command("inspect", str(published(tmp_path / "text.gguf", name)), "--json").objects
    [component] = found["components"]
    assert (component["kind"], component["name"]) == ("text encoder", name)
    assert component["dtypes"].keys() == {"Q4_K", "F32"}


def test_a_split_file_is_given_by_its_first_part(command: Command, tmp_path: Path) -> None:
    tensors = {f"blk.{i}.attn_v.weight": torch.ones(8, 32) for i in range(3)}
    write_gguf(tmp_path / "text.gguf", tensors, architecture="qwen3", part_tensors=1)
    first, second, third = sorted(tmp_path.glob("text-*.gguf"))
    assert "its 3 tensors match no known architecture" in command("inspect", str(first)).err
    ended = command("inspect", str(second))
    assert ended.code == 2
    assert f"is part 2 of 3, expected the first part, {first}" in ended.err
    third.unlink()
    assert f"part 3 of 3 is missing, expected {third} in the same folder" in command("inspect", str(first)).err
