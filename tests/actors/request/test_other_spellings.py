"""Fields as clients of other programs write them are understood, or the message says which field to write."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.other_names import OTHER_NAMES
from modelpool.actors.request.requests import SPELLINGS, GenerateRequest
from modelpool.pool.values.core.errors import UserError


def made(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="p", **fields)


def test_a_size_is_width_and_height() -> None:
    for size in ("512x768", "512X768", " 512 x 768 ", "512\u00d7768", [512, 768], ("512", "768")):
        assert (made(size=size).width, made(size=size).height) == (512, 768), size
    assert made(size=None).width is None
    for fields, said in (
        ({"size": "big"}, "size: found 'big', expected WIDTHxHEIGHT in pixels, such as 512x768"),
        ({"size": 512}, "size: found 512"),
        ({"size": [512]}, "size: found"),
        ({"size": "513x768"}, "width: found 513"),
        ({"size": "64x64", "width": 64}, "it, or width and height, not both"),
    ):
        with pytest.raises(UserError, match=r"(width|size): found") as refused:
            made(**fields)
        assert said in str(refused.value)


def test_one_lora_needs_no_list() -> None:
    for loras in ("light:0.8", {"name": "light", "strength": 0.8}, {"light": 0.8}, ["light:0.8"], [("light", 0.8)]):
        (lora,) = made(loras=loras).loras
        assert (lora.name, lora.strength) == ("light", 0.8), loras
    assert made(loras="").loras == ()
    assert [each.name for each in made(loras={"name": 0.5, "light": 1}).loras] == ["name", "light"]


def test_every_name_of_another_program_is_understood_or_leads_to_the_field() -> None:
    wrong = []
    for name, field in OTHER_NAMES.items():
        if field not in REQUEST_FIELDS:  # an option of commands
            continue
        try:
            made(**{name: "1"})
        except UserError as refused:
            if f"did you mean {field!r}?" not in str(refused) and name not in SPELLINGS:
                wrong.append((name, str(refused)))
        else:
            wrong += [] if SPELLINGS.get(name) == field else [(name, "accepted")]
    assert not wrong
