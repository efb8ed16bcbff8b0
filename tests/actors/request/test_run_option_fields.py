"""Options of a run: their forms in a request and on the command line, their ranges, and the way through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelpool.actors.request.option_words import option_words
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import (
    MAIN_SETTING,
    NO_OPTIONS,
    RUN_OPTIONS,
    AttentionScale,
    BlockScale,
    DeepCache,
    FreeU,
    PerturbedAttention,
    RotaryPositions,
    RunOptions,
    SkipLayers,
    limits_of,
)

ATTENTION = AttentionScale(image=(("IN04", 0.5), ("MID", 0.0)))
#: settings of options that change nothing by their defaults
CHANGES: dict[str, Any] = {
    "rope": {"scale_x": 0.5},
    "attention_scale": {"text": (("IN04", 0.5),)},
    "block_scale": {"blocks": (("D", 0.5),)},
}


def request(options: Any, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="p", options=options, **fields)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"freeu": True}, RunOptions(freeu=FreeU())),
        ({"freeu": "on", "pag": "off", "sag": False, "slg": None}, RunOptions(freeu=FreeU())),
        ({"pag": 2}, RunOptions(pag=PerturbedAttention(2.0))),
        ({"pag": "2.5"}, RunOptions(pag=PerturbedAttention(2.5))),
        ({"pag.scale": "2", "pag.end": 0.5}, RunOptions(pag=PerturbedAttention(2.0, end=0.5))),
        ({"pag": "on", "pag.end": "0.5"}, RunOptions(pag=PerturbedAttention(end=0.5))),
        ({"pag.end": "0.5", "pag": 4}, RunOptions(pag=PerturbedAttention(4.0, end=0.5))),
        ({"slg": {"layers": "9, 7"}}, RunOptions(slg=SkipLayers(layers=(7, 9)))),
        ({"slg.layers": 7}, RunOptions(slg=SkipLayers(layers=(7,)))),
        ({"deepcache": {}}, RunOptions(deepcache=DeepCache())),
        ({"attention_scale": {"image": {"mid": 0, "in4": "0.5"}}}, RunOptions(attention_scale=ATTENTION)),
        ({"attention_scale.image": "MID*0,IN04*0.5"}, RunOptions(attention_scale=ATTENTION)),
        ({"block_scale.blocks": [["d7", -1]]}, RunOptions(block_scale=BlockScale((("D07", -1.0),)))),
        ({"rope.scale_x": "0.5", "rope.shift_y": -2}, RunOptions(rope=RotaryPositions(scale_x=0.5, shift_y=-2.0))),
        ({"pag": "off"}, None),
        ({}, None),
        (None, None),
        (RunOptions(freeu=FreeU()), RunOptions(freeu=FreeU())),
        (NO_OPTIONS, None),
    ],
    ids=str,
)
def test_every_form_of_an_option_is_read(options: Any, expected: RunOptions | None) -> None:
    found = request(options)
    assert found.options == expected
    assert found.run_options == (expected or NO_OPTIONS)
    again = GenerateRequest(**json.loads(json.dumps(found.model_dump(mode="json", exclude_unset=True))))
    assert again.options == expected


def test_fields_of_some_models_may_be_among_the_options() -> None:
    found = request({"motion": 127, "freeu": True})
    assert (found.motion, found.options) == (127, RunOptions(freeu=FreeU()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frieu": True}, r"option.*'frieu'.*freeu"),
        ({"pag": {"scala": 2}}, r"setting of options\.pag.*'scala'.*scale"),
        ({"pag": {"scale": -1}}, r"options\.pag\.scale: found -1, expected a number from 0 to 100"),
        ({"pag": "much"}, r"options\.pag: found 'much', expected on, off, a number"),
        ({"freeu": 2}, r"options\.freeu: found 2, expected on, off"),
        ({"freeu.version": 3}, r"options\.freeu\.version: found 3, expected a whole number from 1 to 2"),
        ({"freeu.levels": "rows"}, r"options\.freeu\.levels: found 'rows', expected channels or blocks"),
        ({"slg": {"layers": []}}, r"options\.slg\.layers"),
        ({"slg": {"layers": [True]}}, r"options\.slg\.layers: found True"),
        ({"pag": {"start": 0.5, "end": 0.5}}, r"options\.pag\.end: found 0\.5, expected a number above start, 0\.5"),
        ({"tiled": {"tile": 128}}, r"options\.tiled\.overlap: found 128, expected less than tile, 128"),
        ({"rope": True}, r"options\.rope: found 'the positions of the model', expected a scale or a shift"),
        ({"rope": {"scale_x": -1}}, r"options\.rope\.scale_x: found -1, expected a number from 0 to 100"),
        ({"block_scale": True}, r"options\.block_scale: found 'no blocks', expected factors by block"),
        ({"attention_scale.image": "MID"}, r"options\.attention_scale\.image: found \['MID'\], expected factors"),
        ({"block_scale.blocks": "D07*11"}, r"options\.block_scale\.blocks D07: found '11', expected a number from -10"),
        ({"pag": 2, "pag.scale": 3}, r"options\.pag: found 'scale', expected scale once"),
        ({"pag": "off", "pag.scale": 3}, r"options\.pag: found 'off', expected on, together with pag\.scale"),
        ("freeu", r"options: found 'freeu'"),
    ],
    ids=str,
)
def test_what_an_option_cannot_be_is_named(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(options)


def test_words_of_the_command_line_become_options() -> None:
    assert option_words(["freeu", "pag=3", "slg.layers=7,8"]) == {
        "options": {"freeu": "on", "pag": "3", "slg.layers": "7,8"}
    }
    for words in (["=on"], ["pag="], ["pag=1", "pag=2"]):
        with pytest.raises(UserError, match="--option"):
            option_words(words)


def test_the_table_describes_every_setting() -> None:
    """Defaults are within their limits, and the main setting of each option exists."""
    for name, kind in RUN_OPTIONS.items():
        one = kind(**CHANGES.get(name, {}))
        settings = {key: getattr(one, key) for key in limits_of(kind)}
        defaults: Any = {name: one}
        assert request({name: settings}).options == RunOptions(**defaults)
        assert MAIN_SETTING.get(name, next(iter(settings))) in settings
    assert list(RUN_OPTIONS) == [*RunOptions.__dataclass_fields__]
