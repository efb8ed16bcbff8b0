"""What `modelpool inspect` shows of a recipe: all that makes the image, so that different recipes look different."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from modelpool.actors.cli.models.recipe_table import recipe_facts
from modelpool.actors.graph.features.recipe import RecipeControl, RecipeImagePrompt, RecipeImages, RecipeRegion
from tests.actors.graph.test_recipe import OTHER, RECIPE
from tests.each_case import each_case

CONTROL = RecipeControl("canny", "aa", "bb", "edges.png", 0.5, 0.0, 1.0)
IMAGES = RecipeImages("11", "photo.png", "22", "hole.png", 10, True, controls=(CONTROL,), reference_sha256="33")
OTHERS: dict[str, Any] = {
    "image_sha256": "1x", "image_file": "other.png", "mask_sha256": "2x", "mask_file": "half.png", "first_step": 5,
    "paste": False, "hires": {"scale": 2.0, "strength": 0.5, "steps": None, "via": "latent"},
    "controls": (replace(CONTROL, end=0.6),), "regions": (RecipeRegion("a red circle", 9.0, (0, 8, 32, 64), ""),),
    "reference_sha256": "3x", "reference_file": "chair.png", "more_references": ("44",),
    "more_reference_files": ("table.png",), "reference_as": "whole", "last_image_sha256": "55",
    "last_image_file": "end.png", "video_sha256": "66", "video_file": "kite.mp4", "video_mask_sha256": "77",
    "video_mask_file": "moving.mp4", "face_video_sha256": "78", "face_video_file": "face.mp4",
    "image_prompts": (RecipeImagePrompt("plus", "88", "clip", "99", 0.7, 0.0, 0.5, ("aa",), ("cat.png",)),),
    "image_cfg": 1.5, "noise_level": 20,
}  # fmt: skip
#: names of files are shown beside hashes
BESIDE = {"more_reference_files": "more_references", "last_image_file": "last_image_sha256"}
BESIDE |= {"video_file": "video_sha256", "video_mask_file": "video_mask_sha256"}
BESIDE |= {"face_video_file": "face_video_sha256"}


def shown(recipe: Any) -> list[tuple[str, str]]:
    """Without its digest, which tells all recipes from each other."""
    return [fact for fact in recipe_facts(recipe) if fact[0] != "recipe"]


# a format is the ending of the file; an audio clip has no size
@each_case("field", sorted(OTHER.keys() - {"format", "frame_rate", "motion", "image_noise", "elevation"}))
def test_every_field_of_the_digest_is_shown(field: str) -> None:
    assert shown(replace(RECIPE, **{field: OTHER[field]})) != shown(RECIPE)


@pytest.mark.parametrize("field", ["frame_rate", "motion", "image_noise", "elevation"])
def test_every_field_of_a_video_is_shown(field: str) -> None:
    video = replace(RECIPE, frames=5, format="mp4")
    assert shown(replace(video, **{field: OTHER[field]})) != shown(video)


@each_case("field", sorted(OTHERS))
def test_every_field_of_what_it_was_made_from_is_shown(field: str) -> None:
    beside = {BESIDE[field]: OTHERS[BESIDE[field]]} if field in BESIDE else {}
    before = replace(IMAGES, **beside)
    after = replace(before, **{field: OTHERS[field]})
    assert shown(replace(RECIPE, pictures=after)) != shown(replace(RECIPE, pictures=before))
    assert {each.name for each in fields(RecipeImages)} == set(OTHERS)


@pytest.mark.parametrize(
    "other",
    [{"name": "depth"}, {"sha256": "ax"}, {"image_sha256": "bx"}, {"image_file": "x.png"}, {"strength": 0.4},
     {"start": 0.1}, {"end": 0.9}, {"mode": 7}, {"config_overrides": {"is_canny": True}}, {"mask_sha256": "cc"}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_every_field_of_a_controlnet_is_shown(other: dict[str, Any]) -> None:
    changed = replace(IMAGES, controls=(replace(CONTROL, **other),))
    assert shown(replace(RECIPE, pictures=changed)) != shown(replace(RECIPE, pictures=IMAGES))


def test_options_and_image_prompts_are_told_in_words() -> None:
    pictures = replace(IMAGES, image_prompts=OTHERS["image_prompts"])
    facts = dict(recipe_facts(replace(RECIPE, options={"pag": {"scale": 3.0}}, pictures=pictures)))
    assert facts["option pag"] == "scale 3.0"
    assert facts["image prompt plus"].startswith("strength 0.7, from 0 to 0.5 of the steps, encoder clip; cat.png")


def test_a_image_made_from_others_is_told_in_words() -> None:
    facts = dict(recipe_facts(replace(RECIPE, steps=20, pictures=replace(IMAGES, hires=OTHERS["hires"]))))
    assert facts["image"] == "photo.png, from step 10 of 20  (sha256 of its pixels 11)"
    assert facts["mask"] == "hole.png, unmasked area pasted back  (sha256 of its pixels 22)"
    assert facts["second pass"] == "scale 2, strength 0.5, via latent"
    assert facts["ControlNet canny"] == "strength 0.5; control image edges.png  (sha256 of its pixels bb)  (sha256 aa)"
    regions = replace(IMAGES, regions=OTHERS["regions"])
    told = dict(recipe_facts(replace(RECIPE, pictures=regions)))["region"]
    assert told == "'a red circle', strength 9, 32x64 at 0,8"
