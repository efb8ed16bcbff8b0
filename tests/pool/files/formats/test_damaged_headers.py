"""Headers damaged at random: each is read as a whole file or refused by a `CorruptFile`, cheaply, and never more
leniently than the reference implementation does it."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS, Header, read_header
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.pool.files.formats.damage import as_file, damaged
from tests.tiers import examples

MUTATIONS = 10_000
BATCHES = 8
MIB = 1 << 20
#: a message is for people
LONGEST_MESSAGE = 1500

#: What we refuse and the reference implementation reads: of two tensors with one name it takes the last; it leaves
#: fields that it does not know aside and takes lists for objects; it counts in unsigned numbers and has no limit to
#: dimensions, which no tensor library can follow; it reads headers of any number of values, and of white space before
#: the brace that the format wants first.
STRICTER = re.compile(
    r"twice|expected dtype, shape and data_offsets|at most 64 dimensions|has about \d+ values|\d{19}.* beyond 2\*\*63"
    r"|unknown contents beginning with"
)


def verdict(path: Path, content: bytes) -> Header | CorruptFile:
    path.write_bytes(content)
    try:
        return read_header(path)
    except CorruptFile as error:
        return error


def reference(content: bytes) -> dict[str, tuple[str, tuple[int, ...]]] | SafetensorError:
    """What the reference implementation reads: type and shape of each tensor."""
    try:
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in deserialize(content)}
    except SafetensorError as error:
        return error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_ten_thousand_damaged_headers(tmp_path: Path, batch: int) -> None:
    """Read or refused as the reference does, but for the listed differences; what is read can be mapped and copied."""
    chance = random.Random(batch)
    path = tmp_path / "damaged.safetensors"
    read = 0
    for number in range(MUTATIONS // BATCHES):
        content = damaged(chance)
        found, expected = verdict(path, content), reference(content)
        where = f"batch {batch}, number {number}: {content[:300]!r}"
        if isinstance(found, CorruptFile):
            assert path.name in str(found), where
            assert len(str(found)) < LONGEST_MESSAGE, where
            assert isinstance(expected, SafetensorError) or STRICTER.search(str(found)), f"{where}: {found}"
            continue
        read += 1
        assert not isinstance(expected, SafetensorError), f"{where}: {expected}"
        assert {name: (e.dtype, e.shape) for name, e in found.tensors.items()} == expected, where
        look_at_all(found)
    assert read > MUTATIONS // BATCHES // 50, "some faults leave a whole file, and those were read"


def look_at_all(header: Header) -> None:
    mapped = MappedFile.of(header)
    for name, entry in header.tensors.items():
        try:
            tensor = mapped.tensor(name)
        except CorruptFile:
            assert entry.dtype.startswith(("F4", "F6")), "a type that torch has not"
            continue
        assert tensor.shape == entry.shape
        assert tensor.nbytes == entry.storage_bytes
        assert tensor.clone().numel() == entry.elements


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | json_values,
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(300))
@given(header=st.dictionaries(st.text(max_size=8), entries | json_values, max_size=4), data=st.binary(max_size=16))
def test_any_json_as_a_header(tmp_path: Path, header: object, data: bytes) -> None:
    content = as_file(json.dumps(header).encode(), data)
    found, expected = verdict(tmp_path / "any.safetensors", content), reference(content)
    if isinstance(found, Header):
        assert not isinstance(expected, SafetensorError)
        look_at_all(found)
    else:
        assert isinstance(expected, SafetensorError) or STRICTER.search(str(found)), found


def entry(shape: str, begin: int, end: int, dtype: str = '"F16"') -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":[{begin},{end}]}}'


#: found by the mutations above: each once ended in something else than a `CorruptFile`, or was read
FOUND = {
    "a type that is a list": (f'{{"a":{entry("[4]", 0, 8, "[]")}}}', r"found dtype \[\], expected one of"),
    "more digits than Python reads": (
        f'{{"a":{entry("[1" + "0" * 5000 + "]", 0, 8)}}}',
        "a number of thousands of digits",
    ),
    "more digits than a float holds": (f'{{"a":{entry("[1" + "0" * 400 + "]", 0, 8)}}}', "none negative or beyond"),
    "an empty list of metadata": (f'{{"__metadata__":[],"a":{entry("[4]", 0, 8)}}}', r"is \[\], expected pairs"),
    "false as metadata": (f'{{"__metadata__":false,"a":{entry("[4]", 0, 8)}}}', "is False, expected pairs"),
    "half of a surrogate pair": (f'{{"\\ud800":{entry("[4]", 0, 8)}}}', "surrogates not allowed, expected UTF-8"),
    "a negative zero": (
        f'{{"a":{entry("[4]", 0, 8)},"b":{entry("[-0]", 8, 8)}}}',
        "whole numbers, none negative or beyond",
    ),
    "too large before a zero": (
        f'{{"a":{entry("[4]", 0, 8)},"b":{entry("[9223372036854775808, 0]", 8, 8)}}}',
        "none negative or beyond",
    ),
    "too large together before a zero": (
        f'{{"a":{entry("[4]", 0, 8)},"b":{entry("[4294967296, 4294967296, 0]", 8, 8)}}}',
        "2\\*\\*63 - 1 elements",
    ),
    "too many dimensions": (f'{{"a":{entry("[4" + ",1" * 64 + "]", 0, 8)}}}', "at most 64 dimensions"),
}


@pytest.mark.parametrize("fault", FOUND)
def test_faults_that_were_found(tmp_path: Path, fault: str) -> None:
    text, message = FOUND[fault]
    found = verdict(tmp_path / "found.safetensors", as_file(text.encode(), bytes(8)))
    assert isinstance(found, CorruptFile)
    assert re.search(message, str(found)), found


HOSTILE = {
    "objects": lambda size: b'{"a":[' + b"{}," * (size // 3) + b"{}]}",
    "lists": lambda size: b'{"a":[' + b"[]," * (size // 3) + b"[]]}",
    "numbers": lambda size: b'{"a":[' + b"300," * (size // 4) + b"1]}",
    "a shape": lambda size: f'{{"a":{entry("[" + "1," * (size // 2) + "4]", 0, 8)}}}'.encode(),
    "nesting": lambda size: b'{"a":' + b"[" * size,
    "one digit after the other": lambda size: b'{"a":' + b"9" * size + b"}",
    "one name": lambda size: b'{"' + b"n" * size + b'":1}',
    "names": lambda size: b"{" + b",".join(b'"%d":{}' % i for i in range(size // 10)) + b"}",
    "one twice": lambda size: b"{" + b'"a":{},' * (size // 7) + b'"a":{}}',
    "no JSON": lambda size: b"{" + bytes(range(256)) * (size // 256),
}


@pytest.mark.parametrize(("size", "most_bytes"), [(MIB, 48 * MIB), (8 * MIB, 40 * MIB)])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.timeout(60)
def test_a_hostile_header_takes_little_memory(tmp_path: Path, kind: str, size: int, most_bytes: int) -> None:
    """As Python's objects the smaller would take some 30 MB and the larger 240; the larger is not made objects of."""
    text = HOSTILE[kind](size)
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(as_file(text, bytes(8)))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile) as caught:
            read_header(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < LONGEST_MESSAGE
    assert peak_bytes < most_bytes, f"{peak_bytes / MIB:.1f} MiB for {len(text) / MIB:.1f}"


@pytest.mark.timeout(60)
def test_a_header_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """The file is a hole of 200 MB; what it claims is not allocated before it is checked."""
    path = tmp_path / "claims.safetensors"
    for claimed in (99_999_999, 100_000_001, 1 << 40, (1 << 64) - 1):
        with path.open("wb") as file:
            file.write(claimed.to_bytes(8, "little") + b"{")
            file.truncate(MIB if claimed == 99_999_999 else 200 * MIB)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptFile):
                read_header(path)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()
