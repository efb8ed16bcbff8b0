"""Builds the ControlNets of a run: their files, and the images and masks that they read.

Pure functions of values and a catalog. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from modelpool.actors.graph.common.graph_catalog import ControlNetCatalog
from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.sampling_runs import SamplingRun, StageTask
from modelpool.actors.graph.features.feature import (
    Feature,
    FindFile,
    InputMissing,
    Line,
    RecipeSource,
    Section,
    find_input,
    image_line,
    span_text,
    without_unused_parts,
)
from modelpool.actors.graph.features.recorded import FILE_NAME, INFORMATIVE, JSON_NAME, LATER, LATER_IN_DIGEST
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.field_errors import missing_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import ControlMaskMode, ControlRef, EncodeImageParams
from modelpool.pool.values.core.task_inputs import CONTROL, CONTROL_MASK, CONTROL_MASKED_IMAGE, IMAGE, MASK, numbered
from modelpool.pool.values.specs.spec import TaskId

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import RecipeImages


def control_refs(request: GenerateRequest, controls: ControlNetCatalog) -> tuple[ControlRef, ...]:
    """Return the ControlNets of `request`, each with the form of its mask if it reads one. Raises UserError, as
    `controls` does, and UnusableField for a ControlNet with a model that works from reference images, for a missing
    mask or start image, and for a mask of a ControlNet that reads none."""
    found = tuple(
        _with_mask_mode(request, each, controls.find(each.model, each.strength, each.start, each.end, each.mode))
        for each in request.controls
    )
    found = tuple(
        replace(ref, by_noise=each.shares_of == "noise" and (each.start, each.end) != (0, 1))
        for ref, each in zip(found, request.controls, strict=True)
    )
    if request.references and found:
        reason = f"ControlNet {found[0].name!r} works only with models that generate without reference images"
        raise UnusableField(f"reference: cannot be combined with controls; {reason}")
    return found


def _with_mask_mode(request: GenerateRequest, control: Control, ref: ControlRef) -> ControlRef:
    """Return `ref`, which `control` names, with the form of its mask if it reads one: its own, or the request's."""
    if ref.mask_mode is None and control.mask is not None:
        raise UnusableField(f"controls.mask: not supported by ControlNet {ref.name!r}, which reads no mask")
    if control.mask is not None or request.mask is not None:
        if ref.mask_mode is ControlMaskMode.SEPARATE and request.image is None:
            reason = f"ControlNet {ref.name!r} reads the inpainted image in addition to its control image"
            raise missing_field("image", reason)
        return ref
    if ref.mask_mode is ControlMaskMode.ALWAYS:
        reason = f"ControlNet {ref.name!r} requires a mask: set controls.mask, or the field mask of the request"
        raise missing_field("controls.mask", reason)
    return replace(ref, mask_mode=None)


def control_inputs(run: SamplingRun, refs: Sequence[ControlRef]) -> Iterator[tuple[str, TaskId | StageTask]]:
    """Yield name and value of the inputs of each of `refs`, the ControlNets of `run`: its image, or the latent of it,
    at the size of the output; for a mask of another image, the latent of that; and its mask."""
    request = run.request
    for number, (control, ref) in enumerate(zip(request.controls, refs, strict=True)):
        image = input_image_id(control.image or request.image)
        mask = {} if ref.mask_mode is None else {MASK: input_image_id(control.mask or request.mask, is_mask=True)}
        if ref.reads_latent:
            encode = EncodeImageParams(run.model, *run.size(run.scale), bright=ref.bright)
            if ref.mask_mode is ControlMaskMode.ALWAYS:
                hidden = replace(encode, hides=True, black=True)
                yield numbered(CONTROL, number), StageTask(hidden, {IMAGE: image, **mask})
            else:
                yield numbered(CONTROL, number), StageTask(encode, {IMAGE: image})
            if ref.mask_mode is ControlMaskMode.SEPARATE:
                masked = replace(encode, hides=True, bright=False)
                start = input_image_id(request.image)
                yield numbered(CONTROL_MASKED_IMAGE, number), StageTask(masked, {IMAGE: start, **mask})
        else:
            yield numbered(CONTROL, number), image
        if mask:
            yield numbered(CONTROL_MASK, number), mask[MASK]


@dataclass(frozen=True, slots=True)
class RecipeControl:
    """A ControlNet as it was applied. `mode` is set if it has several; `config_overrides` are as in `ControlRef` of
    `pool.values.core.refs`; `mask_sha256` is the hash of its inpaint mask, empty if it has none."""

    name: str = field(metadata=FILE_NAME)
    sha256: str
    image_sha256: str
    image_file: str = field(metadata=INFORMATIVE)
    strength: float
    start: float
    end: float
    mode: int | None = field(default=None, metadata=LATER_IN_DIGEST)
    #: "said" in JSON, for pydantic, which checks types, as for `recorded`
    config_overrides: Annotated[Mapping[str, bool], Field(alias="said")] = field(
        default_factory=dict, metadata={**LATER, JSON_NAME: "said"}
    )
    mask_sha256: str = field(default="", metadata=LATER)
    by_noise: bool = field(default=False, metadata=LATER)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    request, refs = source.request, source.sample.controls
    found = []
    for control, ref in zip(request.controls, refs, strict=True):
        image, mask = control.image or request.image, control.mask or request.mask
        found.append(
            RecipeControl(
                *(ref.name, ref.sha256, image.sha256, image.file),
                *(ref.strength, ref.start, ref.end),
                mode=ref.mode,
                config_overrides=dict(ref.config_overrides),
                mask_sha256="" if ref.mask_mode is None else mask.sha256,
                by_noise=ref.by_noise,
            )
        )
    return {"controls": tuple(found)}


def _restored(images: RecipeImages, find: FindFile) -> dict[str, Any]:
    controls = tuple(_restored_control(control, images, find) for control in images.controls)
    return {"controls": controls} if controls else {}


def _restored_control(control: RecipeControl, images: RecipeImages, find: FindFile) -> dict[str, Any]:
    found: dict[str, Any] = {"model": control.name, "strength": control.strength}
    found |= {"start": control.start, "end": control.end, "mode": control.mode}
    found |= {"shares_of": "noise"} if control.by_noise else {}
    if control.image_sha256 != images.image_sha256:
        found["image"] = find_input("controls.image", control.image_file, find)
    if control.mask_sha256 and control.mask_sha256 != images.mask_sha256:
        raise InputMissing("controls.mask: recipes do not name the file of a mask")
    return found


def _lines(images: RecipeImages) -> Iterator[Line]:
    for control in images.controls:
        parts = [f"strength {control.strength:g}"]
        if span := span_text(control.start, control.end, "the noise" if control.by_noise else "the steps"):
            parts.append(span)
        if control.mode is not None:
            parts.append(f"mode {control.mode}")
        parts += [f"{name} {'yes' if value else 'no'}" for name, value in control.config_overrides.items()]
        if control.mask_sha256:
            parts.append(f"inpaint mask (sha256 of its pixels {control.mask_sha256})")
        image = image_line(control.image_file, control.image_sha256)
        yield f"ControlNet {control.name}", f"{', '.join(parts)}; control image {image}  (sha256 {control.sha256})"


CONTROLS = Feature(defaults=partial(without_unused_parts, "controls"), images=Section(_recorded, _restored, _lines))
