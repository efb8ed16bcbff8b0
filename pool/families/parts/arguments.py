"""Arithmetic of the arguments of diffusers' classes, for the families that share it. Torch-free."""

from __future__ import annotations

#: values of a patch of 2x2 cells, per latent channel
PATCH = 4
#: width of a head of Stable Diffusion 3 and its ControlNets if no norm tells. Source: the published code
SD3_HEAD = 64


def ratio(inner: int, width: int) -> float:
    """Return `inner / width`, such that `int(width * ratio)` is `inner`."""
    exact = inner / width
    return exact if int(width * exact) == inner else (inner + 0.5) / width


def rope_axes(head: int) -> tuple[int, int, int]:
    """Return how many values of a head are rotated by each coordinate: an eighth by the first, the rest by row and
    column.

    Source: the 16, 56 and 56 of 128 that Flux was published with.
    """
    first = head // 8
    return first, (head - first) // 2, (head - first) // 2


def rope_quarters(head: int) -> tuple[int, int, int]:
    """Return how many values of a head are rotated by each coordinate: a quarter by the first, the rest by row and
    column.

    Source: the 32, 48 and 48 of 128 that Z-Image was published with.
    """
    return head // 4, head * 3 // 8, head * 3 // 8
