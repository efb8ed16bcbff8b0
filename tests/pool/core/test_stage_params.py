"""The keys of tasks: every field of the parameters separates tasks, except those that a batch may mix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from modelpool.pool.core.refs import ControlMaskMode
from modelpool.pool.core.stage_params import (
    ControlRef,
    DecodeParams,
    EmbeddingRef,
    EncodeImageParams,
    EncodeParams,
    LoraRef,
    ModelRef,
    RegionParams,
    SampleParams,
    StageParams,
    VisionEncodeParams,
    batch_key,
    task_id,
)
from modelpool.pool.specs.spec import TaskId

MODEL = ModelRef("toy", "toy.safetensors", "00")
LORA, CONTROL = LoraRef("light", "light.safetensors", "11", 1.0), ControlRef("edges", "e.safetensors", "22", 1.0, 0, 1)
WORKS: tuple[StageParams, ...] = (
    EncodeParams(MODEL, (), "a cat"),
    SampleParams(MODEL, (), 64, 64, 4, 4.0, "euler", "normal", 7, controls=(CONTROL,), regions=(RegionParams(1.0),)),
    EncodeImageParams(MODEL, 64, 64),
    VisionEncodeParams(MODEL),
    DecodeParams(MODEL, 64, 64),
)
#: the only fields in which tasks of one batch may differ
MAY_DIFFER = {
    (EncodeParams, "text"),
    (EncodeParams, "is_negative"),
    (EncodeParams, "embeddings"),
    (SampleParams, "seed"),
}
#: other values of fields whose kind does not tell one
OTHERS: dict[str, Any] = {
    "model": dataclasses.replace(MODEL, sha256="01"),
    "loras": (LORA,),
    "embeddings": (EmbeddingRef("style", "style.pt", "33", 1),),
    "seen": ((32, 32),),
    "regions": (RegionParams(0.5),),
    "controls": (dataclasses.replace(CONTROL, mask_mode=ControlMaskMode.ALWAYS),),
    "reference": (32, 32),
    "more_references": ((32, 32),),
    "prior": (8, 8),
}


def changed(work: StageParams) -> Iterator[tuple[str, StageParams]]:
    """Yield `work` with each of its fields changed, one at a time."""
    for field in dataclasses.fields(work):
        value = getattr(work, field.name)
        other = OTHERS.get(field.name)
        if other is None:
            other = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
        yield field.name, dataclasses.replace(work, **{field.name: other})


def test_every_field_is_part_of_the_task_id() -> None:
    for work in WORKS:
        for name, other in changed(work):
            assert task_id(work, {}) != task_id(other, {}), (type(work).__name__, name)


def test_every_field_except_seed_and_texts_separates_batches() -> None:
    for work in WORKS:
        for name, other in changed(work):
            if key := batch_key(work):
                is_shared = (type(work), name) in MAY_DIFFER
                assert (batch_key(other) == key) is is_shared, (type(work).__name__, name)
            else:
                assert isinstance(work, EncodeImageParams | VisionEncodeParams)


def test_every_part_of_a_controlnet_separates_batches_and_tasks() -> None:
    sample = WORKS[1]
    assert isinstance(sample, SampleParams)
    parts = {
        "sha256": "23",
        "strength": 0.5,
        "start": 0.1,
        "end": 0.9,
        "mode": 2,
        "config_overrides": (("a", "b"),),
        "mask_mode": "beside",
    }
    for name, value in parts.items():
        other = dataclasses.replace(sample, controls=(dataclasses.replace(CONTROL, **{name: value}),))
        assert batch_key(other) != batch_key(sample), name
        assert task_id(other, {}) != task_id(sample, {}), name


def test_the_lengths_of_texts_separate_batches() -> None:
    assert batch_key(WORKS[1], (77, 77)) != batch_key(WORKS[1], (77, 154))


def test_files_count_by_content_and_inputs_by_name() -> None:
    work = WORKS[0]
    renamed = dataclasses.replace(work, model=dataclasses.replace(MODEL, name="other", path="elsewhere.safetensors"))
    assert task_id(renamed, {}) == task_id(work, {})
    one, other = TaskId("one"), TaskId("other")
    ids = [{"positive": one, "negative": other}, {"positive": other, "negative": one}, {"positive": one}, {"mask": one}]
    assert len({task_id(WORKS[1], needs) for needs in ids}) == len(ids)
    assert task_id(WORKS[1], {"positive": one, "mask": other}) == task_id(WORKS[1], {"mask": other, "positive": one})
