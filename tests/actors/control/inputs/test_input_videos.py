"""Videos that requests name: checked at the door, brought once, at the size and length that they are used in, as a
hash; and cut into the task that encodes them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace
from PIL import Image

from modelpool.actors.cli.run.job_file import read_job_file
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.input_ids import input_image_id, input_video_id
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.outputs.video import write_video
from modelpool.actors.request import control_video_fields as video_fields
from modelpool.actors.request import image_decoding
from modelpool.actors.request.control_video_fields import Frames, InputVideo
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts, VideoFacts
from modelpool.pool.values.core.stage_params import (
    ControlVideo,
    ControlVideoCondition,
    EncodeImageParams,
    ModelRef,
    Result,
    SampleParams,
    VideoFrames,
    VideoMask,
)
from modelpool.pool.values.specs.spec import JobId, TaskId
from tests.actors.fakes import VIDEOS, FakeCatalog

RNG = np.random.default_rng(0)
#: smooth, so that what videos lose of an image is little
_SLOPE = np.linspace(0, 200, 64)[None, None, :, None] + 5 * np.arange(7)[:, None, None, None]
VIDEO = np.broadcast_to(_SLOPE, (7, 40, 64, 3)).astype(np.uint8)
MASK = np.zeros((7, 40, 64), bool)
MASK[:, 8:24, 16:48] = True


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": VIDEOS, "prompt": "p", "seed": 1, **fields})


def bring(**fields: Any) -> tuple[GenerateRequest, dict[TaskId, Result]]:
    """A request as it is sent, and what was put where workers find it."""
    sent, refs = InputImages(lambda result: result).bring(request(**fields))
    return sent, refs  # type: ignore[return-value] # here a reference is the result itself


def brought(**fields: Any) -> tuple[VideoFrames, InputVideo]:
    sent, refs = bring(**fields)
    assert isinstance(sent.video, InputVideo)
    video = refs[input_video_id(sent.video)]
    assert isinstance(video, VideoFrames)
    return video, sent.video


@pytest.mark.parametrize("ending", [".mp4", ".webm", ".gif"])
def test_a_video_is_read_from_its_file(ending: str, tmp_path: Path) -> None:
    """Frame for frame, with the colours that it was written with, but for what the format loses."""
    path = tmp_path / f"a{ending}"
    write_video(path, VIDEO, 8.0)
    video, given = brought(video=path)
    assert video.frames_THWC.shape == VIDEO.shape
    assert np.abs(video.frames_THWC.astype(int) - VIDEO).mean() < 4
    assert (given.width, given.height, given.frames, given.file) == (64, 40, 7, path.name)


def test_transparent_parts_of_a_video_are_over_white_as_those_of_an_image(tmp_path: Path) -> None:
    """The same GIF as a video and as an image: the hidden colour of its transparent part is seen in neither."""
    path = tmp_path / "a.gif"
    clear = Image.new("P", (64, 32), 0)
    clear.putpalette([0, 0, 200, 200, 0, 0])
    clear.paste(1, (16, 8, 48, 24))
    clear.save(path, transparency=0)
    video, _ = brought(video=path)
    listed, _ = brought(video=[path])
    assert np.array_equal(video.frames_THWC, listed.frames_THWC)
    assert video.frames_THWC[0, 0, 0].tolist() == [255, 255, 255]
    assert video.frames_THWC[0, 16, 32].tolist() == [200, 0, 0]


#: red, green, blue and yellow
_COLOURS = np.array([[(220, 30, 30), (30, 200, 40)], [(20, 40, 220), (200, 180, 20)]], np.uint8)
PATCHES = np.repeat(np.repeat(_COLOURS, 32, axis=0), 64, axis=1)


def _video_of(
    path: Path,
    frames: list[Any],
    codec: str = "libx264",
    pixels: str = "yuv420p",
    matrix: Colorspace = Colorspace.ITU601,
    turned: int = 0,
) -> Path:
    """A video of frames with sizes that may differ; `turned` is how many degrees players turn it, against the clock."""
    height, width = frames[0].shape[:2]
    with av.open(path, "w") as video:
        stream: Any = video.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.codec_context.colorspace = {Colorspace.ITU601: 6, Colorspace.ITU709: 1}[matrix]
        stream.set_display_rotation(turned)
        for place, frame in enumerate(frames):
            encoder: Any = stream.codec_context
            if frame.shape[:2] != (height, width):
                encoder = av.CodecContext.create(codec, "w")
                encoder.width, encoder.height, encoder.pix_fmt = frame.shape[1], frame.shape[0], pixels
                encoder.time_base = Fraction(1, 8)
            image = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=pixels, dst_colorspace=matrix)
            image.pts = place
            for packet in encoder.encode(image):
                packet.stream = stream
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)
    return path


@pytest.mark.parametrize("matrix", [Colorspace.ITU601, Colorspace.ITU709])
def test_a_video_has_the_colours_that_it_says(matrix: Colorspace, tmp_path: Path) -> None:
    """By the one matrix or the other."""
    video, _ = brought(video=_video_of(tmp_path / "a.mp4", [PATCHES] * 2, matrix=matrix))
    assert video.frames_THWC.shape == (2, 64, 128, 3)
    for y, x in ((16, 32), (16, 96), (48, 32), (48, 96)):
        assert np.abs(video.frames_THWC[:, y, x].astype(int) - PATCHES[y, x]).max() < 8


@pytest.mark.parametrize(("turned", "quarters"), [(0, 0), (90, 1), (-90, -1), (180, 2)])
def test_a_video_is_followed_upright(turned: int, quarters: int, tmp_path: Path) -> None:
    """As players show it: most phones write videos lying on their side."""
    video, given = brought(video=_video_of(tmp_path / "a.mp4", [PATCHES], turned=turned))
    expected = np.rot90(PATCHES, quarters)
    assert (given.height, given.width) == expected.shape[:2]
    assert np.abs(video.frames_THWC[0].astype(int) - expected).mean() < 4


def test_a_frame_that_is_larger_than_the_first_is_told_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a video speaks of its first frame."""
    frames = [PATCHES, np.repeat(np.repeat(PATCHES, 2, axis=0), 2, axis=1)]
    path = _video_of(tmp_path / "a.mkv", frames, "mjpeg", "yuvj420p")
    monkeypatch.setattr(image_decoding, "MAX_PIXELS", 64 * 128)
    with pytest.raises(UnusableField, match="video: found 'an image of 256x128 pixels', expected up to"):
        bring(video=path)


