"""A model that is split over several GGUF files is one checkpoint, which its first part stands for; parts that are
missing, or another model's, are refused by their names."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import gguf
import pytest
import torch

from modelpool.pool.catalog.registry.changes import add_location, hash_all, unhashed
from modelpool.pool.catalog.registry.folder_scan import FileForm, ModelLocation, scan_locations, weights_file
from modelpool.pool.catalog.registry.hashes import FileHashes
from modelpool.pool.catalog.registry.weight_file_names import without_suffix
from modelpool.pool.files.formats.gguf_header import read_gguf_header
from modelpool.pool.files.formats.gguf_parts import MAX_PARTS, is_split, part_name, parts_of
from modelpool.pool.files.formats.weights_file import files_of, read_single_header
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.models.loading.recognition_input import recognise_folder
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture, UnsafeFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.file_hash import file_sha256, weights_sha256
from modelpool.pool.weights.quant.mapped_file import MappedFile, find_non_finite
from tests.pool.catalog.registry.weights import make_registry, no_wait
from tests.pool.files.formats.gguf_files import rounded, write_gguf

NAMES = tuple(f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3))
TENSORS = {
    "blk.0.attn_q.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(1)),
    "blk.0.attn_k.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(2)),
    "conv.weight": torch.randn(4, 32, 3, 3, generator=torch.Generator().manual_seed(3)),
    "a.bias": torch.arange(3.0),
    "blk.0.attn_v.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(4)),
}


def write(folder: Path, architecture: str = "test", seed: float = 0.0) -> Path:
    """A model in three parts, as the `gguf` package splits it; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor + seed for name, tensor in TENSORS.items()}
    entries = {
        "general.name": "split",
        f"{architecture}.attention.head_count": 2,
        f"{architecture}.attention.head_count_kv": 4,
    }
    write_gguf(folder / "model.gguf", tensors, architecture=architecture, entries=entries, part_tensors=2)
    assert sorted(path.name for path in folder.glob("model*.gguf")) == list(NAMES)
    return folder / NAMES[0]


def values(mapped: MappedFile, name: str) -> torch.Tensor:
    found = mapped.tensor(name)
    return found.unpack(torch.float32) if isinstance(found, PackedWeight) else found


def test_parts_are_read_as_one_file(tmp_path: Path) -> None:
    """Also the shapes of convolutions, which the first part says for all."""
    first = write(tmp_path)
    mapped = MappedFile.open(first)
    assert mapped.header.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, expected in rounded(TENSORS).items():
        assert torch.equal(values(mapped, name), expected), name
    assert mapped.header.path == str(first)
    assert mapped.header.files == {str(tmp_path / n): (tmp_path / n).stat().st_size for n in NAMES}
    assert mapped.header.file_bytes == sum(mapped.header.files.values())
    assert mapped.header.path_of("blk.0.attn_v.weight") == str(tmp_path / NAMES[2])
    assert mapped.header.metadata["general.name"] == "split"
    assert find_non_finite(mapped) == ()


def test_what_the_first_part_says_it_is_holds_for_all(tmp_path: Path) -> None:
    """The others do not say it: names of transformers, and the order of rows, come from the first."""
    found = read_gguf_header(str(write(tmp_path, "qwen3"))).tensors
    assert "model.layers.0.self_attn.v_proj.weight" in found


