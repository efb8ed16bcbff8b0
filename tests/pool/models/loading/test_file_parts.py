"""The byte ranges of a component hold its tensors, and next to nothing of the others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.files.formats import byte_ranges as ranges_module
from modelpool.pool.files.formats.byte_ranges import MIN_GAP_BYTES
from modelpool.pool.files.formats.safetensors_file import read_header
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_hollow_checkpoint

ROLES = (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE)
PREFIXES = {
    Role.TEXT_ENCODER: "cond_stage_model.",
    Role.DIFFUSION_MODEL: "model.diffusion_model.",
    Role.VAE: "first_stage_model.",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of SD 1.5 but its bytes."""
    return write_hollow_checkpoint(tmp_path_factory.mktemp("hollow") / "sd15.safetensors", layouts.sd15())


@pytest.mark.parametrize("role", ROLES)
def test_every_tensor_of_a_component_is_within_its_ranges(checkpoint: Path, role: Role) -> None:
    ranges = byte_ranges(FilePart(str(checkpoint), role))[str(checkpoint)]
    assert ranges == tuple(sorted(ranges))
    for entry in read_header(checkpoint).tensors.values():
        if entry.name.startswith(PREFIXES[role]) and not entry.name.endswith(".position_ids"):
            assert any(begin <= entry.begin and entry.end <= end for begin, end in ranges), entry.name


@pytest.mark.parametrize("role", ROLES)
def test_they_hold_no_more_of_others_than_gaps(checkpoint: Path, role: Role) -> None:
    tensors = read_header(checkpoint).tensors.values()
    own_bytes = sum(entry.storage_bytes for entry in tensors if entry.name.startswith(PREFIXES[role]))
    ranges = byte_ranges(FilePart(str(checkpoint), role))[str(checkpoint)]
    assert sum(end - begin for begin, end in ranges) <= own_bytes + MIN_GAP_BYTES * len(ranges)


def test_tensors_of_two_components_in_turns_are_read_apart(tmp_path: Path) -> None:
    """Where what lies between is large."""
    layout = layouts.tiny_sd1()
    tensors = {key: torch.zeros(shape, dtype=torch.float16) for key, shape in layout.items()}
    assert len(tensors) > 100
    path = tmp_path / "tiny.safetensors"
    save_file(tensors, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_module, "MIN_GAP_BYTES", 1)
        ranges = {role: byte_ranges(FilePart(str(path), role))[str(path)] for role in ROLES}
    ends = sorted(one for of_role in ranges.values() for one in of_role)
    assert all(first[1] <= second[0] for first, second in pairwise(ends)), "no byte is of two"


def test_a_part_without_a_role_is_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_bytes(b"x" * 12345)
    assert byte_ranges(FilePart(str(path))) == {str(path): ((0, 12345),)}


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(CorruptFile, match=r"broken\.safetensors"):
        byte_ranges(FilePart(str(path), Role.VAE))
