"""Pickles that would cost much time or memory to read are refused for what they are, before they cost it."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from modelpool.pool.files.formats.torch_objects import BadPickle
from modelpool.pool.files.formats.torch_pickle import read_pickle
from modelpool.pool.values.core.errors import CorruptFile
from tests.pool.files.formats.test_torch_file import MIB, Calls, read, with_pickle

BOMBS = {
    # with torch 2.13, torch.load(weights_only=True) ends the process for the first and takes 6 GB for the second
    "tuples in tuples as a key": b"\x80\x02}(" + b")" + b"\x85" * 300_000 + b"K\x01u.",
    "a bytearray of declared size": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05" + (6 * 10**9).to_bytes(5, "little")
    + b"\x85R.",
    "a memo of four billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "a text of declared size": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
    "an array of declared size": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a number of many digits": b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    "one list given to many calls": b"\x80\x02](" + b"NN\x86" * 9000 + b"e\x85q\0"
    + b"ccollections\nOrderedDict\nh\0R" * 999 + b".",
    "one text given to many sizes": b"\x80\x02(X" + MIB.to_bytes(4, "little") + b"a" * MIB + b"\x85q\0"
    + b"ctorch\nSize\nh\0R" * 200 + b"t.",
    "one list remade many times": b"\x80\x02(](" + b"NN\x86" * 9000 + b"e\x85q\0"
    + b"ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nNh\0NtR" * 999 + b"t.",
    "a pair of pairs of pairs as a type": b"\x80\x02(X\7\0\0\0storageN" + b"q\0h\0\x86" * 40
    + b"X\1\0\0\0kX\3\0\0\0cpuK\1tQ.",
    "tuples in tuples as a type": b"\x80\x02(X\7\0\0\0storageN" + b"\x85" * 100_000
    + b"X\1\0\0\0kX\3\0\0\0cpuK\1tQ.",
    "keys that hash alike": b"\x80\x02}(" + b"".join(
        b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, 20_001)) + b"u.",
    "numbers of values that hash alike": b"\x80\x02N" + b"".join(
        b"p%d\n" % (i * (2**61 - 1)) for i in range(1, 20_001)) + b".",
    "more opcodes than weights need": b"\x80\x02" + b"N0" * 250_000 + b".",
    "a name without an end": b"\x80\x02c" + b"x" * MIB,
    "lists that hold themselves": b"\x80\x02}q\0(X\1\0\0\0ah\0X\1\0\0\0bh\0u.",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.timeout(60)
def test_a_bomb_of_a_pickle_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    path = with_pickle(tmp_path / "bomb.pt", BOMBS[kind])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile, match=r"bomb\.pt"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 80 * MIB
    finally:
        tracemalloc.stop()


def test_a_list_given_to_many_calls_is_refused_for_that(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="passes more than"):
        read(with_pickle(tmp_path / "calls.pt", BOMBS["one list given to many calls"]))


REFUSED = {
    "a storage of what": ("a pair of pairs of pairs as a type", "has a storage of a tuple with 1 numbers"),
    "a size of a text": ("one text given to many sizes", "has a size of a str, expected at most 64 counts"),
    "a dictionary remade": ("one list remade many times", "rebuilds a tensor with collections.OrderedDict"),
    "a large number as a key": ("keys that hash alike", "has 2305843009213693951 as a key"),
    "a large number of a value": (
        "numbers of values that hash alike",
        "memoizes a value as number 2305843009213693951",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_cost_much_is_refused_for_what_it_is(tmp_path: Path, kind: str) -> None:
    bomb, message = REFUSED[kind]
    with pytest.raises(CorruptFile, match=message):
        read(with_pickle(tmp_path / "bomb.pt", BOMBS[bomb]))


@pytest.mark.parametrize("keys", [[0, -1, 2**31, 0.5], [1e300], [float("nan")], [-(2**31) - 1]])
def test_numbers_are_keys_as_far_as_programs_count(keys: list[float]) -> None:
    pickled = pickle.dumps(dict.fromkeys(keys), protocol=2)
    if len(keys) > 1:
        assert list(read_pickle(io.BytesIO(pickled), len(pickled))) == keys
        return
    with pytest.raises(BadPickle, match="as a key, expected no number beyond"):
        read_pickle(io.BytesIO(pickled), len(pickled))


def test_a_size_may_be_of_a_tuple_or_a_list(tmp_path: Path) -> None:
    for sizes in ((2, 3), [2, 3]):
        pickled = pickle.dumps(Calls(torch.Size, sizes), protocol=2)
        assert read_pickle(io.BytesIO(pickled), len(pickled)) == (2, 3)


END64 = struct.Struct("<4sQ2H2L4Q")


@pytest.mark.parametrize("elsewhere", [True, False], ids=["a second record", "a long comment"])
def test_a_large_directory_is_seen_where_python_looks(tmp_path: Path, elsewhere: bool) -> None:
    """The guard has to read the record that `zipfile` reads, not another one, and none too few."""
    path, huge = tmp_path / "zip64.pt", 1 << 40
    begin = b"PK\x03\x04" + bytes(60)
    small, large = (END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, 0) for size in (100, huge))
    before = begin + (small if elsewhere else b"")
    comment = b"" if elsewhere else b"c" * 65_535
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(begin), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 100, 64, len(comment))
    path.write_bytes(before + large + locator + end + comment)
    said = "is not directly before its locator" if elsewhere else f"in a directory of {huge} bytes"
    with pytest.raises(CorruptFile, match=said):
        read(path)


@pytest.mark.parametrize("text", [b"c\\collections\nOrderedDict\n", b"S'\\o'\n"])
def test_a_name_with_an_escape_is_refused_without_a_warning(text: bytes) -> None:
    """A damaged byte in a name made the reader of opcodes warn of an escape that Python does not know."""
    content = b"\x80\x02" + text + b"."
    with pytest.raises(BadPickle, match="uses an escape in a name or a number"):
        read_pickle(io.BytesIO(content), len(content))
