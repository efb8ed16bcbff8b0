"""Tells errors of one call on a device from errors after which the device computes nothing more."""

from __future__ import annotations

import torch

#: errors of one call, after which the device continues. Source: the descriptions of cudaError_t in the documentation of
#: CUDA's runtime
_REFUSED_CALLS = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image is available",
    "too many resources requested for launch",
    "operation not supported",
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
)


def may_try_otherwise(error: BaseException) -> bool:
    """Whether code that has another way may take it after `error`. Not after an error of the device, except for the
    refusal of one call: memory has run out then, or the device is lost. Every later error would only repeat that, and
    this one names the cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if not isinstance(error, torch.AcceleratorError):
        return True
    return any(message in str(error) for message in _REFUSED_CALLS)
