"""LoRAs in every form that they are written in: strings of users and of A1111, mappings, JSON; and written as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.http.a1111.a1111_requests import without_loras
from modelpool.actors.request.lora_fields import LoraChoice, lora_text, parse_lora
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.lora_names.blocks import numbered_factors
from modelpool.pool.values.core.errors import UserError

_LIST_12 = "1,0.5,0,0,1,0,1,1,1,1,1,1"


def choice(said: Any) -> LoraChoice:
    (found,) = GenerateRequest(model="m", prompt="p", loras=[said]).loras
    return found


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("light:0.8@0-0.5", {"strength": 0.8, "end": 0.5}),
        ("light:0.8@0.25-", {"strength": 0.8, "start": 0.25}),
        ("light:-1@-.5", {"strength": -1, "end": 0.5}),
        ("light:0.5:0.8", {"text_strength": 0.5, "strength": 0.8}),
        ("light:te=0.5:unet=0.8", {"text_strength": 0.5, "strength": 0.8}),
        ("light:0.8:te=0", {"text_strength": 0, "strength": 0.8}),
        ("light:te=0.5", {"text_strength": 0.5, "strength": 0.5}),
        ("light:0.8:steps=0.5-1:low", {"strength": 0.8, "start": 0.5, "noise": "low"}),
        ("light:0.8:lbw=IN04*0.5,mid*0", {"strength": 0.8, "blocks": {"MID": 0, "IN04": 0.5}}),
        (f"light:0.8:lbw={_LIST_12}", {"strength": 0.8, "blocks": [float(n) for n in _LIST_12.split(",")]}),
        ("light:1:1:lbw=OUTALL", {"text_strength": 1, "blocks": numbered_factors([1] + [0] * 7 + [1] * 9)}),
        ("light:0.2@0,1@0.5", {"keyframes": [[0, 0.2], [0.5, 1]]}),
        ("light:0.2@0,1@.5:interpolation=ease-in", {"keyframes": {0: 0.2, 0.5: 1}, "interpolation": "ease_in"}),
        ("light:0.5:0.2@0,-1@0.5", {"text_strength": 0.5, "strength": -1, "keyframes": "0.2@0,-1@0.5"}),
        ("light:te=0.5:keyframes=0.2@0,1@0.5", {"text_strength": 0.5, "keyframes": [[0.5, 1], [0, 0.2]]}),
        ("light:0.8:only=Negative,region0", {"strength": 0.8, "only": ["region0", "negative"]}),
        ("light:0.8:only=negative,positive", {"strength": 0.8}),
        ("C:/loras/light.safetensors:0.5@0-0.5", {"name": "C:/loras/light.safetensors", "strength": 0.5, "end": 0.5}),
    ],
)
def test_a_short_form_means_the_same_as_its_fields(said: str, fields: dict[str, Any]) -> None:
    assert choice(said) == choice({"name": "light", **fields})


def test_loras_may_be_a_mapping() -> None:
    said = {"light": 0.8, "outline": "0.5@0-0.5", "thick": {"strength": 1, "text_strength": 0}}
    found = GenerateRequest(model="m", prompt="p", loras=said).loras
    assert found == (choice("light:0.8"), choice("outline:0.5@0-0.5"), choice("thick:0:1"))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("light:0.8@0.5-0.5", "loras.start, loras.end: found '0.5 to 0.5'"),
        ("light:0.8@x", "loras: found 'x', expected the part of the schedule"),
        ("light:1:2:3", "up to two strengths"),
        ("light:0.2@0.1,1@0.5", "loras.keyframes: found .*, expected strengths with the share .*, the first from 0"),
        ("light:0.2@0,1@1.5", r"loras.keyframes: found \['1.5', '1'\]"),
        ("light:0.2@0,1@0", r"loras.keyframes: found \['0', '1'\], expected 0 once"),
        ({"name": "light", "keyframes": [[k / 40, 1] for k in range(33)]}, "loras.keyframes: .* up to 32"),
        ({"name": "light", "keyframes": [[0, float("nan")]]}, "loras.keyframes"),
        ({"name": "light", "strength": 0.8, "keyframes": [[0, 1]]}, "loras.strength: found 0.8, expected .* keyframes"),
        ({"name": "light", "interpolation": "linear"}, "loras.interpolation: found 'linear', expected two keyframes"),
        ("light:0.2@0,1@0.5:interpolation=cubic", "loras.interpolation: found 'cubic', expected linear, ease_in"),
        ("light:0.8:only=region", "loras.only: found 'region', expected positive, negative, prompt, regions, or"),
        (
            "light:0.8@0-0.3:0.4@0.3-1",
            r'found .0.4@0.3-1., .*twice, as in "light:0.8@0-0.3" and "light:0.4@0.3-1"',
        ),
        ("light:0.8@0-0.3:steps=0.3-1", "one part of the schedule for each use of a LoRA"),
        ("light:0.8:stop=5", "steps= with fractions"),
        ("light:0.8:lbw=1,2,3", "loras.blocks: found '3 numbers', expected 12, 17, 20, 26 numbers"),
        ({"name": "light", "blocks": {"IN04": "x"}}, "loras.blocks: found 'x'"),
        ({"name": "light", "strength": float("nan")}, "finite"),
        ({"name": "light", "strenght": 1}, "did you mean 'strength'"),
    ],
)
def test_what_is_no_lora_is_named(said: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        choice(said)


def test_seeds_of_job_files_do_not_depend_on_fields_that_are_not_used() -> None:
    assert choice("light:0.8").model_dump() == {"name": "light", "strength": 0.8}


def test_a1111_prompts_have_the_same_forms_with_steps_as_numbers() -> None:
    prompt = (
        f"a <lora:light:0.5:0.8> b <lora:thin:1:lbw={_LIST_12}:stop=5> <lora:thick:1:step=5-10><lora:odd:1:start=15>"
    )
    text, loras = without_loras(prompt, 20)
    assert text == "a  b"
    assert loras == tuple(
        choice(said) for said in ("light:0.5:0.8", f"thin:1@0-0.25:lbw={_LIST_12}", "thick:1@0.25-0.5", "odd:1@0.75-")
    )
    with pytest.raises(UserError, match="prompt: <lora:light:much>: strength: found 'much', expected a number"):
        without_loras("<lora:light:much>", 20)


@given(
    st.builds(
        LoraChoice,
        name=st.just("light"),
        strength=st.integers(-40, 40).map(lambda n: n / 10),
        text_strength=st.none() | st.integers(-40, 40).map(lambda n: n / 10),
        end=st.sampled_from([1.0, 0.5, 0.25]),
        noise=st.sampled_from(["", "low"]),
        blocks=st.sampled_from([(), (("IN04", 0.5), ("MID", 0.0))]),
        only=st.sampled_from([(), ("negative",), ("prompt", "region12")]),
    )
    | st.builds(
        LoraChoice,
        name=st.just("light"),
        text_strength=st.none() | st.integers(-40, 40).map(lambda n: n / 10),
        start=st.sampled_from([0.0, 0.25]),
        keyframes=st.sampled_from([((0.0, 0.2), (0.5, 1.0)), ((0.0, -1.0), (0.25, 0.0), (1.0, 1.0))]),
        interpolation=st.sampled_from(["", "linear", "ease_in_out"]),
    )
)
def test_a_lora_as_text_is_read_back(lora: LoraChoice) -> None:
    assert LoraChoice(**parse_lora(lora_text(lora.name, lora))) == lora
