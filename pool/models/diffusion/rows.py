"""The table of all buildable diffusion models, by the names that recognition returns."""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.audio_model import AUDIO_ROWS
from modelpool.pool.models.diffusion.cascade_model import CASCADE_ROWS
from modelpool.pool.models.diffusion.image_rows import IMAGE_ROWS
from modelpool.pool.models.diffusion.unet_rows import UNET_ROWS
from modelpool.pool.models.diffusion.video_rows import VIDEO_ROWS

ARCHITECTURES: Mapping[str, DiffusionArchitecture] = {
    **IMAGE_ROWS,
    **VIDEO_ROWS,
    **AUDIO_ROWS,
    **CASCADE_ROWS,
    **UNET_ROWS,
}
