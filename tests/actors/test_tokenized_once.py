"""A prompt is tokenized once on its way from the request to the pixels: the worker reads the tokens that the catalog
counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.stage_params import Encoded, EncodeParams
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading import layouts
from tests.pool.pipeline import QUIET

SIZE = {"width": 64, "height": 64, "steps": 1, "cfg": 4.0}


def two_clips(folder: Path) -> TinyModel:
    return TinyModel(folder, layouts.tiny_sdxl())


def clips_and_t5(folder: Path) -> TinyModel:
    return TinyFamilyModel(folder, FAMILIES["sd3"])


@pytest.mark.parametrize("open_model", [two_clips, clips_and_t5])
def test_a_prompt_is_tokenized_once(
    open_model: Callable[[Path], TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word once for CLIP, each text once for T5: not again for the second encoder, for the dry run of an estimate,
    or on the worker. The result is the result of a worker that tokenizes the text itself."""
    counted: Counter[tuple[type, str]] = Counter()
    for kind in (ClipTokenizer, TextTokenizer):

        def encode(self, text, kind=kind, plain=kind.encode):
            counted[kind, text] += 1
            return plain(self, text)

        monkeypatch.setattr(kind, "encode", encode)
    tiny = open_model(tmp_path)
    made = tiny.made(prompt="one (red:1.3) cube", negative="blurry, BREAK blue", **SIZE)
    assert {counted[ClipTokenizer, word] for word in ("one", "red", "cube", "blurry,", "blue")} == {1}
    if open_model is clips_and_t5:
        assert {counted[TextTokenizer, text] for text in ("one red cube", "blurry, blue")} == {1}
    for task in made.tasks:
        work = made.works[task.task_id]
        if isinstance(work, EncodeParams):
            assert len(work.tokens) == len(task.uses)
            alone, _ = tiny.engine.run(task, EncodeParams(work.model, work.loras, work.text), {}, QUIET)
            read = made.results[task.task_id]
            assert isinstance(alone, Encoded)
            assert isinstance(read, Encoded)
            assert np.array_equal(alone.context_LD, read.context_LD)
    tiny.close()