def test_a_video_comes_in_every_form(tmp_path: Path) -> None:
    """As an array, as images, and as the paths of images: the same pixels are the same video."""
    images = [Image.fromarray(frame) for frame in VIDEO]
    paths = []
    for place, image in enumerate(images):
        paths.append(tmp_path / f"{place}.png")
        image.save(paths[-1])
    forms = (VIDEO, list(VIDEO), images, paths, [*images[:3], *paths[3:]])
    found = [brought(video=form) for form in forms]
    assert len({given.sha256 for _, given in found}) == 1
    assert all((video.frames_THWC == VIDEO).all() for video, _ in found)
    one, _ = brought(video=paths[0])
    assert (one.frames_THWC == VIDEO[:1]).all()


def test_a_mask_comes_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.fromarray(MASK[0]).convert("L").save(path)
    moving, still = tmp_path / "mask.mp4", MASK[0]
    write_video(moving, np.repeat(MASK[..., None].astype(np.uint8) * 255, 3, axis=-1), 8.0)
    for form, frames in ((MASK, 7), (list(MASK), 7), (moving, 7), (still, 1), (path, 1)):
        sent, refs = bring(video=VIDEO, video_mask=form)
        mask = refs[input_video_id(sent.video_mask, is_mask=True)]
        assert isinstance(mask, VideoMask)
        assert len(mask.values_THW) == sent.video_mask.frames == frames
        assert ((mask.values_THW >= 128) == MASK[:frames]).all()


def test_what_is_sent_is_a_hash_and_no_video() -> None:
    sent, _ = bring(video=RNG.integers(0, 256, (9, 64, 64, 3), np.uint8))
    assert len(pickle.dumps(sent)) < 4096


