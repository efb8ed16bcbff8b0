"""Texts and lists of a request have bounds. Messages name the field, the value found, and the bound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.a1111.a1111_requests import Options, without_loras
from modelpool.actors.outputs.image_metadata import RECIPE_KEY, texts_in
from modelpool.actors.request.bounds import (
    MAX_ENTRIES,
    MAX_LORA_CHARACTERS,
    MAX_LORAS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    MAX_TEXT_CHARACTERS,
)
from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.image_fields import MAX_PARTS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.text.prompt_weights import MAX_BRACKETS, parse_weights
from modelpool.pool.values.core.errors import MOST_SHOWN, UserError

MANY = "x" * (MAX_PROMPT_CHARACTERS + 1)
LONG_NAME = "x" * (MAX_NAME_CHARACTERS + 1)
CONTROL = {"model": "canny"}


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": "x", **fields})


#: fields, and what their messages name
BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": MANY}, f"prompt: found '{len(MANY)} characters', expected up to {MAX_PROMPT_CHARACTERS}"),
    "prompt of 2 MB": ({"prompt": "(" * 1_000_000 + ")" * 1_000_000}, "prompt: found '2000000 characters'"),
    "negative": ({"negative": MANY}, f"negative: found '{len(MANY)} characters'"),
    "region": ({"regions": [{"prompt": MANY, "box": (0, 0, 8, 8)}]}, "regions.prompt: found"),
    "region as a text": ({"regions": ["0,0,8,8=" + MANY + LONG_NAME]}, "regions: found"),
    "regions": ({"regions": ["0,0,8,8=x"] * (MAX_PARTS + 1)}, f"regions: found '{MAX_PARTS + 1} entries'"),
    "all texts": (
        {"regions": [{"prompt": "x" * MAX_PROMPT_CHARACTERS, "box": (0, 0, 8, 8)}] * 3},
        f"expected up to {MAX_TEXT_CHARACTERS} in all",
    ),
    "model": ({"model": LONG_NAME}, f"model: found '{len(LONG_NAME)} characters'"),
    "sampler": ({"sampler": LONG_NAME}, "sampler: found"),
    "loras": ({"loras": ["light"] * 20_000}, f"loras: found '20000 entries', expected up to {MAX_LORAS}"),
    "loras by name": ({"loras": {str(place): 1 for place in range(101)}}, "loras: found '101 entries'"),
    "text of a LoRA": ({"loras": ["light:" + "1" * MAX_LORA_CHARACTERS]}, "loras: found"),
    "texts of a LoRA": ({"loras": [{"name": "light", "only": ["prompt"] * (MAX_ENTRIES + 1)}]}, "loras.only: found"),
    "blocks": (
        {"image_prompts": [{"model": "a", "faces": [1.0], "blocks": {str(i): 1 for i in range(MAX_ENTRIES + 1)}}]},
        "image_prompts.blocks: found",
    ),
    "controls": ({"controls": [CONTROL] * (MAX_PARTS + 1)}, "controls: found"),
    "options": ({"options": {f"pag.{place}": 1 for place in range(MAX_ENTRIES + 1)}}, "options: found"),
    "layers": ({"options": {"slg": {"layers": [1] * (MAX_ENTRIES + 1)}}}, "options.slg.layers: found"),
    "sigmas": ({"sigmas": list(range(2000, 0, -1))}, "sigmas: found '2000 entries'"),
    "sigmas as a text": ({"sigmas": "1," * 100_000}, "sigmas: found '200000 characters'"),
    "deadline": ({"deadline": "1" * 100_000 + "d"}, "deadline: found"),
    "hires": ({"hires": "2:" + "1" * 100_000}, "hires: found"),
    "frames": ({"video": ["a.png"] * 20_000}, "video: found '20000 frames'"),
}


def test_what_is_beyond_a_bound_is_refused_by_its_name() -> None:
    """A prompt of 2 MB delayed everybody's requests by 22 s, and 20,000 LoRAs took a thread for minutes."""
    found = {}
    for name, (fields, _) in BEYOND.items():
        with pytest.raises(UserError) as caught:
            request(**fields)
        found[name] = str(caught.value)
    wrong = {name: found[name][:200] for name, (_, expected) in BEYOND.items() if expected not in found[name]}
    assert wrong == {}
    assert max(map(len, found.values())) < 2 * MOST_SHOWN, "messages do not repeat what was sent"


