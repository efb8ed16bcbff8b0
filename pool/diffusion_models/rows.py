"""The table of the diffusion models that are built, by the names that recognition gives: all groups together."""

from __future__ import annotations

from collections.abc import Mapping

from pool.diffusion_models.architecture import Architecture
from pool.diffusion_models.audio_model import AUDIO_ROWS
from pool.diffusion_models.cascade_model import CASCADE_ROWS
from pool.diffusion_models.image_rows import IMAGE_ROWS
from pool.diffusion_models.unet_rows import UNET_ROWS
from pool.diffusion_models.video_rows import VIDEO_ROWS

ARCHITECTURES: Mapping[str, Architecture] = {**IMAGE_ROWS, **VIDEO_ROWS, **AUDIO_ROWS, **CASCADE_ROWS, **UNET_ROWS}
