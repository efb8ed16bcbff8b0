"""The three ways to encode a video to a latent: a beginning, the first frames of a video, or a control video.

Values of `pool.values.core.stage_params.EncodeImageParams.video`; torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class VideoBeginning:
    """A video of `frames` frames that begins with an image; grey follows.

    begins  it begins with this number of frames of "video" instead
    ends    its last frame is "last_image"
    """

    frames: int
    begins: int = 0
    ends: bool = False


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """The first `frames` frames of "video"."""

    frames: int


@dataclass(frozen=True, slots=True)
class ControlVideo:
    """A control video of `frames` frames (`pool.inference.conditioning.control_video`): reads "video" and "video_mask"
    if they are set, and "reference.N" for each reference image.

    animates  it has the poses of the character in "reference.0"
    stops     zeros follow the last cell of a video that is followed and shorter; else it goes back and forth
    """

    frames: int
    animates: bool = False
    stops: bool = False


EncodedVideo: TypeAlias = VideoBeginning | FirstFrames | ControlVideo


def video_identity(video: EncodedVideo | None) -> dict[str, Any]:
    """Return what `video` adds to the id of a task. The names are older than these values, and ids stay: the first
    three are always there, the others only where they are set."""
    found: dict[str, Any] = {"frames": 0, "ends": False, "is_control_video": False}
    match video:
        case VideoBeginning():
            found |= {"frames": video.frames, "ends": video.ends}
            found |= {"begins": video.begins} if video.begins else {}
        case FirstFrames():
            found |= {"frames": video.frames, "is_video": True}
        case ControlVideo():
            found |= {"frames": video.frames, "is_control_video": True}
            found |= {name: True for name in ("animates", "stops") if getattr(video, name)}
    return found