def test_what_is_within_the_bounds_is_accepted() -> None:
    loras = [f"lora{place}:0.5@0-0.5" for place in range(MAX_LORAS)]
    found = request(prompt="x" * MAX_PROMPT_CHARACTERS, negative="y" * MAX_PROMPT_CHARACTERS, loras=loras)
    assert len(found.loras) == MAX_LORAS
    assert request(lyrics="x" * 100_000).lyrics is not None
    assert len(request(metadata={str(place): 1 for place in range(1200)}).metadata) == 1200
    assert len(request(sigmas=",".join(f"{1 - place / 1000:.17g}" for place in range(999))).sigmas) == 999


def test_half_a_character_is_refused_by_its_field(tmp_path: Path) -> None:
    """Found by a hostile user: such a prompt ran, and the entry of its output could not be written: an internal error.
    Job files and HTTP have refused it before."""
    path = os.fsdecode(os.fsencode(tmp_path / "a") + b"\xff.png")
    Image.new("RGB", (64, 64)).save(path)
    for name, fields in {
        "prompt": {"prompt": "a\ud800"},
        "negative": {"negative": "\udc80"},
        "passes.*prompt": {"passes": [{"prompt": "\ud800"}]},
        "regions.*prompt": {"regions": [{"prompt": "\ud800", "box": (0, 0, 64, 64)}]},
        "image": {"image": path},
        "image_prompts": {"image_prompts": [{"model": "m", "image": path}]},
        "video": {"video": [path]},
        "reference": {"reference": [path]},
    }.items():
        with pytest.raises(UserError, match=rf"^{name}.*half a character at \d+ \(a lone surrogate, U\+D"):
            request(**fields)
    assert request(prompt="\U0001f600").prompt == "\U0001f600"


def test_every_field_has_a_bound() -> None:
    for row in REQUEST_FIELDS.values():
        assert 0 < row.most_characters <= 1 << 18, row.name
        assert 0 < row.most_entries <= 1 << 14, row.name


def test_tags_in_a_prompt_have_a_bound() -> None:
    text = "<lora:light:1>"
    assert len(without_loras(text * MAX_LORAS, 20)[1]) == MAX_LORAS
    with pytest.raises(UserError, match=f"prompt: found '12500 texts <lora:...>', expected up to {MAX_LORAS}"):
        without_loras("<lora:x>" * 12_500, 20)
    with pytest.raises(UserError, match="prompt: found '280000 characters'"):
        without_loras(text * 20_000, 20)


def test_brackets_in_each_other_have_a_bound() -> None:
    with pytest.raises(UserError, match=f"more than {MAX_BRACKETS} brackets in each other"):
        parse_weights("(" * 30_000 + "cat" + ")" * 30_000)
    assert parse_weights("(" * 30_000)[0].weight == 1.0, "unpaired brackets are text"


def test_patterns_take_the_time_of_their_text() -> None:
    """Each took the square of the text's length: seconds to hours, during which no other thread runs."""
    count = 1_000_000
    spaces = " " * count
    with pytest.raises(UserError, match="sd_model_checkpoint: found"):
        Options().changed({"sd_model_checkpoint": f"a{spaces}b"})
    short = " " * (MAX_LORA_CHARACTERS - 20)
    with pytest.raises(UserError):
        request(loras=[f"light:te=x{short}x"] * 50)
    with pytest.raises(UserError):
        request(loras=["light:" + "1" * (MAX_LORA_CHARACTERS - 20) + "x"] * 50)
    image = Image.new("RGB", (8, 8))
    image.info["xmp"] = f"<modelpool:{RECIPE_KEY}>".encode() * (count // 20)
    assert texts_in(image) == {}