def test_what_is_changed_after_the_request_was_made_changes_nothing() -> None:
    frames = VIDEO.copy()
    asked = request(video=frames)
    frames[:] = 0
    assert isinstance(asked.video, Frames)
    assert (asked.video.frames == VIDEO).all()
    assert asked == request(video=VIDEO)


def test_a_video_is_scaled_cut_to_length_and_brought_once(tmp_path: Path) -> None:
    """With its mask; no more frames are read than are made."""
    path = tmp_path / "a.mp4"
    write_video(path, VIDEO, 8.0)
    given: list[Result] = []
    bringer = InputImages(lambda result: given.append(result) or len(given))
    asked = [request(video=path, video_mask=MASK, width=32, frames=5, seed=seed) for seed in range(3)]
    sent = [bringer.bring(each)[0] for each in asked]
    video, mask = given
    assert isinstance(video, VideoFrames)
    assert isinstance(mask, VideoMask)
    assert (video.frames_THWC.shape, mask.values_THW.shape) == ((5, 16, 32, 3), (5, 16, 32))
    assert len({each.video for each in sent}) == 1
    assert bringer.bring(sent[0])[0] == sent[0], "what is given is left as it is"


def _text(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.mp4", b"no video", "video: .*a.mp4 cannot be read as a video"),
        ("a.mp4", b"", "video: .*a.mp4: cannot be read"),
        ("a.png", b"no image", "video: .*a.png cannot be read as an image"),
        # which videos are read, of one that is none of them
        ("a.wmv", b"no image", r"video: .*a.wmv cannot be read .*, or a video file \(\.mp4, "),
        # lists of other files
        (
            "a.mp4",
            b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n",
            "video: .* cannot be read as a video",
        ),
        ("a.mp4", b"ffconcat version 1.0\nfile /etc/hostname\n", "video: .* cannot be read as a video"),
    ],
)
def test_what_is_no_video_is_told_at_the_door(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        request(video=_text(tmp_path, name, content))


def test_a_video_that_breaks_off_is_told_where_it_is_read(tmp_path: Path) -> None:
    """What would say where its frames are stands at its end."""
    path = tmp_path / "a.mp4"
    noise = RNG.integers(0, 256, (12, 64, 64, 3), np.uint8)
    whole = write_video(path, noise, 8.0).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"^video: .*a\.mp4 cannot be read as a video"):
        brought(video=path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"video": "nowhere.mp4"}, "video: found 'nowhere.mp4', expected an existing file"),
        ({"video": 3}, "video: found 'int', expected the path of a video"),
        ({"video": []}, "video: found '0 frames', expected 1 to"),
        ({"video": VIDEO[0]}, r"video: found 'an array \[40, 64, 3\] of uint8', expected an array \[frames"),
        ({"video": VIDEO.astype(float)}, "video: .* of float64"),
        (
            {"video": [VIDEO[0], VIDEO[1][:8]]},
            "video: found 'frames of 64x8 and 64x40 pixels', expected frames of one size",
        ),
        ({"video": [VIDEO[0], None]}, "video: found 'None in a list'"),
        ({"video": VIDEO, "video_mask": MASK.astype(float)}, "video_mask: .* of float64"),
        ({"video_mask": MASK}, "video_mask requires video"),
    ],
)
def test_what_cannot_be_a_video_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(**fields)


def test_a_video_has_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_fields, "MAX_VIDEO_PIXELS", 4 * 40 * 64)
    with pytest.raises(UnusableField, match="video: found '7 frames of 2560 pixels'"):
        request(video=VIDEO)
    bring(video=VIDEO[:4])
    with pytest.raises(UnusableField, match="video: found '2 frames of 10240 pixels'"):
        bring(video=VIDEO[:4], width=128, height=80)


FOLLOWS = SamplingFacts(
    model="wan_vace",
    reads=frozenset({"context", "control"}),
    side_multiple=16,
    video=VideoFacts(17, 4, 8.0),
    several_references=True,
)


class Following(FakeCatalog):
    """The model of videos follows one."""

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        own = super().model_defaults(model)
        return replace(own, sampling=FOLLOWS) if model.name == VIDEOS else own


