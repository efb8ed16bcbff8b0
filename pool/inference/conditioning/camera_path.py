"""The path of a camera through a video: the numbers of the camera in each frame, that models read rays of.

Sources: MotionCtrl (Wang et al. 2023) for the speed of its motions, and aigc-apps/VideoX-Fun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.values.core.stage_params import CAMERA_MOTIONS, CameraCondition

#: name of the camera in `ModelKwargs`
CAMERA = "camera"
#: where the camera moves with each motion, and how it turns around its axis: x to the right, y down, z ahead
_MOTIONS: Mapping[str, tuple[tuple[float, float, float], float]] = MappingProxyType(
    dict(
        zip(
            CAMERA_MOTIONS,
            (
                ((0.0, 0.0, 0.0), 0.0),
                ((0.0, -1.0, 0.0), 0.0),
                ((0.0, 1.0, 0.0), 0.0),
                ((-1.0, 0.0, 0.0), 0.0),
                ((1.0, 0.0, 0.0), 0.0),
                ((0.0, 0.0, 2.0), 0.0),
                ((0.0, 0.0, -2.0), 0.0),
                ((0.0, 0.0, 0.0), -1.0),
                ((0.0, 0.0, 0.0), 1.0),
            ),
            strict=True,
        )
    )
)
#: units of length, and angle, of a motion in all frames together
_LENGTH, _ANGLE = 1.5, math.pi / 3
#: shape of the videos for which focal lengths are given
_SHAPE = 1280 / 720


def camera_numbers(camera: CameraCondition, frames: int, width: int, height: int) -> Tensor:
    """Return the numbers of the camera in each frame of a video, [F, 16]: focal lengths and centre in pixels, and its
    place and turn in the space of the first one, by rows."""
    (ahead, turn), across, along = _MOTIONS[camera.motion], camera.fx * width, camera.fy * height
    if width / height < _SHAPE:
        across = camera.fx * height * _SHAPE
    else:
        along = camera.fy * width / _SHAPE
    found = []
    for frame in range(frames):
        share = frame / frames * camera.speed
        cos, sin = math.cos(share * _ANGLE * turn), math.sin(share * _ANGLE * turn)
        x, y, z = (share * _LENGTH * each for each in ahead)
        pose = (cos, -sin, 0.0, x, sin, cos, 0.0, y, 0.0, 0.0, 1.0, z)
        found.append((across, along, camera.cx * width, camera.cy * height, *pose))
    return torch.tensor(found, dtype=torch.float32)
