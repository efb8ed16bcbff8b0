"""What a request says of a model that is two diffusion models, as people write it; what cannot be is told under the
names of the request."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.values.core.errors import UserError


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="p", **fields)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (3, (3.0, None)),
        ("3.5", (3.5, None)),
        ("3:0.9", (3.0, 0.9)),
        (":0.9", (None, 0.9)),
        ({"cfg": "2"}, (2.0, None)),
        ({"boundary": 0}, (None, 0.0)),
        (LowNoiseRun(cfg=2, boundary=1), (2.0, 1.0)),
    ],
)
def test_a_run_of_the_second_model_is_read(said: Any, meant: tuple[Any, ...]) -> None:
    run = request(low_noise=said).low_noise
    assert run is not None
    assert (run.cfg, run.boundary) == meant


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "low_noise: found '', expected CFG or CFG:BOUNDARY"),
        (True, "low_noise: found True, expected CFG or CFG:BOUNDARY"),
        ([3], "low_noise: found .*, expected CFG or CFG:BOUNDARY"),
        ("much", r"low_noise\.cfg: found 'much', expected a number from 1"),
        ("0.5", r"low_noise\.cfg: found '0\.5', expected a number from 1"),
        ("3:875", r"boundary: found '875', expected .* to 1 \(it runs only steps from pure noise\)"),
        ({"boundary": float("nan")}, r"low_noise\.boundary: found nan"),
        ({"boundry": 0.9}, "did you mean 'boundary'"),
    ],
)
def test_what_cannot_be_is_told_by_the_field(said: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(low_noise=said)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("light", ("light", 1.0, "")),
        ("light:0.8", ("light", 0.8, "")),
        ("light:0.8:low", ("light", 0.8, "low")),
        ("light:high", ("light", 1.0, "high")),
        ("C:/loras/light.safetensors:0.5:LOW", ("C:/loras/light.safetensors", 0.5, "low")),
        (("light", 0.8), ("light", 0.8, "")),
        (["light", 0.8, "high"], ("light", 0.8, "high")),
        ({"name": "light", "noise": "Low"}, ("light", 1.0, "low")),
    ],
)
def test_a_lora_says_for_which_of_two_models_it_is(said: Any, meant: tuple[Any, ...]) -> None:
    (lora,) = request(loras=(said,)).loras
    assert (lora.name, lora.strength, lora.noise) == meant
    assert LoraChoice.model_validate(said) == lora


def test_another_word_for_a_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"loras\.noise: found 'middle', expected one of 'high', 'low', or nothing"):
        request(loras=({"name": "light", "noise": "middle"},))