def cut(**fields: Any) -> tuple[Recipe, JobGraph, GenerateRequest]:
    sent, _ = bring(**fields)
    return *build_graph(sent, JobId("job"), Following()), sent


def encoded(job: JobGraph) -> tuple[EncodeImageParams, tuple[TaskId, ...]]:
    (found,) = [
        (work, task.needs)
        for task in job.job.tasks
        if isinstance(work := job.works[task.task_id], EncodeImageParams) and isinstance(work.video, ControlVideo)
    ]
    return found


def test_what_is_followed_is_encoded_by_one_task_that_texts_and_seeds_share() -> None:
    """It reads the video, its mask and the images, in order; sampling reads it."""
    reference = [VIDEO[0], VIDEO[1]]
    recipe, job, sent = cut(video=VIDEO, video_mask=MASK, reference=reference)
    work, needs = encoded(job)
    assert needs == (
        input_video_id(sent.video),
        input_video_id(sent.video_mask, is_mask=True),
        *(input_image_id(each) for each in sent.references),
    )
    assert (work.width, work.height, work.frames) == (64, 32, 5), "in whole steps of the model"
    _, other, _ = cut(video=VIDEO, video_mask=MASK, reference=reference, seed=2, prompt="q")
    shared = {task.task_id for task in job.job.tasks} & {task.task_id for task in other.job.tasks}
    assert any(job.works[task] == work for task in shared)
    (sample,) = [one for one in job.works.values() if isinstance(one, SampleParams)]
    assert (sample.conditions, sample.shape.leading) == ((ControlVideoCondition(),), 2)
    assert recipe.pictures is not None
    assert recipe.pictures.video_sha256 == sent.video.sha256
    assert recipe.pictures.video_mask_sha256 == sent.video_mask.sha256
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))).digest == recipe.digest


def test_without_a_video_all_is_grey_and_nothing_is_read() -> None:
    """One task for all texts of a size; a reference leaves the size what it was."""
    recipe, job, _ = cut()
    work, needs = encoded(job)
    assert (needs, work.frames, recipe.pictures) == ((), 17, None)
    referring = cut(reference=np.zeros((200, 40, 3), np.uint8))[1]
    (sample,) = [one for one in referring.works.values() if isinstance(one, SampleParams)]
    assert (sample.shape.width, sample.shape.height, sample.shape.frames, sample.shape.leading) == (64, 64, 17, 1)


@pytest.mark.parametrize("name", ["video", "video_mask", "reference"])
def test_what_is_followed_is_in_the_digest(name: str) -> None:
    fields = {"video": VIDEO, "video_mask": MASK, "reference": VIDEO[0]}
    other = {"video": VIDEO[::-1], "video_mask": MASK[0], "reference": VIDEO[2]}
    one, another = cut(**fields)[0], cut(**{**fields, name: other[name]})[0]
    assert one.digest != another.digest


def test_more_frames_than_the_video_has_can_be_made() -> None:
    work, _ = encoded(cut(video=VIDEO, frames=13)[1])
    assert work.frames == 13


def test_a_model_that_follows_nothing_says_so() -> None:
    sent, _ = bring(video=VIDEO)
    with pytest.raises(UnusableField, match="video: not supported by model 'films', which accepts no control video"):
        build_graph(sent, JobId("job"), FakeCatalog())


def test_job_files_name_videos(tmp_path: Path) -> None:
    """One by its path, or as images; seeds of lines that have no video are what they were."""
    write_video(tmp_path / "a.mp4", VIDEO, 8.0)
    Image.fromarray(VIDEO[0]).save(tmp_path / "b.png")
    lines = [
        {"model": "m", "prompt": "p"},
        {"model": "m", "prompt": "p", "video": str(tmp_path / "a.mp4"), "video_mask": str(tmp_path / "b.png")},
        {"model": "m", "prompt": "p", "video": [str(tmp_path / "b.png")] * 2},
    ]
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    read = read_job_file(path, {})
    assert read.broken == ()
    assert len({line.request.seed for line in read.lines}) == 3
    path.write_text(json.dumps(lines[0]))
    assert read_job_file(path, {}).lines[0].request.seed == read.lines[0].request.seed
