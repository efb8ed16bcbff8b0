"""The ControlNets of a run: which files they are, and what of their images they read.

Pure functions over values and a catalog. Every complaint names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelpool.actors.graph.graph_catalog import Controls
from modelpool.actors.graph.orders import ControlOrder, EncodeImageOrder, GivenOrder, SampleOrder
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.stage_params import ControlRef, HoleTold


def control_refs(order: SampleOrder, controls: Controls) -> tuple[ControlRef, ...]:
    """The ControlNets of `order`, each with a hole where it is told one. Raises UserError, as `controls` does, and
    UnusableField for what speaks to a model that works from an image to which it says nothing, for one that must be
    told a hole and is told none, and for a mask of one that cannot be."""
    found = tuple(_with_hole(c, controls.find(c.model, c.strength, c.start, c.end, c.mode)) for c in order.controls)
    if order.references and found:
        expected = f"none: ControlNet {found[0].name!r} speaks to models that make an image without one"
        raise unusable_field("reference", "one", expected)
    return found


def _with_hole(order: ControlOrder, ref: ControlRef) -> ControlRef:
    """`ref`, which `order` names, with a hole where it is told one."""
    if ref.hole is None and order.says_mask:
        raise unusable_field("controls.mask", "one", f"none: ControlNet {ref.name!r} is not told what is made anew")
    if order.mask is not None:
        if ref.hole is HoleTold.BESIDE and order.start_image is None:
            expected = f"an image: ControlNet {ref.name!r} is told which part of it is made anew, beside its own"
            raise unusable_field("image", "nothing", expected)
        return ref
    if ref.hole is HoleTold.ALWAYS:
        expected = f"a mask, as the field mask is: ControlNet {ref.name!r} is told which part of its image is made anew"
        raise unusable_field("controls.mask", "nothing", expected)
    return replace(ref, hole=None)


def control_images(order: SampleOrder, refs: Sequence[ControlRef]) -> Iterator[GivenOrder | EncodeImageOrder]:
    """What each of `refs`, the ControlNets of `order`, reads: its image, or the latent that the model's own VAE makes
    of that, in the size of what is made; where the hole is in another image, the latent of that; and its mask."""
    for control, ref in zip(order.controls, refs, strict=True):
        if ref.reads_latent:
            size, hidden = (order.width, order.height), control.mask if ref.hole is HoleTold.ALWAYS else None
            encoded = EncodeImageOrder(control.image, order.model, *size, hidden, order.scale)
            yield replace(encoded, bright=ref.bright, black=hidden is not None)
            if ref.hole is HoleTold.BESIDE:
                assert control.start_image is not None, f"ControlNet {ref.name} is told of an image beside its own"
                yield replace(encoded, image=control.start_image, hidden=control.mask)
        else:
            yield control.image
        if ref.hole is not None:
            assert control.mask is not None, f"ControlNet {ref.name} is told of a hole"
            yield control.mask
