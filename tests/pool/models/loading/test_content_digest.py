"""Digests of components by content: the bytes of each tensor, however a file is read, and what else sets components
apart."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.registry.hashes import hash_file
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.weights_file import read_part
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.content_digest import DIGEST_BYTES, RangeDigests, component_digests
from modelpool.pool.values.specs.spec import Role
from tests.pool.separate import split_up, write_atomically


def digests_of(path: str) -> dict[ByteRange, bytes]:
    found = RangeDigests.of(read_part(path, allow_pickle=True))
    assert found is not None
    hash_file(path, False, tensors=found)
    return found.digests()


def test_each_range_has_the_digest_of_its_bytes_however_the_file_is_cut() -> None:
    dice = random.Random(3)
    data = dice.randbytes(5_000)
    ranges = [(0, 7), (7, 7), (7, 1_000), (1_200, 1_201), (1_201, 4_999)]
    expected = {r: hashlib.sha256(data[r[0] : r[1]]).digest()[:DIGEST_BYTES] for r in ranges}
    for _ in range(200):
        found, place = RangeDigests(ranges), 0
        while place < len(data):
            count = dice.choice([1, 6, 7, 100, 3_000])
            found.update(memoryview(data)[place : place + count], place)
            place += count
        assert found.digests() == expected


def test_one_pass_gives_the_hash_of_the_file_too(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "whole.safetensors", "tiny_sd1")
    header = read_part(str(path))
    tensors = RangeDigests.of(header)
    assert tensors is not None
    found = hash_file(path, True, tensors=tensors)
    data = path.read_bytes()
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert found == hash_file(path, True)
    for (begin, end), digest in tensors.digests().items():
        assert digest == hashlib.sha256(data[begin:end]).digest()[:DIGEST_BYTES]
    assert len(tensors.digests()) == len(header.tensors)


def test_tensors_that_share_bytes_have_no_digests(tmp_path: Path) -> None:
    """A pickle may have any number of views of one storage: to hash each would take as long as its maker likes."""
    whole = torch.arange(64, dtype=torch.float16)
    torch.save({"a": whole[:40], "b": whole[20:]}, tmp_path / "views.pt")
    assert RangeDigests.of(read_part(str(tmp_path / "views.pt"), allow_pickle=True)) is None


def _digests(path: Path) -> dict[Role, str]:
    found = open_checkpoint(path)
    return component_digests(found.family, found.header, found.layers, digests_of)


def test_a_component_is_known_by_its_bytes_its_types_and_its_names(tmp_path: Path) -> None:
    whole = write_atomically(tmp_path / "whole.safetensors", "tiny_sd1")
    before, tensors = _digests(whole), load_file(whole)
    assert len(set(before.values())) == len(before) == 3
    key = "first_stage_model.decoder.conv_in.bias"
    one_bit = tensors[key].clone()
    one_bit.view(torch.uint8)[0] ^= 1
    for changed in ({key: one_bit}, {key: tensors[key].to(torch.float32)}):
        save_file({**tensors, **changed}, tmp_path / "changed.safetensors")
        after = _digests(tmp_path / "changed.safetensors")
        assert {role for role in before if before[role] != after[role]} == {Role.VAE}
    # leftovers of training, tables and metadata are no part of any component
    more = {"model_ema.decay": torch.ones(1), "first_stage_model.loss.logvar": torch.ones(1)}
    save_file({**tensors, **more}, tmp_path / "more.safetensors", metadata={"title": "other"})
    assert _digests(tmp_path / "more.safetensors") == before


def test_a_file_of_its_own_has_the_digest_of_the_whole_file_s_part(tmp_path: Path) -> None:
    whole = write_atomically(tmp_path / "whole.safetensors", "tiny_sdxl")
    parts = split_up(whole, "tiny_sdxl", tmp_path)
    said = {
        "format": 1,
        "diffusion_model": f"unet/{parts['unet'].name}",
        "vae": f"vae/{parts['vae'].name}",
        "text_encoders": [f"clip/{parts[name].name}" for name in ("clip_l", "clip_g")],
    }
    (tmp_path / "apart.model.json").write_text(json.dumps(said))
    assert _digests(tmp_path / "apart.model.json") == _digests(whole)
