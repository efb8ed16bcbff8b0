"""The field that says which second model makes an image, as people write it; what cannot be is told under the names
and in the words of the request that it is a part of."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.request.decoder_fields import Decoder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError

STEPS = "expected a whole number from 1 to 999"
CFG = "expected a number from 1 \\(no guidance\\) to 100"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("b:10.5", f"decoder\\.steps: found '10\\.5', {STEPS}"),
        ("b:nan", f"decoder\\.steps: found 'nan', {STEPS}"),
        ("b:0", f"decoder\\.steps: found '0', {STEPS}"),
        ("b:5:nan", f"decoder\\.cfg: found 'nan', {CFG}"),
        ({"steps": True}, f"decoder\\.steps: found True, {STEPS}"),
        ({"steps": "abc"}, f"decoder\\.steps: found 'abc', {STEPS}"),
        ({"steps": 10**40}, f"decoder\\.steps: found 10+, {STEPS}"),
        ({"cfg": True}, f"decoder\\.cfg: found True, {CFG}"),
        ({"cfg": "x"}, f"decoder\\.cfg: found 'x', {CFG}"),
        ({"cfg": float("inf")}, f"decoder\\.cfg: found inf, {CFG}"),
        ({"cfg": 0.5}, f"decoder\\.cfg: found 0\\.5, {CFG}"),
        ({"model": 5}, "decoder\\.model: found 5, expected the name of a model"),
        (5, "decoder: found 5, expected NAME, NAME:STEPS"),
        ({"modle": "b"}, "did you mean 'model'"),
    ],
)
def test_what_cannot_be_is_told_by_the_field_of_the_request(said: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerateRequest(model="m", prompt="p", decoder=said)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"steps": "12", "cfg": "1.5"}, ("", 12, 1.5)),
        ({"steps": 12.0, "cfg": 2}, ("", 12, 2.0)),
        ({"model": "b", "steps": None, "cfg": None}, ("b", None, None)),
        (Decoder(model="b", steps=3), ("b", 3, None)),
    ],
)
def test_numbers_are_read_as_those_of_the_request_are(said: Any, meant: tuple[Any, ...]) -> None:
    decoder = GenerateRequest(model="m", prompt="p", decoder=said).decoder
    assert decoder is not None
    assert (decoder.model, decoder.steps, decoder.cfg) == meant
    assert type(decoder.steps) in (int, type(None))
