"""Music: its lyrics are a text of their own, facts about it a part of the prompt's, and others read neither."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.music_graph import MUSIC_FIELDS
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.transformer_families import DISTILLED, TRANSFORMERS
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import EncodeParams, ModelRef, SampleParams
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.actors.fakes import FakeCatalog

JOB, SONG, FAMILY = JobId("job"), "shapes", "ace_step_15"
VALUES: dict[str, Any] = {
    "lyrics": "[verse]\nla (la)", "lyrics_language": "de", "bpm": 96, "key_scale": "C major", "time_signature": "6/8",
}  # fmt: skip


class Songs(FakeCatalog):
    """Models of music."""

    sampling = TRANSFORMERS[FAMILY].sampling

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return ModelDefaults(0, 0, self.sampling)


class DistilledSongs(Songs):
    sampling = DISTILLED[FAMILY].sampling


def built(catalog: FakeCatalog | None = None, **fields: Any) -> tuple[Recipe, JobGraph]:
    request = GenerateRequest(**{"model": SONG, "prompt": "a slow song", "seed": 1, **fields})
    return build_graph(request, JOB, catalog or Songs())


def works(graph: JobGraph, kind: type[Any]) -> list[Any]:
    return [graph.works[task.task_id] for task in graph.job.tasks if isinstance(graph.works[task.task_id], kind)]


def test_lyrics_are_a_text_and_no_negative_prompt_is_read() -> None:
    """Facts that the request leaves out are left to the model."""
    _, graph = built(**VALUES, seconds=30.4)
    caption, lyrics = works(graph, EncodeParams)
    facts = "- bpm: 96\n- timesignature: 6/8\n- keyscale: C major\n- duration: 30 seconds\n"
    assert caption == EncodeParams(caption.model, (), f"a slow song\n\n# Metas\n{facts}")
    assert lyrics == EncodeParams(lyrics.model, (), "# Languages\nde\n\n# Lyric\n[verse]\nla (la)", lyrics=True)
    (sample,) = (task for task in graph.job.tasks if task.stage is Stage.SAMPLE)
    assert sample.input_names == ("positive", "lyrics")
    (work,) = works(graph, SampleParams)
    assert (work.guidance.cfg, work.schedule.steps, work.shape.seconds) == (7.0, 50, 30.4)
    _, plain = built()
    caption, lyrics = works(plain, EncodeParams)
    assert "- bpm: N/A\n- timesignature: N/A\n- keyscale: N/A\n- duration: 60 seconds\n" in caption.text
    assert lyrics.text == "# Languages\nen\n\n# Lyric\n"


def test_equal_lyrics_are_one_task_and_others_are_not() -> None:
    ids = []
    for fields in ({}, {"prompt": "a fast song"}, {"lyrics": "lo"}, {"bpm": 80}):
        _, graph = built(**{**VALUES, **fields})
        ids.append([task.task_id for task in graph.job.tasks])
    assert len({found[0] for found in ids}) == 3
    assert len({found[1] for found in ids}) == 2
    assert len({found[-1] for found in ids}) == 4


def test_a_batch_has_texts_of_equal_lengths() -> None:
    """Caption and lyrics each: their sum is not enough, since both are stacked."""

    def together(**fields: Any) -> str:
        _, graph = built(**fields)
        return next(task.together for task in graph.job.tasks if task.stage is Stage.SAMPLE)

    longer = {"prompt": "a slow song " * 30}, {"lyrics": "la " * 120}
    assert together() == together(seed=2)
    assert len({together(), *(together(**fields) for fields in longer)}) == 3


def test_distilled_models_are_not_guided() -> None:
    _, graph = built(DistilledSongs())
    (work,) = works(graph, SampleParams)
    assert (work.guidance.cfg, work.schedule.steps) == (1.0, 8)


def test_the_recipe_has_what_was_used_and_leads_back_to_it() -> None:
    recipe, graph = built(**VALUES)
    assert {name: getattr(recipe, name) for name in MUSIC_FIELDS} == VALUES
    again = requests_of(recipe, lambda name: name)[0]
    assert build_graph(again, JOB, Songs())[1].job.wanted == graph.job.wanted
    plain, _ = built()
    assert (plain.lyrics, plain.lyrics_language, plain.bpm) == ("", "en", 0)


def test_stages_read_the_same_texts() -> None:
    request = GenerateRequest(model=SONG, prompt="a slow song", seed=1, **VALUES)
    _, whole = built(**VALUES)
    encoded = build_stage_graph(StageRequest(Stage.ENCODE, request), JOB, Songs())
    assert encoded.job.wanted == whole.job.tasks[0].task_id


def test_a_prompt_that_was_encoded_alone_says_the_length_that_is_sampled() -> None:
    """Found in a review: it said the default length of the model, which is that of a prompt without a clip."""
    request = GenerateRequest(model=SONG, prompt="", seed=1, seconds=30.0)
    encoded = GenerateRequest(model=SONG, prompt="a slow song")
    graph = build_stage_graph(StageRequest(Stage.SAMPLE, request, positive=encoded), JOB, Songs())
    caption, _ = works(graph, EncodeParams)
    assert caption.text.startswith("a slow song\n")
    assert caption.text.endswith("- duration: 30 seconds\n")


def test_other_models_refuse_the_fields_of_music_and_songs_warn_of_a_negative_prompt() -> None:
    for name, value in VALUES.items():
        with pytest.raises(UserError, match=rf"^{name}: found .* generates no music with lyrics"):
            built(FakeCatalog(), **{name: value})
    _, graph = built(negative="noise")
    assert any(warning.startswith("negative: ignored") for warning in graph.warnings)
    for fields in ({"seconds": 700.0}, {"key_scale": "C (major)"}, {"bpm": 0}, {"lyrics": 3}):
        with pytest.raises(UserError, match=rf"^{next(iter(fields))}: found"):
            built(**fields)
