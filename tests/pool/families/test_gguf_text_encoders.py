"""Families whose text encoder is a GGUF file: their texts are the texts of the values that the file stands for, with
the tokenizer that is inside it, whether it is one file or split; and components are known by what they compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

from modelpool.pool.catalog.registry.hashes import hash_file
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.models.components.text.build_text_encoder import facts_named
from modelpool.pool.models.loading import assembled_checkpoint as assembled
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.content_digest import RangeDigests, component_digests
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.text.gguf_tokenizer import gguf_tokenizer
from modelpool.pool.models.text.text_tokenizer import KINDS, TokenizerMissing
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.files.formats.gguf_files import rounded
from tests.pool.models.components.text.gguf_encoders import ARCHITECTURES, written
from tests.pool.models.text.gguf_vocabularies import entries_of
from tests.pool.models.text.tiny_tokenizers import tiny

#: a family of each kind, and its text encoder that is a GGUF file
ENCODERS = {"lumina2": "gemma2_2b", "hunyuan_video": "llama3_8b", "hidream_i1": "llama3_8b", "flux2": "mistral3_24b"}
FAMILY = pytest.mark.parametrize("family", ENCODERS)


@pytest.fixture(autouse=True)
def _tiny_encoders_are_known(request: pytest.FixtureRequest) -> Iterator[None]:
    """Llama and Mistral are recognised by their sizes, which tiny ones have not: here the test says which it is."""
    told = getattr(request.node, "callspec", None)
    family = told.params["family"] if told else ""
    recognise = assembled.recognise_text_encoder

    def found(shapes: Any) -> Any:
        known = recognise(shapes)
        is_language = known is None and any(key.startswith("model.layers.") for key in shapes)
        return facts_named(ENCODERS[family]) if family and is_language else known

    with mock.patch.object(assembled, "recognise_text_encoder", found):
        yield


def prefix_of(family: str) -> str:
    return f"text_encoders.{ENCODERS[family]}.transformer."


def write_packed(folder: Path, family: str, *, entries: dict[str, Any] | None = None, part_tensors: int = 0) -> Whole:
    """The tiny family with one text encoder as GGUF, with its tokenizer inside, and no other beside."""
    folder.mkdir(exist_ok=True)
    member, row = ENCODERS[family], ALL_FAMILIES[family]
    base = {key: x for key, x in row.file((member,)).items() if not key.endswith("spiece_model")}
    save_file(base, folder / "base.safetensors")
    said = entries_of(tiny(KINDS[member])) if entries is None else entries
    written(
        folder / "text.gguf", row.encoders[member][0](), ARCHITECTURES[member], entries=said, part_tensors=part_tensors
    )
    [text] = [path.name for path in folder.glob("text*.gguf") if not part_tensors or "00001-of" in path.name]
    described = {"format": 1, "checkpoint": "base.safetensors", "text_encoders": [text]}
    (folder / "tiny.model.json").write_text(json.dumps(described))
    return Whole(folder, row, (member,), write=False)


def write_plain(folder: Path, family: str, packed: Path) -> Whole:
    """The whole tiny file with the values of the blocks, and the tokenizer that `packed` has inside."""
    folder.mkdir()
    member, row = ENCODERS[family], ALL_FAMILIES[family]
    tensors = row.file()
    for key, value in rounded({k: x for k, x in tensors.items() if k.startswith(prefix_of(family))}).items():
        is_norm = key.endswith("norm.weight") and ARCHITECTURES[member].startswith("gemma")
        tensors[key] = (value + 1) - 1 if is_norm else value
    save_file(tensors, folder / "tiny.safetensors")
    whole = Whole(folder, row, write=False)
    own = gguf_tokenizer(str(packed), KINDS[member], "")
    (folder / f"tokenizer_{member}" / "tokenizer.json").write_text(own.to_str())
    return whole


def texts_of(whole: Whole) -> list[Any]:
    found: list[Any] = []
    for text in whole.texts():
        assert isinstance(text, Encoded)
        found += [text.context_LD, *(value for _, value in sorted(text.others.items()))]
        found += [] if text.pooled_V is None else [text.pooled_V]
    whole.engine.close()
    return found


@FAMILY
def test_its_texts_are_those_of_the_values_in_the_file(family: str, tmp_path: Path) -> None:
    found = texts_of(write_packed(tmp_path / "packed", family))
    expected = texts_of(write_plain(tmp_path / "plain", family, tmp_path / "packed" / "text.gguf"))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_image_is_drawn_with_it(tmp_path: Path) -> None:
    images = []
    for whole in (
        write_packed(tmp_path / "packed", "lumina2", part_tensors=9),
        write_plain(tmp_path / "plain", "lumina2", next((tmp_path / "packed").glob("text-00001-of-*.gguf"))),
    ):
        images.append(whole.pixels(whole.latent(whole.texts())))
        whole.engine.close()
    assert np.abs(images[0].astype(int) - images[1]).max() <= 1
    assert np.ptp(images[0]) > 0


def test_without_a_tokenizer_it_says_what_to_put_where(tmp_path: Path) -> None:
    whole = write_packed(tmp_path / "packed", "lumina2", entries={})
    with pytest.raises(TokenizerMissing, match=r"found no tokens.*Put tokenizer\.json .* of google/gemma-2-2b into"):
        whole.texts()
    whole.engine.close()


@pytest.mark.parametrize("family", ["lumina2", "hunyuan_video"])
def test_it_is_saved_as_a_whole_file_in_a_plain_type(family: str, tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", family).engine.close()
    write_plain(tmp_path / "plain", family, tmp_path / "packed" / "text.gguf").engine.close()
    checkpoint = open_checkpoint(tmp_path / "packed" / "tiny.model.json")
    save_checkpoint(checkpoint, tmp_path / "saved.safetensors", dtype=torch.float32)
    saved, plain = load_file(tmp_path / "saved.safetensors"), load_file(tmp_path / "plain" / "tiny.safetensors")
    own = {key: x for key, x in plain.items() if key.startswith(prefix_of(family)) and x.is_floating_point()}
    assert own
    for key, value in own.items():
        assert torch.equal(saved[key], value), key


@FAMILY
def test_a_saved_file_reads_texts_as_its_gguf_file_does(family: str, tmp_path: Path) -> None:
    """With nothing beside it: the tokenizer, which was inside, is in the saved file."""
    packed = write_packed(tmp_path / "packed", family)
    expected = texts_of(packed)
    (tmp_path / "saved").mkdir()
    path = tmp_path / "saved" / "tiny.safetensors"
    save_checkpoint(open_checkpoint(tmp_path / "packed" / "tiny.model.json"), path, dtype=torch.float32)
    key = f"{prefix_of(family)}tokenizer_json"
    assert read_single_header(str(path)).tensors[key].dtype == "U8"
    found = texts_of(Whole(tmp_path / "saved", ALL_FAMILIES[family], (ENCODERS[family],), write=False))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    again = tmp_path / "again.safetensors"
    save_checkpoint(open_checkpoint(path), again)
    assert load_file(again).keys() == load_file(path).keys()


def test_a_tokenizer_beside_a_gguf_file_goes_before_the_one_inside(tmp_path: Path) -> None:
    """As where it is read."""
    write_packed(tmp_path / "packed", "lumina2").engine.close()
    other = Tokenizer.from_str(tiny(KINDS[ENCODERS["lumina2"]]).to_str())
    other.normalizer = normalizers.Lowercase()
    other.save(str(tmp_path / "packed" / "text.tokenizer.json"))
    path = tmp_path / "saved.safetensors"
    save_checkpoint(open_checkpoint(tmp_path / "packed" / "tiny.model.json"), path, dtype=torch.float32)
    carried = bytes(load_file(path)[f"{prefix_of('lumina2')}tokenizer_json"].tolist())
    assert json.loads(carried)["normalizer"] == {"type": "Lowercase"}


def test_without_a_tokenizer_a_gguf_file_is_saved_without(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", "lumina2", entries={}).engine.close()
    path = tmp_path / "saved.safetensors"
    save_checkpoint(open_checkpoint(tmp_path / "packed" / "tiny.model.json"), path, dtype=torch.float32)
    assert not any(key.endswith("tokenizer_json") for key in load_file(path))


def digests(path: Path) -> dict[Role, str]:
    found = open_checkpoint(path)

    def digests_of(file: str) -> dict[ByteRange, bytes]:
        ranges = RangeDigests.of(read_single_header(file))
        assert ranges is not None
        hash_file(file, False, tensors=ranges)
        return ranges.digests()

    return component_digests(found.family, found.header, found.layers, digests_of)


@pytest.mark.parametrize("family", ["hunyuan_video"])
def test_the_same_bytes_in_another_order_of_rows_are_another_component(family: str, tmp_path: Path) -> None:
    """And split over several files the same one."""
    for name, entries, parts in (
        ("whole", {}, 0),
        ("split", {}, 7),
        ("turned", {"llama.attention.head_count": 2}, 0),
    ):
        write_packed(tmp_path / name, family, entries=entries, part_tensors=parts).engine.close()
    one, split, turned = (digests(tmp_path / name / "tiny.model.json") for name in ("whole", "split", "turned"))
    assert one == split
    assert one[Role.DIFFUSION_MODEL] == turned[Role.DIFFUSION_MODEL]
    assert {role for role in one if one[role] != turned[role]} == {Role.TEXT_ENCODER_2}
