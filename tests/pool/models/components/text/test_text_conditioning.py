"""What a model is told where an encoder is missing, or where its prompts take several chunks."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.families.text_readings import READINGS, readings_of
from modelpool.pool.models.components.text.text_conditioning import text_kwargs
from modelpool.pool.models.text.encode import ReadText
from modelpool.pool.values.core.errors import UnknownArchitecture, UnknownName


def text(tokens: int, width: int, pooled: int = 0) -> ReadText:
    return ReadText(torch.randn(tokens, width), torch.randn(pooled) if pooled else None)


SMALL, LARGE, T5 = text(77, 768, 768), text(77, 1280, 1280), text(256, 4096)


def test_sd3_without_t5_is_told_zeros_in_its_place() -> None:
    """As StableDiffusion3Pipeline does for a missing third encoder."""
    told = text_kwargs("sd3", (SMALL, LARGE, None))
    assert told["context"].shape == (1, 77 + 256, 4096)
    assert not told["context"][:, 77:].any()
    whole = text_kwargs("sd3", (SMALL, LARGE, T5))
    assert torch.equal(told["context"][:, :77], whole["context"][:, :77])
    assert torch.equal(told["pooled"], whole["pooled"])


@pytest.mark.parametrize("present", [(SMALL, None, None), (None, LARGE, T5), (None, None, T5)])
def test_sd3_runs_with_any_of_its_encoders(present: tuple[ReadText | None, ...]) -> None:
    told = text_kwargs("sd35_large", present)
    assert told["context"].shape == (1, 77 + 256, 4096)
    assert told["pooled"].shape == (1, 2048)
    assert torch.equal(told["pooled"][0, :768], present[0].pooled_V if present[0] else torch.zeros(768))


def test_widths_of_missing_encoders_are_the_files() -> None:
    told = text_kwargs("sd3", (text(154, 8, 8), text(154, 12, 6), None), {"t5xxl": 40})
    assert told["context"].shape == (1, 154 + 256, 40)
    assert told["pooled"].shape == (1, 14)


@pytest.mark.parametrize(
    ("family", "read"), [("flux_dev", (SMALL, None)), ("sdxl", (None, LARGE)), ("sd3", (None, None, None))]
)
def test_an_encoder_that_a_model_needs_is_missed_by_name(family: str, read: tuple[ReadText | None, ...]) -> None:
    with pytest.raises(UnknownArchitecture, match="found no text encoder"):
        text_kwargs(family, read)


def test_a_image_without_words_needs_no_second_encoder() -> None:
    told = text_kwargs("hunyuan_image_21", (ReadText(torch.randn(1000, 3584)), None))
    assert told["context_2"].shape == (1, 128, 1472)
    assert not told["context_2"].any()
    assert told["context_2_mask"].shape == (1, 128)
    assert not told["context_2_mask"].any()


def test_chunks_of_both_clips_stand_side_by_side() -> None:
    told = text_kwargs("sdxl", (text(154, 768), text(154, 1280, 1280)))
    assert told["context"].shape == (1, 154, 2048)
    assert set(told) == {"context", "pooled"}


def test_an_unknown_family_is_told() -> None:
    assert readings_of("nothing") is None
    with pytest.raises(UnknownName, match="unknown family of text encoders 'flax'; did you mean 'flux'"):
        text_kwargs("flax", (SMALL,))


def test_a_template_has_one_place_for_a_prompt() -> None:
    for row in READINGS.values():
        for reading in row:
            assert reading.template.count("{}") == 1
            assert all(part == "" or "{}" not in part for part in reading.around())
