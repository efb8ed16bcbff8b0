"""Builds the ControlNets of a run: their files, and the images and masks that they read.

Pure functions of values and a catalog. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelpool.actors.graph.graph_catalog import ControlNetCatalog
from modelpool.actors.graph.orders import ControlOrder, EncodeImageOrder, InputRef, SampleOrder
from modelpool.actors.request.field_errors import missing_field
from modelpool.pool.core.errors import UnusableField
from modelpool.pool.core.stage_params import ControlMaskMode, ControlRef
from modelpool.pool.core.task_inputs import CONTROL, CONTROL_MASK, CONTROL_MASKED_IMAGE, numbered


def control_refs(order: SampleOrder, controls: ControlNetCatalog) -> tuple[ControlRef, ...]:
    """Return the ControlNets of `order`, each with a mask if it reads one. Raises UserError, as `controls` does, and
    UnusableField for a ControlNet with a model that works from reference images, for a missing mask or start image,
    and for a mask of a ControlNet that reads none."""
    found = tuple(_with_hole(c, controls.find(c.model, c.strength, c.start, c.end, c.mode)) for c in order.controls)
    if order.references and found:
        reason = f"ControlNet {found[0].name!r} works only with models that generate without reference images"
        raise UnusableField(f"reference: cannot be combined with controls; {reason}")
    return found


def _with_hole(order: ControlOrder, ref: ControlRef) -> ControlRef:
    """Return `ref`, which `order` names, with the form of its mask if it reads one."""
    if ref.mask_mode is None and order.has_own_mask:
        raise UnusableField(f"controls.mask: not supported by ControlNet {ref.name!r}, which reads no mask")
    if order.mask is not None:
        if ref.mask_mode is ControlMaskMode.SEPARATE and order.start_image is None:
            reason = f"ControlNet {ref.name!r} reads the inpainted image in addition to its control image"
            raise missing_field("image", reason)
        return ref
    if ref.mask_mode is ControlMaskMode.ALWAYS:
        reason = f"ControlNet {ref.name!r} requires a mask: set controls.mask, or the field mask of the request"
        raise missing_field("controls.mask", reason)
    return replace(ref, mask_mode=None)


def control_inputs(order: SampleOrder, refs: Sequence[ControlRef]) -> Iterator[tuple[str, InputRef | EncodeImageOrder]]:
    """Yield name and value of the inputs of each of `refs`, the ControlNets of `order`: its image, or the latent of it,
    at the size of the output; for a mask of another image, the latent of that; and its mask."""
    for number, (control, ref) in enumerate(zip(order.controls, refs, strict=True)):
        if ref.reads_latent:
            size, hidden = (
                (order.width, order.height),
                control.mask if ref.mask_mode is ControlMaskMode.ALWAYS else None,
            )
            encoded = EncodeImageOrder(control.image, order.model, *size, hidden, order.scale)
            yield numbered(CONTROL, number), replace(encoded, bright=ref.bright, black=hidden is not None)
            if ref.mask_mode is ControlMaskMode.SEPARATE:
                assert control.start_image is not None, f"ControlNet {ref.name} reads a start image"
                masked = replace(encoded, image=control.start_image, hidden=control.mask)
                yield numbered(CONTROL_MASKED_IMAGE, number), masked
        else:
            yield numbered(CONTROL, number), control.image
        if ref.mask_mode is not None:
            assert control.mask is not None, f"ControlNet {ref.name} reads a mask"
            yield numbered(CONTROL_MASK, number), control.mask
