"""Which of the models that are there makes images of what another one makes, and the message where none does."""

from __future__ import annotations

import pytest

from modelpool.pool.catalog.decoders import choose_decoder, decoder_titles
from modelpool.pool.catalog.registry.listings import ModelListing
from modelpool.pool.values.core.errors import MissingParts, UnusableField

FAMILIES = ("cascade_b",)
(TITLE,) = decoder_titles(FAMILIES)


def listing(path: str, family: str = TITLE, problem: str = "") -> ModelListing:
    return ModelListing(path.rpartition("/")[2], path, family, 1, problem=problem)


def damaged(path: str) -> ModelListing:
    return listing(path, "", f"{path}.safetensors: truncated")


def among(*listings: ModelListing) -> str:
    return choose_decoder(listings, "c", "/near/c", FAMILIES)


def test_the_one_in_the_same_folder_comes_before_all_others() -> None:
    assert among(listing("/far/b1"), listing("/near/b2"), listing("/near/else", "Stable Diffusion 1")) == "b2"
    assert among(listing("/far/b1"), damaged("/near/b2")) == "b1"
    with pytest.raises(UnusableField, match="expected one of 'b1', 'b2'"):
        among(listing("/far/b1"), listing("/far/b2"))


def test_a_damaged_one_beside_the_first_is_named_with_what_is_wrong() -> None:
    """Found: its user was told to put a file there, which lay there."""
    with pytest.raises(MissingParts, match=r"field decoder\. Unusable files there: /near/b\.safetensors: truncated$"):
        among(damaged("/near/b"), damaged("/far/b"), listing("/near/c", "Stable Cascade C"))


def test_of_many_damaged_ones_some_are_told() -> None:
    with pytest.raises(MissingParts) as told:
        among(*(damaged(f"/near/b{number}") for number in range(8)))
    assert str(told.value).count("truncated") == 5
    assert str(told.value).endswith("; and 3 more")


def test_nothing_is_told_of_problems_where_there_are_none() -> None:
    with pytest.raises(MissingParts, match=r"field decoder$"):
        among(listing("/near/c", "Stable Cascade C"), damaged("/far/b"))
