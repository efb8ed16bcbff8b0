"""Damaged safetensors files, made at random from whole ones: what downloads, disks and hostile people do to headers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Header = dict[str, Any]

#: as numbers in the text of a header
NUMBERS = (
    "0", "1", "-1", "-0", "3", "4.0", "1e3", "true", "null", '"4"', "[]", "{}", "NaN", "Infinity", "65", "2147483648",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "-9223372036854775809", "1" + "0" * 400, "1" + "0" * 5000,
)  # fmt: skip
DTYPES = ('"F16"', '"F32"', '"BF16"', '"F4"', '"F6_E2M3"', '"F8_E8M0"', '"U64"', '"C64"', '"f16"', '"F99"', '""', "7",
          '["F16"]', '{"F16": 1}', "null", "true")  # fmt: skip
NAMES = ('""', '"a"', r'"\u0000"', r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"', '"' + "n" * 20_000 + '"', r'"\x"',
         '"__metadata__"', '"../../x"', r'"\n\u001b[2J"')  # fmt: skip


def whole_file(chance: random.Random) -> tuple[Header, bytes]:
    """A small header that is right, and its tensors' bytes."""
    header: Header = {}
    if chance.random() < 0.5:
        header["__metadata__"] = {"format": "pt", "note": "words"}
    end = 0
    for number in range(chance.randrange(1, 5)):
        shape = [chance.randrange(0, 4) for _ in range(chance.randrange(0, 4))]
        count = 1
        for size in shape:
            count *= size
        dtype, item_bytes = chance.choice((("F16", 2), ("F32", 4), ("U8", 1)))
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count * item_bytes]}
        end += count * item_bytes
    return header, bytes(chance.randrange(256) for _ in range(end))


def as_file(text: bytes, data: bytes, header_bytes: int | None = None) -> bytes:
    """A file with the header `text`, which claims to be `header_bytes` long."""
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def damaged(chance: random.Random) -> bytes:
    """A file with one to three faults, or none that matters."""
    header, data = whole_file(chance)
    text = json.dumps(header, separators=(",", ":")).encode()
    for _ in range(chance.randrange(1, 3)):
        text = chance.choice(TEXT_FAULTS)(chance, text)
    file = as_file(text, data)
    for _ in range(chance.choice((0, 0, 1))):
        file = chance.choice(FILE_FAULTS)(chance, file)
    return file


def _entry(chance: random.Random, text: bytes, key: str, make: Callable[[], str]) -> bytes:
    """Replace what one tensor has under `key`."""
    places = [found.start() for found in re.finditer(f'"{key}":'.encode(), text)]
    if not places:
        return text
    begin = chance.choice(places) + len(key) + 3
    depth, end = 0, begin
    while end < len(text) and (depth or text[end : end + 1] not in (b",", b"}")):
        depth += {b"[": 1, b"]": -1}.get(text[end : end + 1], 0)
        end += 1
    return text[:begin] + make().encode("utf-8", "surrogatepass") + text[end:]


def _numbers(chance: random.Random, most: int) -> str:
    picked = [chance.choice(NUMBERS) if chance.random() < 0.4 else str(chance.randrange(5)) for _ in range(most)]
    return "[" + ",".join(picked) + "]"


def _shape(chance: random.Random, text: bytes) -> bytes:
    return _entry(chance, text, "shape", lambda: _numbers(chance, chance.choice((0, 1, 2, 3, 5, 70))))


def _offsets(chance: random.Random, text: bytes) -> bytes:
    return _entry(chance, text, "data_offsets", lambda: _numbers(chance, chance.choice((1, 2, 2, 2, 3))))


def _moved(chance: random.Random, text: bytes) -> bytes:
    """A hole, an overlap, or two tensors in one place."""
    shift = chance.randrange(-8, 9)
    return _entry(chance, text, "data_offsets", lambda: f"[{max(0, shift)},{max(0, shift + chance.randrange(9))}]")


def _dtype(chance: random.Random, text: bytes) -> bytes:
    return _entry(chance, text, "dtype", lambda: chance.choice(DTYPES))


def _name(chance: random.Random, text: bytes) -> bytes:
    return text.replace(f'"t{chance.randrange(3)}"'.encode(), chance.choice(NAMES).encode(), 1)


def _twin(chance: random.Random, text: bytes) -> bytes:
    return text.replace(b'"t1"', b'"t0"', 1)


def _metadata(chance: random.Random, text: bytes) -> bytes:
    value = chance.choice((*NUMBERS, *NAMES, '{"a":1}', '{"a":"b","a":"c"}', '{"a":{"b":"c"}}', '["a"]', '{"a":null}'))
    return b'{"__metadata__":' + value.encode() + b"," + text[1:]


def _field(chance: random.Random, text: bytes) -> bytes:
    extra = chance.choice(('"x":1,', '"dtype":"F16",', '"shape":[],', '"device":{"a":[1]},'))
    return text.replace(b'{"dtype"', b"{" + extra.encode() + b'"dtype"', 1)


def _nested(chance: random.Random, text: bytes) -> bytes:
    depth, (opening, closing) = chance.choice((5, 200, 5000)), chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return text[:-1] + b',"deep":' + opening * depth + b"1" + closing * depth + b"}"


def _flipped(chance: random.Random, text: bytes) -> bytes:
    place = chance.randrange(len(text))
    return text[:place] + bytes([chance.randrange(256)]) + text[place + 1 :]


def _cut_out(chance: random.Random, text: bytes) -> bytes:
    begin = chance.randrange(len(text))
    return text[:begin] + text[begin + chance.randrange(1, 20) :] or b"{"


def _put_in(chance: random.Random, text: bytes) -> bytes:
    place = chance.randrange(len(text) + 1)
    piece = chance.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"{", b"]", b'"', b",", b" ", b"\\", b"-", b"9" * 30))
    return text[:place] + piece + text[place:]


def _padded(chance: random.Random, text: bytes) -> bytes:
    return text + chance.choice((b" ", b"\n\t ", b"\0", b"x")) * chance.randrange(1, 9)


def _cut_short(chance: random.Random, file: bytes) -> bytes:
    return file[: chance.randrange(len(file))]


def _lengthened(chance: random.Random, file: bytes) -> bytes:
    return file + bytes(chance.randrange(1, 50))


def _lying(chance: random.Random, file: bytes) -> bytes:
    """A header size that is not the header's."""
    true = int.from_bytes(file[:8], "little")
    size = chance.choice(
        (true + 1, true - 1, 0, 1, true * 2, 100_000_000, 100_000_001, 1 << 32, 1 << 63, (1 << 64) - 1)
    )
    return max(0, size).to_bytes(8, "little") + file[8:]


def _noise(chance: random.Random, file: bytes) -> bytes:
    return file[:8] + bytes(chance.randrange(256) for _ in range(len(file)))


TEXT_FAULTS = (_shape, _offsets, _moved, _dtype, _name, _twin, _metadata, _field, _nested, _flipped, _cut_out, _put_in,
               _padded)  # fmt: skip
FILE_FAULTS = (_cut_short, _lengthened, _lying, _noise)
