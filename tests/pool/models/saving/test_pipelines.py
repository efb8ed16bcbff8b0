"""What a model is told of a prompt is what the family's pipeline of diffusers tells it, on the same modules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.signatures import SIGNATURES
from modelpool.pool.families.detection.text_encoders import MEMBERS
from modelpool.pool.families.text_readings import READINGS, ROW_OF, readings_of
from modelpool.pool.models.components.text.text_conditioning import text_kwargs
from modelpool.pool.models.text.encode import AnyTokenizer, read_texts
from tests.pool.families.definitions.in_tables import families_in_tables
from tests.pool.models.components.text.pipelines import CPU, PIPELINES, Pipeline, ours, ours_clip
from tests.pool.models.text.tiny_tokenizers import PROMPTS


def tokenizer_of(name: str) -> AnyTokenizer:
    return ours_clip() if name == "clip" else ours(name)


def our_told(
    case: Pipeline, modules: Sequence[nn.Module], prompts: Sequence[str], negative: bool
) -> list[dict[str, Tensor]]:
    """Each prompt, all read at once."""
    readings = readings_of(case.family)
    assert readings is not None
    read = [
        read_texts(module, tokenizer_of(name), prompts, CPU, reading, negative=[negative] * len(prompts))
        for module, name, reading in zip(modules, case.tokenizers, readings, strict=True)
    ]
    return [text_kwargs(case.family, texts) for texts in zip(*read, strict=True)]


def check(mine: dict[str, Tensor], theirs: dict[str, Tensor | None]) -> None:
    """Equal, but that a mask of which all is real is not told."""
    expected = {name: x for name, x in theirs.items() if x is not None and not (name.endswith("mask") and x.all())}
    assert mine.keys() == expected.keys()
    for name, x in expected.items():
        assert mine[name].shape == x.shape, name
        torch.testing.assert_close(mine[name].to(x), x, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", list(PIPELINES))
def test_a_prompt_is_told_as_the_pipeline_tells_it(family: str) -> None:
    case = PIPELINES[family]
    modules = case.modules()
    with torch.no_grad():
        together = our_told(case, modules, PROMPTS, False)
        for prompt, mine in zip(PROMPTS, together, strict=True):
            theirs = case.theirs(modules, prompt, False)
            check(mine, theirs)
            (alone,) = our_told(case, modules, (prompt,), False)
            check(alone, theirs)


@pytest.mark.parametrize("family", ["hunyuan_image", "hunyuan_video_15"])
def test_what_is_to_be_written_in_a_image_is_read_by_bytes(family: str) -> None:
    case = PIPELINES[family]
    modules = case.modules()
    prompts = (
        'a sign "OPEN" over \u201c24 h\u201d and "OPEN" again',
        "it's a 'door' \u2018\u00e4\u2019",
        "no word at all",
    )
    for prompt, mine in zip(prompts, our_told(case, modules, prompts, False), strict=True):
        check(mine, case.theirs(modules, prompt, False))
        is_read = family == "hunyuan_image" if "door" in prompt else "OPEN" in prompt
        assert mine["context_2"].any() == mine["context_2_mask"].any() == is_read


def test_a_negative_of_lumina_has_no_system_prompt() -> None:
    case = PIPELINES["lumina2"]
    modules = case.modules()
    (mine,) = our_told(case, modules, ("a red cat",), True)
    check(mine, case.theirs(modules, "a red cat", True))
    (positive,) = our_told(case, modules, ("a red cat",), False)
    assert not torch.equal(mine["context"], positive["context"])
    (reading,) = READINGS["lumina2"]
    (said,) = read_texts(modules[0], ours("gemma"), ("",), CPU, reading, negative=(True,))
    (unsaid,) = read_texts(modules[0], ours("gemma"), ("",), CPU, reading)
    assert torch.equal(said.context_LD, unsaid.context_LD), "nothing at all is what an image is not to show"


@pytest.mark.parametrize("family", [name for name in PIPELINES if "clip" not in PIPELINES[name].tokenizers])
def test_a_long_prompt_is_cut_as_the_pipeline_cuts_it_and_told_so(family: str) -> None:
    case = PIPELINES[family]
    modules = case.modules()
    prompt = "a red cat sits beside a large blue dog on the table, " * 100
    (mine,) = our_told(case, modules, (prompt,), False)
    check(mine, case.theirs(modules, prompt, False))
    (reading,) = READINGS[family] if len(READINGS[family]) == 1 else READINGS[family][:1]
    (text,) = read_texts(modules[0], tokenizer_of(case.tokenizers[0]), (prompt,), CPU, reading)
    assert text.cut_tokens > 0
    assert text.context_LD.shape[0] == reading.most_tokens - reading.dropped_tokens


def test_every_row_but_those_of_no_other_width_has_a_pipeline_here() -> None:
    """SD2's and the refiner's rows differ from others in facts that are tested beside them; HunyuanVideo's beside a
    image is tested with its family (tests/pool/families/test_hunyuan_from_images.py)."""
    in_tables = {family.readings_name for family in families_in_tables()}
    in_their_own_tests = {family.readings_name for family in defined_families()} - in_tables
    assert set(READINGS) - set(PIPELINES) - in_their_own_tests == {"sd2", "sdxl_refiner", "hunyuan_video_i2v"}


def test_rows_are_in_the_order_of_their_sets_members() -> None:
    sets = {
        "chroma": "pixart",
        "pixart_sigma": "pixart",
        "flux2_klein": "z_image",
        "hunyuan_video_i2v": "hunyuan_video",
    }
    for row, readings in READINGS.items():
        assert tuple(reading.encoder for reading in readings) == MEMBERS[sets.get(row, row)]


def test_families_are_those_that_recognition_names() -> None:
    assert set(ROW_OF) - set(READINGS) <= {signature.name for signature in SIGNATURES}
