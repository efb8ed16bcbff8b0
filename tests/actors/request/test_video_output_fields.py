"""The fields that say how long something is and what it is written as: numbers and their words, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import FORMATS
from modelpool.pool.values.core.errors import UserError


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="", **fields)


def test_numbers_may_be_words_of_a_file() -> None:
    made = request(frames="97", frame_rate="24", seconds="1.5", format=".MP4 ")
    assert (made.frames, made.frame_rate, made.seconds, made.format) == (97, 24.0, 1.5, "mp4")
    assert request(frames=9.0).frames == 9


def test_left_out_they_are_left_to_the_model() -> None:
    made = request()
    assert (made.frames, made.frame_rate, made.seconds, made.format) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("frames", value) for value in (0, -1, 1.5, True, "many", 1 << 20)),
        *(("frame_rate", value) for value in (0, -1, float("nan"), float("inf"), 1e9)),
        *(("seconds", value) for value in (0, -0.5, float("nan"), 1e9)),
        *(("format", value) for value in ("avi", "", 3)),
    ],
)
def test_what_cannot_be_is_told_with_the_name_of_the_field(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{name}: found "):
        request(**{name: value})


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_asked_for(name: str) -> None:
    assert request(format=name).format == name
