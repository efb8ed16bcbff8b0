"""Names for the inputs of a stage that a test runs directly, in the order in which it lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelpool.pool.values.core import task_inputs as names
from modelpool.pool.values.core.refs import ControlMaskMode
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    ControlVideo,
    ControlVideoCondition,
    DecodeParams,
    Encoded,
    EncodeImageParams,
    EncodeParams,
    ImageEmbeds,
    ImagePixels,
    KeptSoundCondition,
    Latent,
    Mask,
    MaskedImageCondition,
    Result,
    SampleParams,
    SamplerState,
    StageParams,
    StartCondition,
    VideoFrames,
    VideoMask,
    VisionEncodeParams,
    VoiceCondition,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import TaskId, TaskSpec


def inputs_of(work: StageParams, *results: Result) -> TaskInputs:
    """The inputs of `work`: texts as prompt, negative prompt and regions, latents and masks in the order of the fields
    of `SampleParams` that require them."""
    order = {
        Encoded: _texts(work),
        ImageEmbeds: iter([names.IMAGE_EMBEDS])
        if isinstance(work, SampleParams)
        else names.enumerated("image", results),
        Latent: _latents(work),
        SamplerState: iter([names.SAMPLER_STATE]),
        ImagePixels: _images(work, len(results)),
        Mask: _masks(work),
        AudioSamples: iter([names.AUDIO]),
        VideoFrames: iter([names.VIDEO]),
        VideoMask: iter([names.VIDEO_MASK]),
    }
    return TaskInputs({next(order[type(result)]): result for result in results})  # type: ignore[index]


def _texts(work: StageParams) -> Iterator[str]:
    if isinstance(work, SampleParams):
        yield names.POSITIVE
        if work.reads_negative:
            yield names.NEGATIVE
        yield from names.enumerated(names.REGION, work.regions)


def _latents(work: StageParams) -> Iterator[str]:
    if isinstance(work, DecodeParams):
        yield names.LATENT
    if isinstance(work, SampleParams):
        fields = {
            names.START: work.has(StartCondition),
            names.IMAGE: work.image is not None,
            names.CONTROL_VIDEO: work.has(ControlVideoCondition),
            names.MASKED_IMAGE: work.has(MaskedImageCondition),
        }
        yield from (name for name, is_read in fields.items() if is_read)
        yield from names.enumerated(names.REFERENCE, work.references)
        yield from names.enumerated(names.GUIDE, work.guides)
        if work.prior is not None:
            yield names.PRIOR
        if work.has(KeptSoundCondition):
            yield names.SOUND
        if work.has(VoiceCondition):
            yield names.VOICE
        for number, control in enumerate(work.controls):
            if control.reads_latent:
                yield names.numbered(names.CONTROL, number)
                if control.mask_mode is ControlMaskMode.SEPARATE:
                    yield names.numbered(names.CONTROL_MASKED_IMAGE, number)


def _masks(work: StageParams) -> Iterator[str]:
    if isinstance(work, SampleParams):
        if work.reads_mask:
            yield names.MASK
        for number, region in enumerate(work.regions):
            if region.box is None:
                yield names.numbered(names.REGION_MASK, number)
        for number, control in enumerate(work.controls):
            if control.mask_mode is not None:
                yield names.numbered(names.CONTROL_MASK, number)
    else:
        yield names.MASK


def _images(work: StageParams, count: int) -> Iterator[str]:
    match work:
        case EncodeImageParams(video=ControlVideo()):
            yield from names.enumerated(names.REFERENCE, range(count))
        case EncodeImageParams():
            yield from (names.IMAGE, names.LAST_IMAGE)
        case VisionEncodeParams() | EncodeParams():
            yield from names.enumerated(names.IMAGE, range(count))
        case DecodeParams():
            yield names.IMAGE
        case SampleParams():
            if work.image is not None:
                yield names.IMAGE
            for number, control in enumerate(work.controls):
                if not control.reads_latent:
                    yield names.numbered(names.CONTROL, number)


def results_read(task: TaskSpec, results: Mapping[TaskId, Result]) -> TaskInputs:
    """The inputs of `task`, among the results of its job."""
    return TaskInputs.named(task.input_names, [results[need] for need in task.needs])
