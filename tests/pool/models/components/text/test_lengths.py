"""How a text is read is known before it is read: how long what is told of it is, and what the encoder is given."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.families.text_readings import READINGS
from modelpool.pool.models.components.text.lengths import ReadLength, length_read
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from tests.pool.models.components.text import cases
from tests.pool.models.text.tiny_tokenizers import tiny

LONG = "a small red cat sits beside a large blue dog on the table " * 60
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "filled", "weighted"),
    [
        ("a cat", True, False),
        (LONG, False, False),
        ("a (red:1.3) cat", True, True),
        (f"{LONG} (far:1.3)", False, False),
    ],
)
def test_weights_count_where_there_is_room_for_them(text: str, filled: bool, weighted: bool) -> None:
    t5 = TextTokenizer(tiny("t5"), "t5")
    assert length_read(READINGS["flux"][1], t5, text) == ReadLength(512, weighted, filled, row_tokens=512, rows=1)


@pytest.mark.parametrize("family", ["sd3", "flux", "hunyuan_video"])
@pytest.mark.parametrize("text", ["a cat", LONG, "a (red:1.3) cat"])
def test_the_length_is_that_of_what_clip_tells(family: str, text: str) -> None:
    clip, reading = ClipTokenizer.load(), READINGS[family][0]
    (read,) = read_texts(cases.clip(), clip, (text,), CPU, reading)
    known = length_read(reading, clip, text)
    assert known.tokens == read.context_LD.shape[0]
    assert known.weighted == (family == "sd3" and ":" in text)
