"""GGUF files are read strictly: what a whole file says is taken, whatever is not whole is refused at once."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch

from modelpool.pool.files.formats.gguf_header import read_gguf_header
from modelpool.pool.files.formats.gguf_names import NAMES, UNSUPPORTED
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.quant.mapped_file import MappedFile, check_finite
from tests.pool.files.formats.gguf_files import KINDS, rounded, write_gguf

NUMBERS = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with quantized and plain tensors, and a convolution whose shape ggml could not hold."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(file, "test")
    for kind in ("Q8_0", "Q4_0"):
        writer.add_tensor(f"{kind}.weight", gguf.quantize(NUMBERS, KINDS[kind]), raw_dtype=KINDS[kind])
    writer.add_tensor("conv.weight", gguf.quantize(NUMBERS, KINDS.Q8_0), raw_dtype=KINDS.Q8_0)
    writer.add_array("comfy.gguf.orig_shape.conv.weight", [2, 4, 8, 8])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "longer"])
    writer.add_string("general.name", "a name")
    writer.add_float32("some.number", 2.5)
    writer.add_tensor("plain.weight", NUMBERS)
    writer.add_tensor("half.bias", NUMBERS[0].astype(np.float16))
    writer.add_tensor("brain.weight", gguf.quantize(NUMBERS, KINDS.BF16), raw_dtype=KINDS.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_file_opens_as_views(path: Path) -> None:
    opened = MappedFile.open(path)
    assert opened.header.metadata["general.architecture"] == "test"
    assert opened.header.metadata["some.number"] == "2.5"
    for kind in ("Q8_0", "Q4_0"):
        weight = opened.tensor(f"{kind}.weight")
        assert isinstance(weight, PackedWeight)
        assert weight.shape == (8, 64)
        expected = gguf.dequantize(gguf.quantize(NUMBERS, KINDS[kind]), KINDS[kind])
        assert torch.equal(weight.unpack(torch.float32), torch.from_numpy(expected))
        assert stored_bytes(weight) == opened.header.tensors[f"{kind}.weight"].storage_bytes
        rows = weight[2:5]
        assert isinstance(rows, PackedWeight)
        assert torch.equal(rows.unpack(torch.float32), torch.from_numpy(expected[2:5]))
        assert rows.parts["weight"].untyped_storage().data_ptr() == weight.parts["weight"].untyped_storage().data_ptr()
    assert torch.equal(opened.tensor("plain.weight"), torch.from_numpy(NUMBERS))
    assert opened.tensor("half.bias").dtype == torch.float16
    assert torch.equal(opened.tensor("brain.weight"), torch.from_numpy(NUMBERS).bfloat16())


def test_a_weight_has_the_shape_that_it_was_made_from(path: Path) -> None:
    weight, flat = (MappedFile.open(path).tensor(name) for name in ("conv.weight", "Q8_0.weight"))
    assert isinstance(weight, PackedWeight)
    assert isinstance(flat, PackedWeight)
    assert weight.shape == (2, 4, 8, 8)
    assert torch.equal(weight.unpack(torch.float32).reshape(8, 64), flat.unpack(torch.float32))


def test_what_is_no_whole_file_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CorruptFile, match="no such file"):
        read_gguf_header(str(tmp_path / "missing.gguf"))
    whole = path.read_bytes()
    for size in (*range(0, 200, 7), len(whole) // 2, len(whole) - 128):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"cut\.gguf: .*expected a complete GGUF file"):
            read_gguf_header(str(cut))


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 2**40, 10**6])
@pytest.mark.parametrize("at", [8, 16, 24])
def test_counts_that_the_file_cannot_have_cost_nothing(path: Path, tmp_path: Path, at: int, value: int) -> None:
    """Of tensors, of entries, and of the first name."""
    data = bytearray(path.read_bytes())
    data[at : at + 8] = struct.pack("<Q", value)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    begun = time.process_time()
    with pytest.raises(CorruptFile):
        read_gguf_header(str(bad))
    assert time.process_time() - begun < 1.0


def test_a_damaged_header_is_a_typed_error_or_a_file_whose_tensors_can_be_had(path: Path, tmp_path: Path) -> None:
    whole, random = path.read_bytes(), Random(4)
    header_bytes = min(entry.begin for entry in read_gguf_header(str(path)).tensors.values())
    bad, opened = tmp_path / "bad.gguf", 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(4, header_bytes)] = random.choice((0, 1, 2, 8, 255, random.randrange(256)))
        bad.write_bytes(data)
        try:
            mapped = MappedFile.open(bad)
        except (CorruptFile, UnknownArchitecture):
            continue
        opened += 1
        for name, entry in mapped.header.tensors.items():
            tensor = mapped.tensor(name)
            assert tuple(tensor.shape) == entry.shape
            assert not isinstance(tensor, PackedWeight) or tensor.unpack(torch.float32).shape == tensor.shape
    assert 50 < opened < 1450, "both happen"


def changed(path: Path, tmp_path: Path, **entries: int) -> Path:
    """A file with these entries more."""
    writer = gguf.GGUFWriter(tmp_path / "changed.gguf", "test")
    for name, value in entries.items():
        writer.add_uint32(name.replace("_", "."), value)
    writer.add_tensor("plain.weight", NUMBERS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "changed.gguf"


@pytest.mark.parametrize(
    ("entries", "message"), [({"split_count": 2}, "one of 2 parts"), ({"general_alignment": 33}, "multiple of 8")]
)
def test_what_cannot_be_run_from_one_file_is_said(
    path: Path, tmp_path: Path, entries: dict[str, int], message: str
) -> None:
    with pytest.raises(CorruptFile, match=message):
        read_gguf_header(str(changed(path, tmp_path, **entries)))


@pytest.mark.parametrize("counts", [(1 << 20, 0), (0, 1 << 20)])
def test_a_header_of_far_too_many_things_is_refused_before_they_are_read(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    bad = tmp_path / "many.gguf"
    with bad.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        file.truncate(90 << 20)
    begun = time.process_time()
    with pytest.raises(CorruptFile, match="at most"):
        read_gguf_header(str(bad))
    assert time.process_time() - begun < 1.0


def test_texts_of_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    """A file that has nothing on the disk can say that it has twelve million of none."""
    texts, bad = 1 << 20, tmp_path / "many.gguf"
    with bad.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 9))
        for number in range(9):
            file.write(struct.pack("<Q", 2) + b"a%d" % number + struct.pack("<IIQ", 9, 8, texts))
            file.seek(8 * texts, 1)
        file.truncate(file.tell())
    begun = time.process_time()
    with pytest.raises(CorruptFile, match=f"found a count of {texts} at byte .*, expected at most 0"):
        read_gguf_header(str(bad))
    assert time.process_time() - begun < 1.0


def test_a_text_where_a_number_is_expected_is_not_repeated_whole(tmp_path: Path) -> None:
    for key in ("general.alignment", "split.count"):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
        writer.add_string(key, "\x1b[2J" + "9" * 4000)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CorruptFile) as told:
            read_gguf_header(str(tmp_path / "a.gguf"))
        assert len(str(told.value)) < 1200
        assert "\x1b" not in str(told.value)


def test_heads_of_no_values_are_refused(tmp_path: Path) -> None:
    """Found: their rows could not be put in order, which nobody caught."""
    tensors = {"blk.0.attn_q.weight": torch.ones(8, 0)}
    write_gguf(tmp_path / "a.gguf", tensors, "F32", "llama", entries={"llama.attention.head_count": 2})
    with pytest.raises(
        UnknownArchitecture, match=r"attn_q\.weight': found 0 rows and llama\.attention\.head_count '2'"
    ):
        read_gguf_header(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_1"])
def test_kinds_that_are_of_no_weights_are_refused(tmp_path: Path, kind: str) -> None:
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    writer.add_tensor("a.weight", np.zeros((2, size), dtype=np.uint8), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CorruptFile, match=kind):
        read_gguf_header(str(tmp_path / "a.gguf"))


def test_rows_of_z_image_have_the_shape_that_its_model_has(tmp_path: Path) -> None:
    write_gguf(tmp_path / "z.gguf", {"cap_pad_token": torch.ones(64)}, architecture="lumina2")
    assert read_gguf_header(str(tmp_path / "z.gguf")).tensors["cap_pad_token"].shape == (1, 64)


def test_numbers_that_are_none_are_found_in_blocks(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"a.weight": torch.from_numpy(NUMBERS)})
    check_finite(MappedFile.open(tmp_path / "a.gguf"))
    begin = read_gguf_header(str(tmp_path / "a.gguf")).tensors["a.weight"].begin
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[begin : begin + 2] = np.array([np.nan], dtype=np.float16).tobytes()
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"a\.weight \(32 of 512\)"):
        check_finite(MappedFile.open(tmp_path / "a.gguf"))


@pytest.mark.parametrize("architecture", NAMES)
def test_text_encoders_have_the_names_of_transformers(architecture: str) -> None:
    """Each new name leads back to the one that llama.cpp's converter makes of it."""
    names = NAMES[architecture]
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 3)
    for here, there in names.top_level.items():
        assert known.get_name(there) == here or (here, architecture) == ("output", "gemma2")
    for here, there in names.parts.items():
        if here in ("attn_q_norm", "attn_k_norm") and architecture not in ("qwen3", "gemma3"):
            continue
        assert known.get_name(f"{names.blocks[1]}2.{there}") == f"{names.blocks[0]}2.{here}"


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_encoders_that_no_model_reads_are_refused_by_their_kind(architecture: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "text.gguf", {"blk.0.attn_q.weight": torch.from_numpy(NUMBERS)}, architecture=architecture)
    with pytest.raises(UnknownArchitecture, match=rf"text\.gguf: .*'{architecture}', which is not supported"):
        read_gguf_header(str(tmp_path / "text.gguf"))


def test_what_the_writer_of_tests_rounds_is_what_is_read(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.from_numpy(NUMBERS), "a.bias": torch.ones(3), "c.weight": torch.randn(4, 32, 3, 3)}
    tensors["film.weight"] = torch.randn(4, 3, 1, 2, 2)
    write_gguf(tmp_path / "model.gguf", tensors)
    opened = MappedFile.open(tmp_path / "model.gguf")
    for name, values in rounded(tensors).items():
        found = opened.tensor(name)
        found = found.unpack(torch.float32) if isinstance(found, PackedWeight) else found
        assert torch.equal(found, values), name
        assert opened.header.tensors[name].shape == tuple(tensors[name].shape)
