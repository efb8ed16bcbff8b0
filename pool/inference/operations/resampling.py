"""Resamples arrays to another height and width: the methods that ComfyUI's nodes name. numpy only; float32 in and out.

Positions are positions of pixel centres: output i has its centre at (i + 0.5) * in / out - 0.5 of the input. No method
but "area" and "lanczos" averages when it makes an image smaller. Values are computed in float64 along the width first,
then along the height, and are rounded to float32 once.

Shape legend: H W height and width, N any dimensions before them, C channels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from modelpool.pool.values.core.stage_params import FloatArray

#: methods for every kind of array. "lanczos" is for 8-bit images, "bislerp" for latents
PLAIN_METHODS = ("nearest", "nearest-exact", "bilinear", "area", "bicubic")
IMAGE_METHODS = (*PLAIN_METHODS, "lanczos")
SLERP = "bislerp"
#: methods by which the first and the last value of a side stay in place: output i is at i * (in - 1) / (out - 1)
ALIGNED_METHODS = ("bilinear-aligned", "bicubic-aligned")
LATENT_METHODS = (*PLAIN_METHODS, SLERP, *ALIGNED_METHODS)
#: the coefficient of the cubic kernel
_CUBIC = -0.75
#: two directions with a cosine above this are one, and below minus this they are opposite
_PARALLEL = 1 - 1e-5


def resampled(values_NHW: FloatArray, width: int, height: int, method: str) -> FloatArray:
    """Return values with another height and width; `method` is one of `PLAIN_METHODS` or `ALIGNED_METHODS`. Unchanged
    at the same size.

    nearest        the input pixel with the index floor(i * in / out)
    nearest-exact  the input pixel with the index floor((2i + 1) * in / (2 * out))
    bilinear       two neighbours, the edge is repeated
    bicubic        four neighbours with the cubic kernel of a = -0.75, the edge is repeated
    area           the mean of the input pixels floor(i * in / out) up to ceil((i + 1) * in / out)
    """
    found = values_NHW
    for axis, count in ((-1, width), (-2, height)):
        if found.shape[axis] != count:
            found = np.moveaxis(_along_first(np.moveaxis(found, axis, 0), count, method), 0, axis)
    return np.ascontiguousarray(found, dtype=np.float32)


def _along_first(values_L: npt.NDArray[np.floating], count: int, method: str) -> npt.NDArray[np.floating]:
    length = values_L.shape[0]
    if method == "nearest-exact":
        return np.asarray(values_L[(2 * np.arange(count) + 1) * length // (2 * count)])
    if method == "nearest":
        return np.asarray(values_L[np.arange(count) * length // count])
    if method == "area":
        return _means(values_L, count)
    places, shares = taps(length, count, method)
    found = np.zeros((count, *values_L.shape[1:]), np.float64)
    shape = (count, *[1] * (values_L.ndim - 1))
    for place, share in zip(places, shares, strict=True):
        found += values_L[place] * share.reshape(shape)
    return found


def taps(
    length: int, count: int, method: str
) -> tuple[tuple[npt.NDArray[np.int64], ...], tuple[npt.NDArray[np.float64], ...]]:
    """Return the input indexes that each output reads, and their weights, for "bilinear" and "bicubic", also
    aligned."""
    if method in ALIGNED_METHODS:
        at = np.arange(count) * ((length - 1) / max(1, count - 1))
    else:
        at = (np.arange(count) + 0.5) * (length / count) - 0.5
    if method.startswith("bilinear"):
        at = np.maximum(at, 0.0)
        first = np.minimum(np.floor(at).astype(np.int64), length - 1)
        share = at - first
        return (first, np.minimum(first + 1, length - 1)), (1 - share, share)
    first = np.floor(at).astype(np.int64)
    share = at - first
    distances = (1 + share, share, 1 - share, 2 - share)
    places = tuple(np.clip(first + step, 0, length - 1) for step in (-1, 0, 1, 2))
    return places, tuple(map(_cubic, distances))


def _cubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
    return np.where(distance <= 1, near, far)


def _means(values_L: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.float64]:
    length = values_L.shape[0]
    places = np.arange(count)
    begins, ends = places * length // count, -(-(places + 1) * length // count)
    sums = np.zeros((length + 1, *values_L.shape[1:]), np.float64)
    np.cumsum(values_L, axis=0, dtype=np.float64, out=sums[1:])
    shape = (count, *[1] * (values_L.ndim - 1))
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins).reshape(shape))


def slerped(values_CHW: FloatArray, width: int, height: int) -> FloatArray:
    """Return a latent with another height and width: "bislerp".

    It has the neighbours of "bilinear". The vector of the channels is turned along the arc between both neighbours, and
    its length is interpolated linearly. Equal directions take the first neighbour, opposite ones are mixed linearly.
    Channels come first; frames may be between them and the height.
    """
    found: npt.NDArray[np.floating] = values_CHW
    for axis, count in ((-1, width), (-2, height)):
        if found.shape[axis] != count:
            found = np.moveaxis(_slerped_along_last(np.moveaxis(found, axis, -1), count), -1, axis)
    return np.ascontiguousarray(found, dtype=np.float32)


def _slerped_along_last(values_CL: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.float64]:
    (first, second), (_, share) = taps(values_CL.shape[-1], count, "bilinear")
    one, other = values_CL[..., first].astype(np.float64), values_CL[..., second].astype(np.float64)
    lengths = [np.linalg.norm(each, axis=0, keepdims=True) for each in (one, other)]
    units = [
        np.divide(each, length, out=np.zeros_like(each), where=length > 0)
        for each, length in zip((one, other), lengths, strict=True)
    ]
    cosine = np.clip((units[0] * units[1]).sum(axis=0, keepdims=True), -1, 1)
    angle = np.arccos(cosine)
    sine = np.where(np.abs(cosine) > _PARALLEL, 1.0, np.sin(angle))
    turned = (np.sin((1 - share) * angle) * units[0] + np.sin(share * angle) * units[1]) / sine
    turned *= lengths[0] * (1 - share) + lengths[1] * share
    turned = np.where(cosine > _PARALLEL, one, turned)
    return np.where(cosine < -_PARALLEL, one * (1 - share) + other * share, turned)
