"""What nodes of ComfyUI know of families: facts, and classes of ComfyUI, by the titles that listings have."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_families import family_of
from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_request_fields import (
    acting_options,
    check_seen,
    makes_videos,
    option_warnings,
    prompt_text,
    reads_guidance,
)
from modelpool.actors.http.comfy.comfy_values import ClipValue, ModelValue, SeenImage, TextValue
from modelpool.pool.families.supported import running_families
from modelpool.pool.families.two_experts import TWO_EXPERTS
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING
from tests.each_case import each_case

FAMILIES = running_families()
TITLES = {name: family.title for name, family in FAMILIES.items()}


def test_every_title_is_its_family_and_an_unknown_one_is_a_plain_model() -> None:
    for family in (*FAMILIES.values(), *TWO_EXPERTS.values()):
        assert family_of(family.title).facts == family.sampling, family.title
    for title in ("", "Some model", "SDXL"):
        assert family_of(title).facts == PLAIN_SAMPLING
        assert not makes_videos(title)
    # a listing may say more
    assert family_of("LTX-Video 0.9.5").facts == FAMILIES["ltxv"].sampling


def test_a_new_family_needs_no_entry_here() -> None:
    """Found: families of videos were known by the beginnings of their titles, which these do not have."""
    assert makes_videos(TITLES["lucy_edit"])
    assert makes_videos(TITLES["sana_video"])
    assert not reads_guidance(TITLES["sana_video"])
    assert reads_guidance(TITLES["sana_sprint"])


def _text(**more: Any) -> TextValue:
    return TextValue("a cat", ClipValue("model"), **more)


@each_case("name", ["qwen_image_21", "qwen_image_layered"])
def test_the_norm_of_guidance_acts_on_models_that_are_not_normed_by_themselves(name: str) -> None:
    """Found: their titles begin as that of Qwen-Image, so it was dropped."""
    model = ModelValue("model", options=(("cfg_norm", {"strength": 0.5}),))
    assert acting_options(model, 4.0, TITLES[name]) == {"cfg_norm": {"strength": 0.5}}
    assert not list(option_warnings("1", model, 4.0, TITLES[name]))
    assert acting_options(model, 4.0, TITLES["qwen_image"]) == {}
    assert list(option_warnings("1", model, 4.0, TITLES["qwen_image"]))


@each_case("name", ["ssd_1b", "vega", "koala_700m", "koala_1b", "sdxl", "cascade_c", "sd21_unclip_l"])
def test_models_that_read_embeddings_of_images_are_no_list_of_titles(name: str) -> None:
    """Found: relatives of Stable Diffusion XL with other titles were refused."""
    seen = _text(seen=(SeenImage("photo"),))
    check_seen(seen, _text(), "model", TITLES[name])
    with pytest.raises(NodeUnsupported, match=r"found an image for model 'model' \(Stable Diffusion 1\), expected one"):
        check_seen(seen, _text(), "model", TITLES["sd1"])


@each_case("name", ["sdxl_refiner", "playground_25", "cosxl_edit", "ssd_1b", "sd1", "sd21_unclip_h"])
def test_texts_are_appended_for_all_models_whose_text_encoders_are_clips(name: str) -> None:
    """Found: the title of the refiner begins with "the", so it was refused, and so were others."""
    appended = _text(appended=("a dog",))
    assert prompt_text(appended, TITLES[name]) == "a cat BREAK a dog"
    for other in ("flux_dev", "wan_t2v", "sd3"):
        with pytest.raises(NodeUnsupported, match="expected a model whose text encoders are CLIP's"):
            prompt_text(appended, TITLES[other])
