"""Colours of one image on another: the distribution of colours is moved and turned into a reference's.

Shape legend: T frames, H W height and width, C colours, N pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelpool.pool.inference.operations.operation import IMAGE, Inputs, Operation, Size, Sizes, need, need_one_of
from modelpool.pool.inference.operations.pixel_levels import as_pixels, frames_of, image_like, levels
from modelpool.pool.values.core.errors import UnusableField, counted
from modelpool.pool.values.core.stage_params import ImagePixels, PixelArray, VideoFrames

COLOUR_METHODS = ("mkl",)
#: variance of a colour below which an image has none of it
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, slots=True)
class ColourMatch:
    """mkl: the linear map between normal distributions that moves colours least. `strength`: the share of the result, 0
    changes nothing, and above 1 goes beyond it."""

    method: str = "mkl"
    strength: float = 1.0


def _size(params: ColourMatch, sizes: Sizes) -> Size:
    need_one_of("method", params.method, COLOUR_METHODS)
    need("strength", params.strength, 0, 10)
    count, others = max(1, sizes["image"].frames), max(1, sizes["reference"].frames)
    if others not in (1, count):
        raise UnusableField(f"reference: found {counted(others, 'image')}, expected one, or {count}")
    return sizes["image"]


def _matched(params: ColourMatch, inputs: Inputs) -> ImagePixels | VideoFrames:
    image = inputs["image"]
    frames_THWC, references_THWC = frames_of(image)[..., :3], frames_of(inputs["reference"])[..., :3]
    found = []
    for place, frame_HWC in enumerate(frames_THWC):
        reference_HWC = references_THWC[place if len(references_THWC) > 1 else 0]
        own_NC = levels(frame_HWC).reshape(-1, 3).astype(np.float64)
        matched_NC = _moved(own_NC, reference_HWC)
        mixed_NC = own_NC + params.strength * (matched_NC - own_NC)
        found.append(as_pixels(np.clip(mixed_NC, 0, 1).astype(np.float32)).reshape(frame_HWC.shape))
    return image_like(image, np.stack(found))


def _moved(own_NC: npt.NDArray[np.float64], reference_HWC: PixelArray) -> npt.NDArray[np.float64]:
    """Return colours with the means and covariances of the reference: (x - m) T + n with
    T = A^-1/2 (A^1/2 B A^1/2)^1/2 A^-1/2 for the covariances A and B. Colours that an image has none of stay as they
    are.

    Source: Pitie and Kokaram, "The linear Monge-Kantorovitch linear colour mapping for example-based colour transfer",
    2007."""
    other_NC = levels(reference_HWC).reshape(-1, 3).astype(np.float64)
    mean_C, wanted_C = own_NC.mean(0), other_NC.mean(0)
    own_CC, other_CC = (_covariance(each) for each in (own_NC, other_NC))
    root_CC, inverse_CC = _power(own_CC, 0.5), _power(own_CC, -0.5)
    map_CC = inverse_CC @ _power(root_CC @ other_CC @ root_CC, 0.5) @ inverse_CC
    return np.asarray((own_NC - mean_C) @ map_CC + wanted_C)


def _covariance(values_NC: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    away_NC = values_NC - values_NC.mean(0)
    return np.asarray(away_NC.T @ away_NC / max(1, len(values_NC) - 1))


def _power(matrix_CC: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """Return a power of a symmetric matrix; directions without variance are left out."""
    sizes_C, axes_CC = np.linalg.eigh(matrix_CC)
    has_C = sizes_C > _LEAST_VARIANCE
    powers_C = np.where(has_C, np.where(has_C, sizes_C, 1.0) ** exponent, 0.0)
    return np.asarray((axes_CC * powers_C) @ axes_CC.T)


IMAGE_COLOURS = (
    Operation("image_match_colours", ColourMatch, {"image": IMAGE, "reference": IMAGE}, IMAGE, _matched, _size),
)
