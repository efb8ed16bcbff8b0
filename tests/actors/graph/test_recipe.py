"""A recipe names an image: what changes the image changes the digest, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from modelpool.actors.graph.features.recipe import (
    Recipe,
    RecipeControl,
    RecipeDecoder,
    RecipeImagePrompt,
    RecipeImages,
    RecipeLora,
    RecipeLowNoise,
    RecipeNoise,
    RecipeRegion,
    RecipeUpscale,
    RecipeView,
)
from modelpool.actors.graph.recipe_request import differing_fields, requests_of
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.lora_fields import LoraChoice, lora_text, parse_lora
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.refs import LoraRef
from modelpool.pool.values.core.run_options import AttentionScale, RunOptions, SkipLayers
from tests.each_case import each_case

RECIPE = Recipe(
    model="shapes", model_sha256="ab", prompt="p", negative="n", loras=(RecipeLora("light", "cd", 0.5),), steps=4,
    cfg=5.0, sampler="euler", schedule="normal", width=64, height=64, seed=1, versions={"torch": "2.13"},
)  # fmt: skip
REF = LoraRef("light", "light.safetensors", "cd", 0.5)
OTHER = {
    "model": "forms", "model_sha256": "xx", "prompt": "q", "negative": "", "loras": (), "steps": 5, "cfg": 4.0,
    "sampler": "ddim", "schedule": "karras", "width": 72, "height": 72, "seed": 2,
    "pictures": RecipeImages(image_sha256="ef", first_step=2),
    "frames": 5, "frame_rate": 8.0, "motion": 7, "image_noise": 0.1, "elevation": 5.0, "seconds": 2.0, "format": "webm",
    "quality": 80, "lyrics": "la", "lyrics_language": "de", "bpm": 96, "key_scale": "C major", "time_signature": "4",
    "clip_skip": 1, "embeddings": (("worn", "ab"),), "decoder": RecipeDecoder("b", "cd", 10, 1.0),
    "view": RecipeView(), "noise": RecipeNoise(eta=0.0),
    "shift": 3.1, "batch": 4, "vae_tile": 512, "vae_frames": 33, "gpus": "2",
    "sigmas": (4.0, 1.0), "options": {"pag": {"scale": 3.0}},
    "low_noise": RecipeLowNoise(0.9, 3.0), "upscale": RecipeUpscale("4x", "ef", 4.0),
}  # fmt: skip


@each_case("field", sorted(OTHER))
def test_every_field_that_makes_the_image_is_in_the_digest(field) -> None:
    assert replace(RECIPE, **{field: OTHER[field]}).digest != RECIPE.digest
    assert {f.name for f in fields(Recipe)} == {*OTHER, "versions", "warnings", "computed_by", "batch_reason"}


def test_versions_are_told_and_not_in_the_digest() -> None:
    newer = replace(RECIPE, versions={"torch": "3"})
    assert newer.digest == RECIPE.digest
    assert newer.as_json()["versions"] == {"torch": "3"}


def test_which_of_two_models_a_lora_changed_is_in_the_digest() -> None:
    """And nowhere, where a model is one: recipes are what they were before there were two."""
    low = replace(RECIPE, loras=(replace(RECIPE.loras[0], noise="low"),))
    assert low.digest != RECIPE.digest
    assert low.as_json()["loras"] == ({"name": "light", "sha256": "cd", "strength": 0.5, "noise": "low"},)


def test_what_the_folder_of_a_controlnet_says_is_in_the_digest() -> None:
    """And nowhere, where it says nothing."""
    plain = OTHER_IMAGES["controls"][0]
    recipes = [
        replace(RECIPE, pictures=replace(IMAGES, controls=(one,)))
        for one in (plain, replace(plain, config_overrides={"zeros": False}))
    ]
    assert recipes[0].digest != recipes[1].digest
    saids = [recipe.as_json()["pictures"]["controls"][0].get("said") for recipe in recipes]
    assert saids == [None, {"zeros": False}]
    read = json.loads(recipes[1].to_json())
    assert recipe_from_json(read) == recipes[1]
    read["pictures"]["controls"][0]["said"] = {"zeros": 3}
    with pytest.raises(UserError, match=r"pictures\.controls\.0\.said\.zeros: found 3"):
        recipe_from_json(read)


def test_a_recipe_is_json() -> None:
    assert json.loads(json.dumps(RECIPE.as_json()))["loras"] == [{"name": "light", "sha256": "cd", "strength": 0.5}]


#: another value of each field that says what an image was made from
OTHER_IMAGES = {
    "image_sha256": "ee", "mask_sha256": "ff", "first_step": 3, "paste": False,
    "hires": {"scale": 2.0, "strength": 0.5, "steps": None, "via": "latent"},
    "controls": (RecipeControl("canny", "ab", "cd", "a.png", 1.0, 0.0, 1.0),),
    "image_prompts": (RecipeImagePrompt("plus", "ab", "clip", "cd", 1.0, 0.0, 1.0, ("ef",), ("a.png",)),),
    "regions": (RecipeRegion("x", 1.0, (0, 0, 8, 8), ""),),
    "reference_sha256": "ij", "last_image_sha256": "kl", "image_cfg": 1.5, "noise_level": 20,
    "more_references": ("mn",), "reference_as": "numbered", "video_sha256": "op", "video_mask_sha256": "qr",
    "face_video_sha256": "st",
}  # fmt: skip
IMAGES = RecipeImages("ef", "a.png", "gh", "b.png", 2, paste=True)


@pytest.mark.parametrize("field", sorted(OTHER_IMAGES))
def test_what_a_image_was_made_from_is_in_the_digest_and_where_that_lay_is_not(field) -> None:
    made = replace(RECIPE, pictures=IMAGES)
    assert replace(made, pictures=replace(IMAGES, **{field: OTHER_IMAGES[field]})).digest != made.digest
    moved = replace(
        made,
        pictures=replace(
            IMAGES, image_file="c.png", mask_file="", reference_file="d.png", more_reference_files=("f",),
            last_image_file="e", video_file="g", video_mask_file="h",
            face_video_file="i",
        ),
    )  # fmt: skip
    if field == "controls":
        (control,) = OTHER_IMAGES[field]
        one, other = (replace(IMAGES, controls=(replace(control, image_file=file),)) for file in ("a.png", "b.png"))
        assert replace(made, pictures=one).digest == replace(made, pictures=other).digest
    assert moved.digest == made.digest
    assert {f.name for f in fields(RecipeImages)} == {
        *OTHER_IMAGES,
        "image_file",
        "mask_file",
        "reference_file",
        "more_reference_files",
        "last_image_file",
        "video_file",
        "video_mask_file",
        "face_video_file",
    }


def test_a_recipe_without_images_is_what_it_was_before_there_were_any() -> None:
    """Folders of finished images are gone on with."""
    assert "pictures" not in RECIPE.as_json()
    assert RECIPE.digest == "d29fb2a621c9810277a9"


def test_the_commit_of_a_file_of_the_hub_is_told_and_not_in_the_digest() -> None:
    """Earlier versions did not name it, and a commit that changes other files makes no other output."""
    control = RecipeControl("org/c", "ef", "01", "pose.png", 1.0, 0.0, 1.0)
    prompt = RecipeImagePrompt("org/i/i.bin", "ef", "org/e/e.bin", "ab", 1.0, 0.0, 1.0)
    at = f"@{'0a' * 20}"

    def named(commit: str) -> Recipe:
        control_there = replace(control, name=control.name + commit)
        prompt_there = replace(prompt, name=prompt.name + commit, encoder=prompt.encoder + commit)
        return replace(
            RECIPE,
            model=f"org/m/m.safetensors{commit}",
            loras=(RecipeLora(f"org/l{commit}", "cd", 0.5),),
            decoder=RecipeDecoder(f"org/d{commit}", "cd", 10, 1.0),
            upscale=RecipeUpscale(f"org/u{commit}", "ef", 4.0),
            pictures=RecipeImages(controls=(control_there,), image_prompts=(prompt_there,)),
        )

    assert named(at).as_json() != named("").as_json()
    assert named(at).digest == named("").digest
    assert differing_fields(named(at), named("")) == ()
    assert replace(named(at), model_sha256="xx").digest != named("").digest


def test_strengths_of_a_lora_over_steps_blocks_and_encoders_come_back_from_json_and_as_a_request() -> None:
    blocks = (("IN04", 0.5), ("MID", 0.0))
    lora = replace(RECIPE.loras[0], text_strength=0.25, start=0.5, end=0.75, blocks=blocks)
    recipe = replace(RECIPE, loras=(lora,))
    read = recipe_from_json(json.loads(json.dumps(recipe.as_json())))
    assert read == recipe
    assert len({one.digest for one in (RECIPE, recipe, replace(recipe, loras=(replace(lora, end=1.0),)))}) == 3
    (found,) = requests_of(read, str)[0].loras
    assert (found.strength, found.text_strength, found.start, found.end) == (0.5, 0.25, 0.5, 0.75)
    assert found.blocks == blocks


def test_settings_of_options_that_are_lists_come_back_from_json() -> None:
    """Found by `modelpool verify`, which named them as differences."""
    options = RunOptions(slg=SkipLayers(layers=(7, 8)), attention_scale=AttentionScale(text=(("IN04", 0.5),)))
    recipe = replace(RECIPE, options=options.settings())
    read = recipe_from_json(json.loads(json.dumps(recipe.as_json())))
    assert read == recipe
    assert read.digest == recipe.digest
    assert differing_fields(read, recipe) == ()
    assert requests_of(read, str)[0].options == options


def test_keyframes_and_texts_of_a_lora_come_back_from_json_as_a_request_and_as_text() -> None:
    lora = replace(RECIPE.loras[0], keyframes=((0.0, 0.25), (0.5, 0.5)), interpolation="ease_in", only=("negative",))
    recipe = replace(RECIPE, loras=(lora,))
    read = recipe_from_json(json.loads(json.dumps(recipe.as_json())))
    assert read == recipe
    others = (replace(lora, interpolation=""), replace(lora, only=()), replace(lora, keyframes=((0.0, 0.5),)))
    assert len({one.digest for one in (RECIPE, recipe, *(replace(recipe, loras=(other,)) for other in others))}) == 5
    (found,) = requests_of(read, str)[0].loras
    expected = replace(REF, keyframes=lora.keyframes, interpolation="ease_in", only=("negative",))
    assert found.applied(REF) == LoraChoice(**parse_lora(lora_text("light", lora))).applied(REF) == expected


def test_a_field_of_a_later_version_is_refused_by_its_place_in_the_recipe() -> None:
    noise, control = RecipeNoise(eta=0.5), RecipeControl("canny", "ab", "cd", "a.png", 1.0, 0.0, 1.0)
    images = RecipeImages(controls=(control,), regions=(RecipeRegion("x", 1.0, (0, 0, 8, 8), ""),))
    recipe = json.loads(replace(RECIPE, noise=noise, pictures=images).to_json())
    parts = {
        "": recipe, "noise.": recipe["noise"], "loras.": recipe["loras"][0], "pictures.": recipe["pictures"],
        "pictures.controls.": recipe["pictures"]["controls"][0], "pictures.regions.": recipe["pictures"]["regions"][0],
    }  # fmt: skip
    for place, part in parts.items():
        part["colour"] = 1
        with pytest.raises(UserError, match=rf"unknown field of a recipe '{place}colour'"):
            recipe_from_json(recipe)
        del part["colour"]
    assert recipe_from_json(recipe).noise == noise