def test_a_first_part_may_hold_no_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(
        tmp_path / "model.gguf", "test", split_max_tensors=2, small_first_shard=True
    )  # as llama.cpp's option --no-tensor-first-split does
    for name in ("a", "b", "c"):
        writer.add_tensor(name, TENSORS["a.bias"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    mapped = MappedFile.open(tmp_path / NAMES[0])
    assert mapped.header.path_of("a") == str(tmp_path / NAMES[1])
    assert torch.equal(mapped.tensor("c"), TENSORS["a.bias"])


def test_the_files_and_hashes_are_those_of_all_parts(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert files_of(one) == tuple(str(tmp_path / "one" / name) for name in NAMES)
    assert weights_sha256(one) == weights_sha256(other) != file_sha256(one)
    assert set(byte_ranges(FilePart(str(one)))) == set(files_of(one))
    for name in NAMES:  # each part counts
        write(tmp_path / "other")
        changed = write(tmp_path / "changed", seed=1.0).with_name(name)
        shutil.copy(changed, tmp_path / "other" / name)
        assert weights_sha256(other) != weights_sha256(one), name


@pytest.mark.parametrize("missing", NAMES[1:])
def test_a_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    first = write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CorruptFile, match=rf"00001-of-00003\.gguf: part .* of 3 is missing, expected .*{missing}"):
        read_weights_header(first)


def test_a_later_part_says_which_to_open(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CorruptFile, match=rf"is part 2 of 3, expected the first part, .*{NAMES[0]}"):
        read_weights_header(tmp_path / NAMES[1])


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path)
    shutil.copy(tmp_path / NAMES[2], tmp_path / NAMES[1])
    with pytest.raises(CorruptFile, match=rf"{NAMES[1]}: split\.no is 2, expected 1: it is no part of .*{NAMES[0]}"):
        read_weights_header(first)
    write_gguf(tmp_path / NAMES[1], {"a": torch.ones(3)}, architecture="test")
    with pytest.raises(CorruptFile, match=rf"{NAMES[1]}: split\.no is nothing, expected 1"):
        read_weights_header(first)
    more = {**TENSORS, "x.bias": torch.ones(3)}
    (tmp_path / "more").mkdir()
    write_gguf(tmp_path / "more" / "model.gguf", more, architecture="test", part_tensors=2)
    shutil.copy(tmp_path / "more" / NAMES[1], tmp_path / NAMES[1])
    with pytest.raises(CorruptFile, match=rf"{NAMES[1]}: split\.tensors\.count is 6, expected 5"):
        read_weights_header(first)


def test_parts_with_fewer_tensors_than_they_say_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path)
    for path in map(Path, files_of(first)):
        data = bytearray(path.read_bytes())
        key = b"split.tensors.count"
        value = data.index(key) + len(key) + 4  # behind the kind of the value
        assert data[value] == len(TENSORS)
        data[value] += 1
        path.write_bytes(data)
    with pytest.raises(CorruptFile, match="found 5 tensors in its 3 parts, expected 6"):
        read_weights_header(first)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    """Parts of a model of other names that has as many tensors."""
    first = write(tmp_path)
    other = {{"conv.weight": "a.bias", "a.bias": "conv.weight"}.get(n, n): t for n, t in reversed(TENSORS.items())}
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "model.gguf", other, architecture="test", part_tensors=2)
    shutil.copy(tmp_path / "other" / NAMES[2], tmp_path / NAMES[2])
    with pytest.raises(CorruptFile, match=rf"{NAMES[2]}: tensor .*attn_q\.weight' is in .*{NAMES[0]} too"):
        read_weights_header(first)


def test_names_that_do_not_say_what_the_files_do_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path)
    renamed = shutil.copy(first, tmp_path / "whole.gguf")
    with pytest.raises(
        CorruptFile, match=r"whole\.gguf: is one of 3 parts and is not named as one, expected NAME-00001-of"
    ):
        read_weights_header(renamed)
    write_gguf(tmp_path / "b-00001-of-00002.gguf", {"a": torch.ones(3)})
    with pytest.raises(CorruptFile, match="named as part 1 of 2, but its header says that it is complete"):
        read_weights_header(tmp_path / "b-00001-of-00002.gguf")
    said = {"split.no": 0, "split.count": 65535, "split.tensors.count": 1}
    write_gguf(tmp_path / "b-00001-of-65535.gguf", {"a": torch.ones(3)}, entries=said)
    with pytest.raises(CorruptFile, match="is one of 65535 parts, expected at most 4096"):
        read_weights_header(tmp_path / "b-00001-of-65535.gguf")
    write_gguf(tmp_path / "c-00001-of-00001.gguf", {"a": torch.ones(3)})
    assert read_weights_header(tmp_path / "c-00001-of-00001.gguf").shapes == {"a": (3,)}


def test_a_part_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "model")
    (tmp_path / "model" / NAMES[1]).rename(tmp_path / "secret")
    (tmp_path / "model" / NAMES[1]).symlink_to(tmp_path / "secret")
    for read in (read_weights_header, files_of, weights_sha256):  # nor is what it leads to hashed
        with pytest.raises(UnsafeFile, match=rf"{NAMES[1]}: a link that leads to .*secret, expected a file in"):
            read(first)
    assert scan_locations([ModelLocation(tmp_path / "model")]).files[0].members == (first,)


