"""Notations of other programs in prompts cause a warning that names them: the image shows nothing of them."""

from __future__ import annotations

import time

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.prompt_syntax import prompt_warnings
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import FakeCatalog
from tests.each_case import each_case


def warned(prompt: str, **fields: object) -> list[str]:
    return list(prompt_warnings(GenerateRequest(model="shapes", prompt=prompt, seed=1, **fields)))


@each_case(
    ("prompt", "notation", "instead"),
    (
        ("a circle <lora:light:0.8>", "<lora:light:0.8>", "loras"),
        ("a circle <lora:light:0.8", "<lora:light:0.8", "loras"),
        ("a circle <hypernet:x:1>", "<hypernet:x:1>", "hypernetworks"),
        ("a circle <LORA:light:1>", "<LORA:light:1>", "loras"),
        ("a circle < lora : my light:1 >", "< lora : my light:1 >", "loras"),
        ("a circle <locon:light:1>", "<locon:light:1>", "loras"),
        ("a circle <Hypernet:x y>", "<Hypernet:x y>", "hypernetworks"),
        ("a circle --ar 16:9 --v 6", "--ar 16:9", "fields of the request"),
        ("a circle --steps 4", "--steps 4", "fields of the request"),
        ("a circle --tile", "--tile", "fields of the request"),
        ("a [red:blue:0.5] circle", "[red:blue:0.5]", "over the steps"),
        ("a [red:10] circle", "[red:10]", "over the steps"),
        ("a [red|blue] circle", "[red|blue]", "over the steps"),
        ("a __color__ circle", "__color__", "wildcards"),
        ("a __my_words/color__ circle", "__my_words/color__", "wildcards"),
        ("a {red|blue} circle", "{red|blue}", "alternative"),
        ("a (red:1e9) circle", "(red:1e9)", "number"),
        ("a (red:1,2) circle", "(red:1,2)", "number"),
        ("a (red:1.2.3) circle", "(red:1.2.3)", "number"),
        ("a (red:nan) circle", "(red:nan)", "number"),
        ("a (red:inf) circle", "(red:inf)", "number"),
        ("a (red: -Infinity ) circle", "(red: -Infinity )", "number"),
        ("a (red:1.2", "(red:1.2", "closing bracket"),
        ("a (red:1.2, a square", "(red:1.2", "closing bracket"),
        ("a circle AND a square", "AND", "regions"),
    ),
)
def test_a_notation_that_is_not_read_is_told(prompt: str, notation: str, instead: str) -> None:
    """Each of them made an image without a word about it."""
    (message,) = warned(prompt)
    assert message.startswith(f"prompt: found {notation!r}, which is read as text: ")
    assert instead in message


@each_case(
    "prompt",
    (
        "a (red:1.2) circle",
        "a ((red)) circle, (blue: .5)",
        "a smile :) and (a note: blue)",
        "a clock (12:30 in the morning)",
        "a (grade: e) and (a sign: +-) and (bread: nan bread) and (info: informal)",
        "CATS AND DOGS",
        "a circle BREAK a square",
        "a [red] circle",
        'a {"json": "x|y"} text, snake_case__name, a|b',
        "(a (b) c:1.2)",
        "the scale [1:2]x",
        "a circle -- a square --nothing else, --and-so on",
        "a < b, <b>: c, <tag>",
        "()",
        "a (()) circle ()",
        "",
    ),
)
def test_words_and_weights_cause_no_warning(prompt: str) -> None:
    assert [each for each in warned(prompt) if "[1:2]" not in each] == []


def test_a_weight_that_no_image_survives_is_told() -> None:
    assert warned("a (red:1000) circle") == ["prompt: found the weight 1000 of 'red', expected up to 10"]


def test_negative_prompts_and_regions_are_looked_at_too() -> None:
    found = warned("a", negative="<lora:x:1>", regions=["0,0,8,8=__color__"])
    assert [each.partition(":")[0] for each in found] == ["negative", "regions.0.prompt"]


def test_the_warning_is_in_the_recipe_and_changes_no_id() -> None:
    plain, _ = build_graph(GenerateRequest(model="shapes", prompt="a", seed=1), JobId("a"), FakeCatalog())
    recipe, _ = build_graph(GenerateRequest(model="shapes", prompt="a __w__", seed=1), JobId("a"), FakeCatalog())
    assert plain.warnings == ()
    assert "wildcards" in recipe.warnings[0]


def test_long_prompts_are_searched_in_linear_time() -> None:
    """Others would wait: the catalog reads a prompt of a caller at a time."""

    def seconds(text: str) -> float:
        begins = []
        for _ in range(3):
            began = time.process_time()
            warned(text)
            begins.append(time.process_time() - began)
        return min(begins)

    for piece in (
        "(a:1",
        "[a:",
        "[a|",
        "{a|",
        "__a",
        "<lora:",
        "(a" * 100 + ":",
        "_a",
        "1.1,",
        "(a:1,1,",
        "< lora :a ",
        "--ar ",
    ):
        short = seconds(piece * (8_000 // len(piece)))
        long = seconds(piece * (64_000 // len(piece)))
        assert long < 32 * short + 0.05, f"{piece[:10]}: {short} s, 8 times as long: {long} s"
