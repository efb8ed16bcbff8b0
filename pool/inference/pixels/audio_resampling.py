"""Changes the rate of audio samples: interpolation with a windowed sinc, as `torchaudio.functional.resample` with its
usual settings.

For rates `old` and `new` without a common divisor, sample i of the result is the sum over k of
x[k] * h(i / new - k / old), with h(t) = f / old * sinc(f t) * cos^2(pi f t / (2 * 6)) where |f t| < 6, and the cutoff
f = 0.99 * min(old, new), counted in pairs of samples. Source: Julius O. Smith, "Digital Audio Resampling".

Shape legend: C channels, S samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

#: zero crossings of the sinc on each side, and the cutoff as a share of the lower rate
_CROSSINGS, _CUTOFF = 6, 0.99


def resampled_audio(samples_CS: Tensor, rate: int, wanted: int) -> Tensor:
    """Return samples at another rate: as many as cover the same time, rounded up."""
    common = math.gcd(rate, wanted)
    old, new = rate // common, wanted // common
    if old == new:
        return samples_CS
    cutoff = min(old, new) * _CUTOFF
    width = math.ceil(_CROSSINGS * old / cutoff)
    # of each phase of the result: the places of samples around it, in units of the cutoff
    places_K = torch.arange(-width, width + old, dtype=torch.float64) / old
    phases_P1 = -torch.arange(new, dtype=torch.float64)[:, None] / new
    times_PK = ((phases_P1 + places_K) * cutoff).clamp(-_CROSSINGS, _CROSSINGS)
    window_PK = torch.cos(times_PK * (math.pi / _CROSSINGS / 2)) ** 2
    kernels_PK = (torch.sinc(times_PK) * window_PK * (cutoff / old)).to(samples_CS.dtype)
    padded_CS = functional.pad(samples_CS, (width, width + old))
    found_CPS = functional.conv1d(padded_CS[:, None], kernels_PK[:, None], stride=old)
    length = math.ceil(new * samples_CS.shape[-1] / old)
    return found_CPS.transpose(1, 2).flatten(1)[:, :length].contiguous()