def test_what_headers_may_have_they_have_together(tmp_path: Path) -> None:
    """Four thousand parts of the largest header would be read for hours."""
    texts = {"tokenizer.ggml.tokens": ["", "a"] * 300_000}
    for number in range(4):
        said = {"split.no": number, "split.count": 4, "split.tensors.count": 4, **texts}
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00004.gguf", {f"t{number}": torch.ones(3)}, entries=said)
    with pytest.raises(
        CorruptFile, match=r"m-00004-of-00004\.gguf: found a count of 600000 at byte .*expected at most"
    ):
        read_weights_header(tmp_path / "m-00001-of-00004.gguf")
    read_single_header(str(tmp_path / "m-00004-of-00004.gguf"))


def test_names(tmp_path: Path) -> None:
    assert is_split(tmp_path / NAMES[0])
    assert parts_of("a/m-00002-of-00002.GGUF") == ("a/m-00001-of-00002.GGUF", "a/m-00002-of-00002.GGUF")
    assert parts_of("a/m.gguf") == ("a/m.gguf",)
    assert without_suffix(NAMES[0]) == "model"
    for name in (
        "m.gguf",
        "m-1-of-2.gguf",
        "m-00003-of-00002.gguf",
        "m-00000-of-00002.gguf",
        f"m-00001-of-{9**5}.gguf",
    ):
        assert part_name(name) is None, name
    assert part_name(f"m-00001-of-{MAX_PARTS + 1:05}.gguf") is None


def test_a_damaged_part_is_a_typed_error_or_a_file_whose_tensors_can_be_had(tmp_path: Path) -> None:
    first, random, opened = write(tmp_path, "llama"), Random(6), 0
    wholes = [(path, path.read_bytes()) for path in map(Path, files_of(first))]
    for _ in range(400):
        path, whole = random.choice(wholes)
        data = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            data[random.randrange(4, 420)] = random.choice((0, 1, 2, 8, 255, random.randrange(256)))
        path.write_bytes(data[: random.choice((len(data), len(data), random.randrange(len(data))))])
        try:
            mapped = MappedFile.open(first)
        except (CorruptFile, UnknownArchitecture):
            continue
        finally:
            path.write_bytes(whole)
        opened += 1
        for name, entry in mapped.header.tensors.items():
            assert tuple(values(mapped, name).shape) == entry.shape
    assert 15 < opened < 385, "both happen"


def test_folders_are_searched_for_the_model_and_not_for_its_parts(tmp_path: Path) -> None:
    first = write(tmp_path)
    shutil.copy(tmp_path / NAMES[1], tmp_path / "lost-00002-of-00003.gguf")
    found = scan_locations([ModelLocation(tmp_path)])
    assert [(file.path, file.form) for file in found.files] == [(first, FileForm.SHARDED)]
    assert [path.name for path in found.files[0].members] == list(NAMES)
    assert [(r.path.name, "lost-00001-of-00003.gguf, is missing" in r.problem) for r in found.refused] == [
        ("lost-00002-of-00003.gguf", True)
    ]
    before = weights_file(first).fingerprint
    with (tmp_path / NAMES[2]).open("ab") as file:
        file.write(b"more")
    assert weights_file(first).fingerprint != before, "a change of any part is one of the model"
    (tmp_path / "lost-00002-of-00003.gguf").unlink()
    assert list(recognise_folder(tmp_path).files) == [NAMES[0]]


def test_the_registry_names_and_hashes_the_model_once(tmp_path: Path) -> None:
    """Each part's tensors have digests, by which components are seen to be equal, and are hashed once."""
    first = write(tmp_path / "models")
    registry = make_registry(tmp_path / "state")
    add_location(registry, tmp_path / "models")
    assert all(isinstance(found, FileHashes) for _, found in hash_all(registry, unhashed(registry), wait=no_wait))
    [entry] = registry.listing().entries
    assert (entry.name, entry.file.path, entry.facts.tensors) == ("model", first, len(TENSORS))
    assert "in 3 parts" in entry.facts.title
    header = read_gguf_header(str(first))
    for name, tensor in header.tensors.items():
        found = registry.digests(header.path_of(name))
        assert found is not None
        assert (tensor.begin, tensor.end) in found, name
