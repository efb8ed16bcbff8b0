"""The ControlNets of a run: which files they are, and what of their pictures they read.

Pure functions over values and a catalog. Every complaint names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.cut_catalog import Controls
from actors.orders import EncodePictureOrder, GivenOrder, SampleOrder
from pool.errors import unusable_field
from pool.work import ControlRef


def control_refs(order: SampleOrder, controls: Controls) -> tuple[ControlRef, ...]:
    """The ControlNets of `order`. Raises UserError, as `controls` does, and UnusableField for what speaks to a model
    that works from a picture to which it says nothing."""
    found = tuple(controls.find(c.model, c.strength, c.start, c.end, c.mode) for c in order.controls)
    if order.references and found:
        expected = f"none: ControlNet {found[0].name!r} speaks to models that make a picture without one"
        raise unusable_field("reference", "one", expected)
    return found


def control_pictures(order: SampleOrder, refs: Sequence[ControlRef]) -> Iterator[GivenOrder | EncodePictureOrder]:
    """What each of `refs`, the ControlNets of `order`, reads: its picture, or the latent that the model's own VAE makes
    of that, in the size of what is made."""
    for control, ref in zip(order.controls, refs, strict=True):
        if ref.reads_latent:
            size = order.width, order.height
            yield EncodePictureOrder(control.picture, order.model, *size, scale=order.scale, bright=ref.bright)
        else:
            yield control.picture
