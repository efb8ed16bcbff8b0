"""The keys of tasks: every field of the parameters separates tasks, except those that a batch may mix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

from modelpool.pool.values.core.prompt_tokens import ClipTokens
from modelpool.pool.values.core.refs import ControlMaskMode
from modelpool.pool.values.core.run_options import FreeU, RunOptions, SkipLayers
from modelpool.pool.values.core.sample_conditions import condition_inputs
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    ControlVideo,
    ControlVideoCondition,
    DecodeParams,
    EmbeddingRef,
    EncodeImageParams,
    EncodeParams,
    FaceCondition,
    FirstFrames,
    GuidanceParams,
    ImageCondition,
    LoraRef,
    MaskCondition,
    MaskedImageCondition,
    ModelRef,
    OutputShape,
    PriorCondition,
    ReferenceCondition,
    RegionParams,
    SampleCondition,
    SampleParams,
    SamplingSchedule,
    StageParams,
    StartCondition,
    TaskIdTemplate,
    VideoBeginning,
    ViewCondition,
    VisionEncodeParams,
    batch_key,
    task_id,
)
from modelpool.pool.values.specs.spec import TaskId

MODEL = ModelRef("toy", "toy.safetensors", "00")
LORA, CONTROL = LoraRef("light", "light.safetensors", "11", 1.0), ControlRef("edges", "e.safetensors", "22", 1.0, 0, 1)
CONDITIONS: tuple[SampleCondition, ...] = (
    StartCondition(),
    ImageCondition(),
    MaskCondition(),
    MaskedImageCondition(),
    ReferenceCondition(64, 64),
    PriorCondition(8, 8),
    ControlVideoCondition(),
    FaceCondition(),
    ViewCondition(),
    RegionParams(1.0),
    CONTROL,
)
WORKS: tuple[StageParams, ...] = (
    EncodeParams(MODEL, (), "a cat"),
    SampleParams(
        MODEL,
        (),
        OutputShape(64, 64),
        SamplingSchedule(4, "euler", "normal"),
        GuidanceParams(4.0),
        7,
        CONDITIONS,
    ),
    EncodeImageParams(MODEL, 64, 64),
    *(EncodeImageParams(MODEL, 64, 64, video=video) for video in (VideoBeginning(9), FirstFrames(9), ControlVideo(9))),
    VisionEncodeParams(MODEL),
    DecodeParams(MODEL, OutputShape(64, 64)),
)
#: the only fields in which tasks of one batch may differ
MAY_DIFFER = {
    (EncodeParams, "text"),
    (EncodeParams, "is_negative"),
    (EncodeParams, "embeddings"),
    (SampleParams, "seed"),
}
#: other values of fields with a kind that does not tell one
OTHERS: dict[str, Any] = {
    "model": dataclasses.replace(MODEL, sha256="01"),
    "loras": (LORA,),
    "embeddings": (EmbeddingRef("style", "style.pt", "33", 1),),
    "seen": ((32, 32),),
    "box": (0.0, 0.0, 0.5, 0.5),
    "mode": 2,
    "mask_mode": ControlMaskMode.ALWAYS,
    "config_overrides": (("a", True),),
    "options": RunOptions(freeu=FreeU()),
    "video": VideoBeginning(5),
}
#: tokens follow from the text
TOKENS = (EncodeParams, "tokens")
#: fields of a reference to a file that do not change what it is
NO_CONTENT = {"name", "path", "files", "reads_latent", "bright", "is_blockwise"}


def another(value: Any) -> Any:
    """Another value of the same kind; a number where `value` is None, which leaves the choice to the sampler."""
    match value:
        case None:
            return 0.5
        case bool():
            return not value
        case str():
            return value + "x"
        case tuple():
            return (*value, 0.5)
    return value + 1


def changed(work: Any) -> Iterator[tuple[str, Any]]:
    """Yield `work` with each field changed, one at a time: those of its parts too, and each condition left out."""
    for field in dataclasses.fields(work):
        if (isinstance(work, ControlRef) and field.name in NO_CONTENT) or (type(work), field.name) == TOKENS:
            continue
        value = getattr(work, field.name)
        others: list[tuple[str, Any]]
        if field.name == "conditions":
            others = [(type(one).__name__, (*value[:i], *value[i + 1 :])) for i, one in enumerate(value)]
            others += [
                (f"{type(one).__name__}.{name}", (*value[:i], part, *value[i + 1 :]))
                for i, one in enumerate(value)
                for name, part in changed(one)
            ]
        elif field.name in ("shape", "schedule", "guidance") or (field.name == "video" and value is not None):
            others = [(f"{field.name}.{name}", part) for name, part in changed(value)]
        elif field.name in OTHERS:
            others = [(field.name, OTHERS[field.name])]
        else:
            others = [(field.name, another(value))]
        for name, other in others:
            yield name, dataclasses.replace(work, **{field.name: other})


def test_parameters_are_grouped() -> None:
    """No value has so many fields that nobody knows them: at most twelve that tell it apart from others."""
    for kind in (*get_args(StageParams), OutputShape, SamplingSchedule, GuidanceParams, *get_args(SampleCondition)):
        own = [field.name for field in dataclasses.fields(kind) if field.compare]
        assert len(own) <= 12, (kind.__name__, own)


def test_conditions_name_the_inputs_that_they_read() -> None:
    names = list(condition_inputs((*CONDITIONS, ReferenceCondition(8, 8), RegionParams(1.0, (0, 0, 1, 1)))))
    assert names == [
        "start", "image", "mask", "mask", "masked_image", "reference.0", "prior", "control_video", "face_video",
        "region.0", "region_mask.0", "control.0", "reference.1", "region.1",
    ]  # fmt: skip
    masked = dataclasses.replace(CONTROL, reads_latent=True, mask_mode=ControlMaskMode.SEPARATE)
    assert list(condition_inputs((CONTROL, masked))) == [
        "control.0", "control.1", "control_mask.1", "control_masked_image.1",
    ]  # fmt: skip


def test_a_text_that_is_tokenized_already_is_the_same_task() -> None:
    work = EncodeParams(MODEL, (), "a cat")
    tokenized = dataclasses.replace(work, tokens=(ClipTokens(((5,), (7, 8))),))
    assert tokenized == work
    assert task_id(tokenized, {}) == task_id(work, {})
    assert batch_key(tokenized) == batch_key(work)


def test_every_field_is_part_of_the_task_id() -> None:
    for work in WORKS:
        for name, other in changed(work):
            assert task_id(work, {}) != task_id(other, {}), (type(work).__name__, name)


def test_fields_that_were_added_later_change_no_id_of_a_task_without_them() -> None:
    """The ids are those before `shift`, before `rescale` of skip layer guidance, and before followed videos."""
    model, shape = ModelRef("m", "m.safetensors", "ab"), OutputShape(64, 64)
    work = SampleParams(model, (), shape, SamplingSchedule(4, "euler", "normal"), GuidanceParams(7.0), 1)
    skipping = dataclasses.replace(work, options=RunOptions(slg=SkipLayers(layers=(7,))))
    earlier = [
        "sample-f1255dcdccf23ef83c4e",
        "sample-675b8d77896181ddb0b8",
        "encode-f478feda7753a164863f",
        "encode-85b6d1f815bf044a36b6",
    ]
    image = EncodeImageParams(MODEL, 64, 64)
    video = dataclasses.replace(image, video=ControlVideo(9))
    assert [task_id(each, {}) for each in (work, skipping, image, video)] == earlier
    shifted = dataclasses.replace(work, schedule=dataclasses.replace(work.schedule, shift=3.0))
    rescaled = dataclasses.replace(work, options=RunOptions(slg=SkipLayers(layers=(7,), rescale=0.5)))
    assert len({task_id(each, {}) for each in (work, skipping, shifted, rescaled)}) == 4
    assert len({batch_key(each) for each in (work, skipping, shifted, rescaled)}) == 4


def test_the_ids_of_encoded_images_and_videos_are_what_they_were() -> None:
    """When each kind of video was some fields of the parameters."""
    earlier: dict[str, dict[str, Any]] = {
        "encode-4a75b8b8e9c15bbf860e": {"hides": True, "black": True},
        "encode-3b7cfdec15b6a74f9156": {"noise": 0.02, "seed": 7},
        "encode-88c1397761bc690ab833": {"bright": True},
        "encode-1a9cfd36edc95a02db92": {"width": 0, "height": 0, "seconds": 2.5},
        "encode-1a08feb42f224ca7d720": {"video": VideoBeginning(9)},
        "encode-b410d8b034c3deaa491e": {"video": VideoBeginning(9, ends=True)},
        "encode-3cdc974c130a32bc6e1d": {"video": VideoBeginning(9, begins=5)},
        "encode-c3bdd3c92e66c714f399": {"video": VideoBeginning(9, begins=5, ends=True)},
        "encode-c29170270a39359e6927": {"video": FirstFrames(9)},
        "encode-85b6d1f815bf044a36b6": {"video": ControlVideo(9)},
        "encode-678d24873201213f26bd": {"video": ControlVideo(9, animates=True)},
        "encode-8bee5dd911459284cdfe": {"video": ControlVideo(9, stops=True)},
    }
    for expected, fields in earlier.items():
        work = EncodeImageParams(**{"model": MODEL, "width": 64, "height": 64, **fields})
        assert task_id(work, {}) == TaskIdTemplate.of(work).task_id(work.seed, {}) == expected, fields


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
        "mask_mode": ControlMaskMode.SEPARATE,
    }
    for name, value in parts.items():
        other = dataclasses.replace(
            sample, conditions=(*CONDITIONS[:-1], dataclasses.replace(CONTROL, **{name: value}))
        )
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
