"""The task ids under which the images, videos, audio and masks of a request are in the pool. Pure."""

from __future__ import annotations

from modelpool.actors.request.audio_fields import AudioSource, InputAudio
from modelpool.actors.request.control_video_fields import InputVideo, TaskVideo, VideoSource
from modelpool.actors.request.face_fields import FaceSource, InputFaces
from modelpool.actors.request.image_fields import ImageSource, InputImage, TaskImage
from modelpool.pool.values.specs.spec import TaskId


def input_image_id(source: ImageSource, is_mask: bool = False) -> TaskId:
    """Return the task id of an image or a mask that is in the pool, or that a task computes."""
    if isinstance(source, TaskImage):
        return TaskId(source.task)
    assert isinstance(source, InputImage), f"the client brings images to the pool, found {source!r}"
    return TaskId(f"given-{'mask' if is_mask else 'image'}-{source.sha256[:20]}")


def input_faces_id(source: FaceSource) -> TaskId:
    """Return the task id of embeddings of faces that are in the pool."""
    assert isinstance(source, InputFaces), f"the client brings faces to the pool, found {source!r}"
    return TaskId(f"given-faces-{source.sha256[:20]}")


def input_video_id(source: VideoSource, is_mask: bool = False) -> TaskId:
    """Return the task id of a video or its mask that is in the pool, or that a task makes."""
    if isinstance(source, TaskVideo):
        return TaskId(source.task)
    assert isinstance(source, InputVideo), f"the client brings videos to the pool, found {source!r}"
    return TaskId(f"given-video{'-mask' if is_mask else ''}-{source.sha256[:20]}")


def input_frames_id(source: VideoSource) -> TaskId:
    """Return the task id of the frames of a video of a workflow that is in the pool."""
    assert isinstance(source, InputVideo), f"the client brings videos to the pool, found {source!r}"
    return TaskId(f"given-frames-{source.sha256[:20]}")


def input_audio_id(source: AudioSource) -> TaskId:
    """Return the task id of the audio of a workflow that is in the pool."""
    assert isinstance(source, InputAudio), f"the client brings audio to the pool, found {source!r}"
    return TaskId(f"given-audio-{source.sha256[:20]}")
