"""Prompt weights are read as people write them, and a text that only looks like the notation stays text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.models.text.prompt_weights import WeightedText, parse_weights
from modelpool.pool.values.core.errors import UnusableField
from tests.each_case import each_case


def parsed(text: str) -> list[tuple[str, float]]:
    return [(part.text, round(part.weight, 6)) for part in parse_weights(text)]


NOTATION = {
    "": [],
    "a cat": [("a cat", 1.0)],
    "a (cat)": [("a ", 1.0), ("cat", 1.1)],
    "a ((cat))": [("a ", 1.0), ("cat", 1.21)],
    "a (cat:1.3) here": [("a ", 1.0), ("cat", 1.3), (" here", 1.0)],
    "(cat:.5)": [("cat", 0.5)],
    "(cat:2)": [("cat", 2.0)],
    "(cat:2.)": [("cat", 2.0)],
    "(cat: 1.5 )": [("cat", 1.5)],
    "(cat:-1)": [("cat", -1.0)],
    "(cat:+1.5)": [("cat", 1.5)],
    "(cat:0)": [("cat", 0.0)],
    "(cat:1.0) dog": [("cat dog", 1.0)],
    "(a (b:1.2) c:1.5)": [("a ", 1.5), ("b", 1.8), (" c", 1.5)],
    "((a:1.2))": [("a", 1.32)],
    "((a):1.5)": [("a", 1.65)],
    "(a)(b)": [("ab", 1.1)],
    "12:30 (at 12:30)": [("12:30 ", 1.0), ("at 12", 30.0)],
}

TEXT = {
    r"a \(cat\)": [("a (cat)", 1.0)],
    r"(a \(cat\):1.5)": [("a (cat)", 1.5)],
    r"(cat\)": [("(cat)", 1.0)],
    r"C:\dir \n \\": [(r"C:\dir \n \\", 1.0)],
    "(cat": [("(cat", 1.0)],
    "cat)": [("cat)", 1.0)],
    ")(": [(")(", 1.0)],
    "((cat)": [("(", 1.0), ("cat", 1.1)],
    "(cat))": [("cat", 1.1), (")", 1.0)],
    "(a (b:1.5)": [("(a ", 1.0), ("b", 1.5)],
    "()": [],
    "(())": [],
    ":)": [(":)", 1.0)],
    "(:3)": [(":3", 1.1)],
    "(cat:)": [("cat:", 1.1)],
    "(cat:nice)": [("cat:nice", 1.1)],
    "(cat:1.2.3)": [("cat:1.2.3", 1.1)],
    "(cat:1e3)": [("cat:1e3", 1.1)],
    "(cat:nan)": [("cat:nan", 1.1)],
    "(cat:inf)": [("cat:inf", 1.1)],
    "(cat:1_0)": [("cat:1_0", 1.1)],
    "[cat]": [("[cat]", 1.0)],
}


@pytest.mark.parametrize("text", NOTATION)
def test_notation(text: str) -> None:
    assert parsed(text) == NOTATION[text]


@each_case("text", TEXT)
def test_what_is_no_notation_is_text(text: str) -> None:
    assert parsed(text) == TEXT[text]


prompts = st.text(st.sampled_from("ab (): \\.12-"), max_size=40)


@given(prompts)
def test_parts_are_finite_neighbours_differ_and_no_part_is_empty(text: str) -> None:
    parts = parse_weights(text)
    assert all(part.text and math.isfinite(part.weight) for part in parts)
    assert all(a.weight != b.weight for a, b in itertools.pairwise(parts))


@given(prompts)
def test_nothing_is_invented(text: str) -> None:
    """What comes out is what went in, with characters of the notation left out and none moved."""
    out = "".join(part.text for part in parse_weights(text))
    left = iter(text)
    assert all(character in left for character in out)


@given(st.text(st.characters(exclude_characters="()\\")))
def test_a_text_without_brackets_and_backslashes_is_itself(text: str) -> None:
    assert parse_weights(text) == ((WeightedText(text, 1.0),) if text else ())


@given(st.text())
def test_an_escaped_text_is_itself(text: str) -> None:
    plain = text.replace("\\", "/")
    escaped = plain.replace("(", r"\(").replace(")", r"\)")
    assert parse_weights(escaped) == ((WeightedText(plain, 1.0),) if plain else ())


@given(prompts, st.floats(0.1, 4.0).map(lambda w: round(w, 3)))
def test_a_weight_around_a_balanced_text_multiplies_every_part(text: str, weight: float) -> None:
    inner = "x" + text.replace("\\", "").replace("(", "").replace(")", "") + "(y)z"
    around = parse_weights(f"({inner}:{weight})")
    assert [p.text for p in around] == [p.text for p in parse_weights(inner)]
    for whole, part in zip(around, parse_weights(inner), strict=True):
        assert whole.weight == part.weight * weight


@given(st.integers(0, 300))
def test_brackets_multiply(depth: int) -> None:
    parts = parse_weights("(" * depth + "cat" + ")" * depth)
    assert len(parts) == 1
    assert math.isclose(parts[0].weight, 1.1**depth)


@pytest.mark.parametrize("piece", ["(a", "a)", "(a:1.5)", "(:1 ", "(a:1", r"\(", "()"])
def test_long_prompts_cost_their_length(piece: str) -> None:
    """A first version took the square of the brackets' number: minutes for these, which ends at the tests' timeout."""
    parts = parse_weights(piece * 100_000 + ")")
    assert len(parts) <= 3


def test_deep_nesting_is_no_recursion() -> None:
    assert parse_weights("(" * 5000 + "cat")[0] == WeightedText("(" * 5000 + "cat", 1.0)


def test_a_weight_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(UnusableField, match="prompt weight: found inf, expected a finite weight"):
        parse_weights(f"(cat:{'9' * 400})")
    with pytest.raises(UnusableField):
        parse_weights("(" * 8000 + "cat" + ")" * 8000)
