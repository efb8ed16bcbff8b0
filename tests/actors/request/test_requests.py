"""What a driver may ask for: short forms are understood, everything else is refused with the field's name."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.request.requests import GenerateRequest, LoraChoice, resolve_sampling
from modelpool.pool.values.core.errors import UnknownName, UnusableField, UserError


@pytest.mark.parametrize(
    ("given_as", "name", "strength"),
    [
        ("light", "light", 1.0),
        ("light:0.8", "light", 0.8),
        (("light", 0.8), "light", 0.8),
        (["light", -1], "light", -1.0),
        ({"name": "light", "strength": 2}, "light", 2.0),
        ("a:b:0.5", "a:b", 0.5),
    ],
)
def test_loras_have_short_forms(given_as, name, strength) -> None:
    (lora,) = GenerateRequest(model="m", prompt="p", loras=[given_as]).loras
    assert (lora.name, lora.strength) == (name, strength)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"width": 65}, UnusableField, r"width: found 65, expected a multiple of 8"),
        ({"height": 0}, UnusableField, r"height: found 0"),
        ({"steps": -3}, UnusableField, r"steps: found -3, expected a whole number from 1"),
        ({"steps": 1000}, UnusableField, r"steps: found 1000"),
        ({"cfg": 0.5}, UnusableField, r"cfg: found 0.5"),
        ({"cfg": float("nan")}, UnusableField, r"cfg"),
        ({"seed": -1}, UnusableField, r"seed: found -1"),
        ({"sampler": "eulr"}, UnknownName, r"unknown sampler 'eulr'; did you mean 'euler'"),
        ({"schedule": "karas"}, UnknownName, r"unknown schedule 'karas'; did you mean 'karras'"),
        ({"promt": "x"}, UnknownName, r"'promt'; did you mean 'prompt'"),
        ({"loras": ["light:x"]}, UserError, r"strength"),
        ({"model": ""}, UserError, r"model"),
    ],
)
def test_what_is_wrong_is_named(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        GenerateRequest(**{"model": "m", "prompt": "p", **fields})


def test_a_field_that_must_be_there_is_named() -> None:
    with pytest.raises(UnusableField, match=r"prompt: missing"):
        GenerateRequest(model="m")


@given(
    seed=st.none() | st.integers(0, 2**64 - 1),
    loras=st.lists(st.builds(LoraChoice, name=st.text(min_size=1), strength=st.floats(-4, 4)), max_size=3),
    prompt=st.text(),
)
def test_requests_travel_unchanged(seed, loras, prompt) -> None:
    request = GenerateRequest(model="m", prompt=prompt, seed=seed, loras=loras)
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("sampler", "schedule", "resolved"),
    [
        ("euler", None, ("euler", "normal")),
        ("DPM++ 2M", None, ("dpmpp_2m", "karras")),
        ("dpmpp 2m karras", "SGM Uniform", ("dpmpp_2m", "sgm_uniform")),
        ("Euler a", "Karras", ("euler_ancestral", "karras")),
    ],
)
def test_a_schedule_that_is_given_wins(sampler, schedule, resolved) -> None:
    assert resolve_sampling(sampler, schedule) == resolved


def test_sigmas_are_falling_levels_that_determine_the_steps() -> None:
    for value in ([4, 1.5, 0.5], "4, 1.5,0.5", (4.0, 1.5, 0.5, 0.0)):
        request = GenerateRequest(model="m", prompt="p", sigmas=value)
        assert (request.sigmas, request.steps, "steps" in request.model_fields_set) == ((4.0, 1.5, 0.5), 3, True)
    assert GenerateRequest(model="m", prompt="p", sigmas=[], steps=7).steps == 7
    wrong = [
        *(({"sigmas": value}, "sigmas: found") for value in ([1, 2], [2, "x"], 3, [0], [2, float("nan")])),
        ({"sigmas": [4, 1], "steps": 3}, "steps: found 3, expected 2"),
        ({"sigmas": [4, 1], "schedule": "karras"}, "schedule: found 'karras', expected no value together with sigmas"),
    ]  # fmt: skip
    for fields, message in wrong:
        with pytest.raises(UserError, match=message):
            GenerateRequest(model="m", prompt="p", **fields)


def test_the_errors_of_all_fields_of_a_request_are_one_message() -> None:
    """They were reported one by one, each after another try."""
    with pytest.raises(UserError) as raised:
        GenerateRequest(model="a", prompt="b", steps=0, width=7, promt=1, hires={"scale": -1, "foo": 2})
    unknown, *others = str(raised.value).split("; also ")
    assert unknown.startswith("unknown field of GenerateRequest 'promt'; did you mean 'prompt'?")
    assert others == [
        "steps: found 0, expected a whole number from 1 to 999",
        "width: found 7, expected a multiple of 8 from 8 to 16384",
        "unknown field of Hires 'foo'. Known: scale, steps, strength, upscaler, via.",
        "hires.scale: found -1.0, expected a number above 1 up to 8",
    ]
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy)) == (type(raised.value), str(raised.value))
    with pytest.raises(UserError, match=r"^steps: found 0, expected a whole number from 1 to 999$"):
        GenerateRequest(model="a", prompt="b", steps=0)


def test_a_message_has_some_of_very_many_errors() -> None:
    with pytest.raises(UserError, match=r"; also .*; and 3 more$") as raised:
        GenerateRequest(model="a", prompt="b", **{f"wrong_{number}": 1 for number in range(9)})
    assert str(raised.value).count("; also ") == 5
