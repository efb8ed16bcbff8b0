"""PyTorch files read as PyTorch reads them, without running anything; what could run, or is not what it declares, is
refused by name."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelpool.pool.files.formats.torch_legacy import MAGIC
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.tiers import examples

MIB = 1 << 20
base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
both_formats = pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])


def saved(path: Path, value: object, new: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=new)
    return path


def read(path: Path) -> MappedFile:
    return MappedFile.open(path, allow_pickle=True)


EVERY_TYPE = {
    str(dtype): base.to(dtype)
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64,
    )
}  # fmt: skip
SHAPES = {
    "plain": base,
    "turned": base.t(),
    "rows": base[1:3],
    "columns": base[:, 2:4],
    "folded": base.reshape(2, 2, 6).permute(2, 0, 1),
    "single": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(base.half()),
}


@both_formats
@pytest.mark.parametrize("tensors", [EVERY_TYPE, SHAPES], ids=["types", "shapes"])
def test_tensors_are_those_that_torch_loads(tmp_path: Path, tensors: dict[str, torch.Tensor], new: bool) -> None:
    path = saved(tmp_path / "weights.pt", tensors, new)
    # torch 2.13 writes legacy files of 8-bit floats that it cannot read
    mapped, expected = read(path), torch.load(path, weights_only=True) if new else tensors
    assert set(mapped.header.tensors) == set(expected)
    for name, tensor in mapped.tensors().items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor.contiguous().flatten().view(torch.uint8), as_bytes(expected[name])), name
        assert mapped.header.tensors[name].storage_bytes <= path.stat().st_size


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def test_tensors_of_a_zip_are_views_of_the_file(tmp_path: Path) -> None:
    mapped = read(saved(tmp_path / "weights.ckpt", {"a": base, "b": base.half()}))
    starts = {name: tensor.data_ptr() - mapped.header.tensors[name].begin for name, tensor in mapped.tensors().items()}
    assert len(set(starts.values())) == 1


def test_tied_weights_share_their_bytes(tmp_path: Path) -> None:
    tensors = read(saved(tmp_path / "tied.pt", {"a": base, "b": base})).tensors()
    assert tensors["a"].data_ptr() == tensors["b"].data_ptr()


WRAPPED = {
    "a state_dict in a training checkpoint": (
        {"state_dict": collections.OrderedDict(w=base), "epoch": 3, "optimizer_states": [{"a": {0: {"step": 1}}}]},
        {"w"},
        {"epoch": "3"},
    ),
    "an upscaler's averaged weights": ({"params": {"w": base}, "params_ema": {"v": base}}, {"v"}, {}),
    "the only inner dictionary": ({"generator": {"w": base}, "name": "x"}, {"w"}, {"name": "x"}),
    "an embedding": ({"string_to_token": {"*": 265}, "string_to_param": {"*": base}, "step": 9}, {"*"}, {"step": "9"}),
    "weights beside numbers": ({"w": base, "iteration": 7, "loss": 0.5}, {"w"}, {"iteration": "7", "loss": "0.5"}),
    "a module's state": (torch.nn.Linear(2, 2).state_dict(), {"weight", "bias"}, {}),
    "numbers of numpy beside": ({"state_dict": {"w": base}, "best": np.float64(1)}, {"w"}, {}),
}


@both_formats
@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_are_found_where_programs_put_them(tmp_path: Path, kind: str, new: bool) -> None:
    value, names, metadata = WRAPPED[kind]
    header = read(saved(tmp_path / "x.ckpt", value, new)).header
    assert (set(header.tensors), header.metadata) == (names, metadata)


class Calls:
    """What a hostile pickle holds: reading it the usual way calls `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._call


CODE = {
    "posix.system": lambda trace: Calls(os.system, f"touch {trace}"),
    "builtins.exec": lambda trace: Calls(exec, f"open({str(trace)!r}, 'w')"),
    "builtins.eval": lambda trace: Calls(eval, f"open({str(trace)!r}, 'w')"),
    "builtins.getattr": lambda trace: Calls(getattr, base, "numel"),
    "builtins.bytearray": lambda trace: Calls(bytearray, 6_000_000_000),
    "torch.nn.modules.linear.Linear": lambda trace: torch.nn.Linear(2, 2),
    "torch.serialization.load": lambda trace: Calls(torch.load, str(trace)),
}


@both_formats
@pytest.mark.parametrize("name", CODE)
def test_code_is_named_and_not_run(tmp_path: Path, name: str, new: bool) -> None:
    trace = tmp_path / "trace"
    path = saved(tmp_path / "bad.ckpt", {"state_dict": {"w": base, "x": CODE[name](trace)}}, new)
    with pytest.raises(UnsafeFile, match=r"bad\.ckpt: the pickle names ") as caught:
        read(path)
    assert name.replace("builtins", "__builtin__") in str(caught.value)
    assert not trace.exists()


@both_formats
def test_a_pickle_is_read_only_where_it_is_allowed(tmp_path: Path, new: bool) -> None:
    """Whatever the file is called."""
    for name in ("model.ckpt", "model.safetensors"):
        path = saved(tmp_path / name, {"w": base}, new)
        with pytest.raises(UnsafeFile, match=f"{name}: a PyTorch pickle, .* or allow_pickle for files"):
            MappedFile.open(path)
        assert set(read_weights_header(path, allow_pickle=True).tensors) == {"w"}


NOT_WEIGHTS = {
    "a list": ([base], "holds a list"),
    "a tensor": (base, "holds a DeclaredTensor"),
    "a number among the weights": ({"state_dict": {"a": base, "n": 3}}, "holds a int under 'n', expected a tensor"),
    "a list among the weights": ({"a": base, "l": [1]}, "holds a list under 'l', expected a tensor"),
    "a set among the weights": ({"a": base, "s": {1}}, "holds an object __builtin__.set under 's'"),
    "two dictionaries of weights": ({"x": {"a": base}, "y": {"b": base}}, r"has tensors under each of \['x', 'y'\]"),
    "numbers as names": ({"state_dict": {"a": base, 3: base}}, "has weights under a int"),
    "one number as a thousand": ({"e": torch.zeros(1).expand(1000)}, r"shape \(1000,\) and strides \(0,\)"),
    "a conjugated tensor": ({"q": torch.zeros(2, dtype=torch.complex64).conj()}, "conjugated"),
}


@both_formats
@pytest.mark.parametrize("kind", NOT_WEIGHTS)
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, kind: str, new: bool) -> None:
    value, message = NOT_WEIGHTS[kind]
    with pytest.raises(CorruptFile, match=message) as caught:
        read(saved(tmp_path / "odd.pt", value, new))
    assert "odd.pt" in str(caught.value)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], pack: str = "") -> Path:
    """The archive at `path` with members changed, and that which ends with `pack` compressed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            packed = bool(pack) and name.endswith(pack)
            archive.writestr(name, change(name, content), zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    return path


def with_pickle(path: Path, pickled: bytes) -> Path:
    return rewritten(saved(path, {"w": torch.zeros(4)}), lambda name, c: pickled if name.endswith("data.pkl") else c)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A bomb: 64 MB of zeros in 64 kB."""
    path = saved(tmp_path / "bomb.pt", {"w": torch.zeros(4)})
    rewritten(path, lambda name, c: bytes(64 * MIB) if name.endswith("/data/0") else c, pack="/data/0")
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile, match="declares 67108864 bytes in"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "large.pt", {"w": torch.zeros(4)})
    size = b"K\x00K\x04\x85"  # offset 0, shape (4,)
    huge = b"K\x00J" + struct.pack("<i", 2_000_000_000) + b"\x85"

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        assert content.count(size) == 1
        return content.replace(size, huge)

    with pytest.raises(CorruptFile, match=r"shape \(2000000000,\) .* of a storage of 4"):
        read(rewritten(path, change))


def test_a_tensor_that_begins_too_late_in_its_storage_is_refused(tmp_path: Path) -> None:
    """It would be read from whatever follows."""
    path = saved(tmp_path / "late.pt", {"w": torch.zeros(4)})
    late = (b"K\x00K\x04\x85", b"K\x02K\x04\x85")
    with pytest.raises(CorruptFile, match="from number 2 of a storage of 4"):
        read(rewritten(path, lambda name, c: c.replace(*late) if name.endswith("data.pkl") else c))


def test_members_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """Two entries of the directory for the same bytes."""
    path = saved(tmp_path / "over.pt", {"a": torch.zeros(4), "b": torch.ones(4)})
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"over/data/{n}").header_offset.to_bytes(4, "little") for n in (0, 1))
    content = path.read_bytes()
    at = content.rfind(b"over/data/1") - 4
    assert content[at : at + 4] == second
    path.write_bytes(content[:at] + first + content[at + 4 :])
    with pytest.raises(CorruptFile, match="lies over another"):
        read(path)


def test_a_legacy_file_whose_storages_are_not_as_promised_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "old.pt", {"w": base}, new=False)
    content = path.read_bytes()
    at = len(content) - base.nbytes - 8
    assert int.from_bytes(content[at : at + 8], "little") == base.numel()
    path.write_bytes(content[:at] + (23).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(CorruptFile, match="of 23 numbers, its pickle promises 24"):
        read(path)
    path.write_bytes(content + b"more")
    with pytest.raises(CorruptFile, match="is too long: 4 bytes follow"):
        read(path)
    path.write_bytes(content[:-1])
    with pytest.raises(CorruptFile, match="is truncated"):
        read(path)


def test_one_storage_as_thousands_of_tensors_is_refused(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    path = saved(tmp_path / "again.pt", {f"w{i}": big for i in range(100)})
    with pytest.raises(CorruptFile, match="same numbers repeatedly"):
        read(path)


def test_a_pickle_that_promises_more_than_its_storage_has_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "short.pt", {"w": torch.zeros(4)})
    with pytest.raises(
        CorruptFile, match="has 8 bytes in the storage of its tensor 'w', the pickle promises 4 numbers"
    ):
        read(rewritten(path, lambda name, c: c[:8] if name.endswith("data/0") else c))


def test_an_archive_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme.txt", "words")
    with pytest.raises(CorruptFile, match=r"0 members \*/data\.pkl"):
        read(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptFile, match="without its end"):
        read(path)
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(CorruptFile, match="Python pickle"):
        read(path)


def test_a_program_in_an_archive_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "script.pt", {"w": base})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("script/code/__torch__.py", "pass")
    with pytest.raises(CorruptFile, match="TorchScript"):
        read(path)


def test_a_directory_larger_than_an_archive_needs_is_not_read(tmp_path: Path) -> None:
    """An end record that promises four billion members is refused by what it promises."""
    path = saved(tmp_path / "many.pt", {"w": base})
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\x05\x06")
    content[at + 12 : at + 16] = b"\xff\xff\xff\x7f"
    path.write_bytes(content.replace(b"PK\x06\x07", b"XX\x06\x07"))
    with pytest.raises(CorruptFile, match="in a directory of 2147483647 bytes"):
        read(path)


def test_a_legacy_file_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "big.pt", {"w": base}, new=False)
    content = path.read_bytes()
    little = b"little_endianq\x02\x88"
    assert content.count(little) == 1
    path.write_bytes(content.replace(little, b"little_endianq\x02\x89"))
    with pytest.raises(CorruptFile, match="little-endian"):
        read(path)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    value = {"state_dict": {"a": base, "b": base.t().half(), "p": torch.nn.Parameter(base)}, "epoch": 1}
    files = tuple(saved(folder / f"{new}.pt", value, new).read_bytes() for new in (True, False))
    return files[0], files[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(400))
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bytes(
    tmp_path: Path, whole_files: tuple[bytes, bytes], data: st.DataObject
) -> None:
    """Cut anywhere, or with a few bytes of anything anywhere before the weights."""
    content = bytearray(data.draw(st.sampled_from(whole_files)))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(17, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    try:
        mapped = read(path)
    except CorruptFile:
        return
    for name, entry in mapped.header.tensors.items():
        assert 0 <= entry.begin <= entry.end <= len(content), name
        assert mapped.tensor(name).clone().numel() == entry.elements


def test_the_magic_number_is_that_of_torch() -> None:
    stream = io.BytesIO()
    torch.save({}, stream, _use_new_zipfile_serialization=False)
    assert stream.getvalue().startswith(MAGIC)
