"""Names of files: safe in every folder whatever a request contains, and refused where they cannot mean anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.request.name_template import MAX_NAME_BYTES, NAME_FIELDS, NameTemplate, safe_stem
from modelpool.pool.values.core.errors import UnknownName, UnusableField


@given(st.text())
def test_a_name_is_one_file_in_its_folder_whatever_it_is_made_of(text: str) -> None:
    stem = safe_stem(text)
    assert stem
    assert not stem.startswith((".", "-"))
    assert len(stem.encode()) <= MAX_NAME_BYTES + len("output-")
    assert not any(character in stem for character in "/\\\0:*?<>|\n ")


def test_reserved_names_are_not_those_of_outputs() -> None:
    assert [safe_stem(name) for name in ("Contact_Sheet", "manifest", "..", "CON")] == [
        "output-Contact_Sheet",
        "output-manifest",
        "output",
        "CON",
    ]


def test_fields_are_filled_in_and_numbers_padded() -> None:
    template = NameTemplate.of("{{{id}}}-{index:04}_{seed}{line}")
    assert template.stem({"id": "a/b", "index": 7, "seed": 3, "line": None}) == "a-b--0007_3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{sed}", "did you mean 'seed'? Known: digest, height, id, index, line, model, prompt, seed, steps, width"),
        ("{seed.__class__}", "unknown field of --name 'seed.__class__'"),
        ("{seed[0]}", "unknown field of --name"),
        ("{}", "unknown field of --name ''"),
        ("{seed!r}", "fields without a format"),
        ("{id:10}", "fields without a format"),
        ("{seed:>999999999}", "fields without a format"),
        ("../{seed}", "it has no folders"),
        ("a\\\\{seed}", "it has no folders"),
        ("{seed", "a text with fields"),
        ("fixed", "at least one field"),
        ("", "a text with fields"),
        (5, "a text with fields"),
        ("{seed}" * 100, "600 characters"),
    ],
)
def test_a_template_that_names_nothing_is_refused(text: object, message: str) -> None:
    with pytest.raises((UnknownName, UnusableField)) as raised:
        NameTemplate.of(text, "--name")
    assert message in str(raised.value)


def test_every_field_is_accepted() -> None:
    assert NameTemplate.of("-".join(f"{{{name}}}" for name in NAME_FIELDS)).stem({"id": "x"})
