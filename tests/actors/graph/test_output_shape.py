"""How large and how long: a request's own numbers, or the model's; others are refused with numbers that would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.graph.common.output_shape import Duration, duration_of, format_of, size_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import FORMATS
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import (
    PLAIN_SAMPLING,
    AudioFacts,
    ModelDefaults,
    SamplingFacts,
    VideoFacts,
)

AUDIO = SamplingFacts(audio=AudioFacts(47.5, 44100, 1024))


def video(multiple: int = 4) -> SamplingFacts:
    return SamplingFacts(side_multiple=16, video=VideoFacts(1 + 20 * multiple, multiple, 16.0))


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="p", **fields)


def sized(facts: SamplingFacts, width: int = 64, height: int = 64) -> ModelDefaults:
    return ModelDefaults(width, height, facts)


def test_what_is_left_out_is_the_models_own() -> None:
    assert duration_of(request(), "m", video()) == Duration(81, 16.0)
    assert duration_of(request(), "m", AUDIO) == Duration(seconds=47.5)
    assert duration_of(request(), "m", PLAIN_SAMPLING) == Duration()
    assert size_of(request(height=64), "m", sized(video(), 832, 480)) == (832, 64)
    assert size_of(request(), "m", sized(AUDIO)) == (0, 0)
    assert [format_of(None, "m", facts) for facts in (PLAIN_SAMPLING, video(), AUDIO)] == ["png", "mp4", "wav"]


def test_what_is_said_counts() -> None:
    assert duration_of(request(frames=5, frame_rate=24.0), "m", video()) == Duration(5, 24.0)
    assert duration_of(request(seconds=2.5), "m", AUDIO) == Duration(seconds=2.5)
    assert format_of("gif", "m", video()) == "gif"


@given(st.integers(1, 300), st.sampled_from([1, 4, 6, 8]))
def test_frames_fit_or_the_complaint_names_the_next_that_do(frames: int, multiple: int) -> None:
    facts = video(multiple)
    if (frames - 1) % multiple == 0:
        assert duration_of(request(frames=frames), "m", facts).frames == frames
        return
    with pytest.raises(UserError, match=r"^frames: found") as told:
        duration_of(request(frames=frames), "m", facts)
    named = re.search(r"\((\d+) or (\d+)\)$", str(told.value))
    assert named is not None
    fewer, more = int(named[1]), int(named[2])
    assert fewer < frames < more == fewer + multiple
    for fitting in (fewer, more):
        assert duration_of(request(frames=fitting), "m", facts).frames == fitting


@given(st.integers(1, 200).map(lambda cells: 8 * cells), st.sampled_from([16, 32, 64]))
def test_sides_fit_or_the_complaint_names_those_that_do(side: int, step: int) -> None:
    facts = SamplingFacts(side_multiple=step)
    if side % step == 0:
        assert size_of(request(width=side), "m", sized(facts)) == (side, 64)
        return
    with pytest.raises(UserError, match=r"^width: found") as told:
        size_of(request(width=side), "m", sized(facts))
    for fitting in re.search(r"\(([^()]*)\)$", str(told.value))[1].split(" or "):  # type: ignore[index]
        assert size_of(request(width=int(fitting)), "m", sized(facts)) == (int(fitting), 64)


@pytest.mark.parametrize(
    ("said", "facts", "message"),
    [
        (
            request(frames=5),
            PLAIN_SAMPLING,
            "frames: found 5, not supported by model 'm', which generates images, not videos",
        ),
        (
            request(frame_rate=5.0),
            AUDIO,
            "frame_rate: found 5.0, not supported by model 'm', which generates audio clips, not videos",
        ),
        (
            request(seconds=5.0),
            video(),
            "seconds: found 5.0, not supported by model 'm', which generates videos, not audio",
        ),
        (request(seconds=48.0), AUDIO, "seconds: found 48.0, expected up to 47.5 for model 'm'"),
    ],
)
def test_what_a_model_does_not_make_is_refused(said: GenerateRequest, facts: SamplingFacts, message: str) -> None:
    with pytest.raises(UserError) as told:
        duration_of(said, "m", facts)
    assert str(told.value) == message


def test_audio_has_no_sides() -> None:
    with pytest.raises(UserError, match=r"^height: found 64, not supported by model 'm', which generates audio"):
        size_of(request(height=64), "m", sized(AUDIO))


@pytest.mark.parametrize("facts", [PLAIN_SAMPLING, video(), AUDIO])
def test_every_format_is_of_one_kind(facts: SamplingFacts) -> None:
    """An output can be written in its own formats, and as no other."""
    taken = []
    for name in FORMATS:
        try:
            taken.append(format_of(name, "m", facts))
        except UserError as refused:
            assert str(refused).startswith(f"format: found {name!r}, expected {format_of(None, 'm', facts)}")  # noqa: PT017
    assert taken == [name for name in FORMATS if name in taken]
    assert taken in (["png", "webp", "jpg", "avif"], ["webp", "mp4", "webm", "gif"], ["wav", "flac", "mp3", "opus"])


def test_audio_of_frames_that_are_shown_too_slowly_is_refused() -> None:
    """Its length follows from the frame rate, and everything that counts it would have no end."""
    for name in ("ltx2", "kandinsky6"):
        facts = TRANSFORMERS[name].sampling
        assert duration_of(request(frames=121, frame_rate=0.5), "m", facts) == Duration(121, 0.5)
        for rate in (0.05, 1e-9, 1e-300):
            with pytest.raises(UserError, match=r"^frame_rate: .*expected at least 0\.\d+ for 121 frames"):
                duration_of(request(frames=121, frame_rate=rate), "m", facts)
    assert duration_of(request(frames=5, frame_rate=0.001), "m", video()) == Duration(5, 0.001)
