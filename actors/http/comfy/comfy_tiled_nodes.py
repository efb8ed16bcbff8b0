"""Custom nodes that enlarge an image and redraw it tile by tile, of the pack ComfyUI_UltimateSDUpscale. Pure.

What they do is known from the pack's public description and from the FAQ of the script that it is named after. A tile
is cut out with space around it, encoded, sampled, decoded, and pasted with a blurred mask before the next one is cut.
Each of these is a step of a workflow: the tiles that a tile does not touch do not wait for it, and a step that fails is
repeated alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_SEED,
    MAX_SIDE,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    Builder,
    NodeInput,
    NodeUnsupported,
    combo,
    flag,
    link,
    node_row,
    number,
    only_in_workflows,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_tiles import Box, Grid, Tile, region_of, whole_cells
from modelpool.actors.http.comfy.comfy_values import AnyImage, ControlUse, ModelValue, NodeImage, NodeMask, TextValue
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import counted

#: tiles of one node, with the ones that redraw seams
MOST_TILES = 100
#: how an enlarged image gets its size, and a tile the size that is sampled
_METHOD = "lanczos"
_NONE, _BANDS, _HALVES, _CORNERS = "None", "Band Pass", "Half Tile", "Half Tile + Intersections"
_SEAMS = (_NONE, _BANDS, _HALVES, _CORNERS)
_ORDERS = ("Linear", "Chess", _NONE)
#: what texts have that is for places of an image, besides ControlNets, with words for it
_PLACED: Mapping[str, str] = MappingProxyType(
    {
        "regions": "texts for parts of the image",
        "references": "reference images",
        "inpainted": "the image of an inpainting model",
        "video": "the conditions of a video",
        "prior": "latents of stage C",
        "followed": "latents of stage C",
        "gligen": "texts in boxes",
    }
)


@dataclass(slots=True)
class _Canvas:
    """An image on which tiles are pasted one after the other. A tile is cut from the image and the earlier pastes
    that overlap it, so that it waits for no other tile."""

    nodes: MadeNodes
    size: tuple[int, int]
    image: AnyImage
    _pasted: list[tuple[NodeImage, Any, Box, Box]] = field(default_factory=list)

    def cut(self, node_id: str, region: Box) -> AnyImage:
        """Return a part of the image as it is now."""
        found: AnyImage = self.image
        if (region.width, region.height) != self.size:
            found = cropped(self.nodes, f"{node_id}/cut", found, region)
        for over, mask, place, changed in self._pasted:
            if changed.meets(region):
                found = self._with(f"{node_id}/under", found, over, mask, place.left - region.left,
                                   place.top - region.top)  # fmt: skip
        return found

    def paste(self, image: NodeImage, mask: Any, place: Box, changed: Box) -> None:
        """Paste an image at a place with a mask, None for all of it, that changes a part of it."""
        self._pasted.append((image, mask, place, changed))

    def settle(self, node_id: str, last_id: str) -> None:
        """Make an image of all that was pasted; the last node has the id `last_id`."""
        for number_, (over, mask, place, _) in enumerate(self._pasted, start=1):
            made_id = last_id if number_ == len(self._pasted) else f"{node_id}/pasted"
            self.image = self._with(made_id, self.image, over, mask, place.left, place.top)
        self._pasted.clear()

    def _with(self, node_id: str, under: AnyImage, over: NodeImage, mask: Any, x: int, y: int) -> NodeImage:
        values = {"destination": under, "source": over} | ({} if mask is None else {"mask": mask})
        settings = {"x": x, "y": y, "resize": False}
        return _image(self.nodes.operate(node_id, "image_composite", NodeImage, values, settings))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Tiles that are redrawn one after the other: how much is denoised, the space around them, the blur of their
    masks, and the size that all of them have (0, 0: as large as they are)."""

    name: str
    tiles: Sequence[Tile]
    denoise: float
    padding: int
    blur: int
    least: tuple[int, int]


@dataclass(slots=True)
class _Redraw:
    """Redraws tiles of an image with a sampler, by the inputs of a node."""

    given: Mapping[str, Any]
    size: tuple[int, int]
    _masks: dict[Any, NodeMask] = field(default_factory=dict)
    _whole: dict[Any, NodeImage] = field(default_factory=dict)
    _parts: dict[Any, AnyImage] = field(default_factory=dict)

    @property
    def nodes(self) -> MadeNodes:
        """The nodes of the workflow."""
        found: MadeNodes = self.given["nodes"]
        return found

    @property
    def node_id(self) -> str:
        """The id of the node."""
        return str(self.given["node_id"])

    def run(self, canvas: _Canvas, work: _Pass) -> None:
        """Redraw the tiles of a pass."""
        for place, tile in enumerate(work.tiles, start=1):
            node_id = f"{self.node_id}/{work.name} {place}"
            region = region_of(tile.box, work.padding, self.size, work.least)
            drawn = self._drawn(node_id, canvas.cut(node_id, region), region, work.denoise)
            mask = self._mask(tile, region, work.blur)
            canvas.paste(drawn, mask, region, tile.box.grown(_reach(work.blur)) if mask is not None else region)

    def _drawn(self, node_id: str, image: AnyImage, region: Box, denoise: float) -> NodeImage:
        """Return a part of the image after sampling."""
        sampled_size = whole_cells(region.width), whole_cells(region.height)
        own_size = region.width, region.height
        if sampled_size != own_size:
            image = scaled(self.nodes, f"{node_id}/larger", image, sampled_size)
        vae, tell = self.given["vae"], {"nodes": self.nodes, "warn": self.given.get("warn")}
        (latent,) = WORKFLOW_NODES["VAEEncode"]({**tell, "node_id": f"{node_id}/encode", "pixels": image, "vae": vae})
        given = {**self.given, "node_id": f"{node_id}/sample", "latent_image": latent, "denoise": denoise}
        given["model"] = self._model(self.given["model"], region)
        given |= {side: self._text(self.given[side], region) for side in ("positive", "negative")}
        before = dict(self.nodes.warnings)
        if self.given.get("custom_sigmas") is None:
            (latent,) = WORKFLOW_NODES["KSampler"](given)
        else:
            parts = {"sampler": given["custom_sampler"], "sigmas": given["custom_sigmas"]}
            noise = {"add_noise": True, "noise_seed": given["seed"]}
            latent, _ = WORKFLOW_NODES["SamplerCustom"]({**given, **parts, **noise})
        own = (each.replace(given["node_id"], self.node_id) for each in self.nodes.warnings if each not in before)
        self.nodes.warnings = before | dict.fromkeys(own)  # of the node of the user, and once for all tiles
        decoding = {**tell, "node_id": f"{node_id}/decode", "samples": latent, "vae": vae}
        (found,) = WORKFLOW_NODES["VAEDecode"](decoding)
        return found if sampled_size == own_size else scaled(self.nodes, f"{node_id}/smaller", found, own_size)

    def _mask(self, tile: Tile, region: Box, blur: int) -> NodeMask | None:
        """Return the mask of a tile in the image that is sampled for it; None for all of it. Masks of equal tiles are
        one."""
        around = _room(tile.box, region, _reach(blur)).within(self.size)
        box = replace(tile.box, left=tile.box.left - around.left, top=tile.box.top - around.top)
        part = replace(region, left=region.left - around.left, top=region.top - around.top)
        fades = tile.peak != (0, 0)
        if (box.width, box.height) == (around.width, around.height) and not fades:
            return None
        key = box, part, around.width, around.height, tile.peak, blur
        if key not in self._masks:
            self._masks[key] = self._new_mask(tile, box, part, (around.width, around.height), blur)
        return self._masks[key]

    def _new_mask(self, tile: Tile, box: Box, part: Box, size: tuple[int, int], blur: int) -> NodeMask:
        node_id = f"{self.node_id}/mask {len(self._masks) + 1}"
        found = self._solid(f"{node_id}/tile", (box.width, box.height), 1.0)
        if all(tile.peak):
            found = self._changed(f"{node_id}/faded", "mask_radial", found, x=tile.peak[0], y=tile.peak[1])
        elif any(tile.peak):
            x, y = tile.peak
            across = {"left": x, "right": box.width - x if x else 0}
            down = {"top": y, "bottom": box.height - y if y else 0}
            found = self._changed(f"{node_id}/faded", "mask_feather", found, **across, **down)
        if (box.width, box.height) != size:
            values = {"destination": self._solid(f"{node_id}/around", size, 0.0), "source": found}
            settings = {"x": box.left, "y": box.top, "mode": "add"}
            found = _mask(self.nodes.operate(f"{node_id}/placed", "mask_composite", NodeMask, values, settings))
        if blur:
            found = self._changed(f"{node_id}/blurred", "mask_blur", found, pixels=float(blur))
        if (part.width, part.height) == size:
            return found
        sides = {"x": part.left, "y": part.top, "width": part.width, "height": part.height}
        return self._changed(f"{node_id}/part", "mask_crop", found, **sides)

    def _solid(self, node_id: str, size: tuple[int, int], level: float) -> NodeMask:
        settings = {"width": size[0], "height": size[1], "level": level}
        return _mask(self.nodes.operate(node_id, "mask_solid", NodeMask, {}, settings))

    def _changed(self, node_id: str, operation: str, mask: NodeMask, **settings: float) -> NodeMask:
        return _mask(self.nodes.operate(node_id, operation, NodeMask, {"mask": mask}, settings))

    def _text(self, text: TextValue, region: Box) -> TextValue:
        return text.each(lambda each: replace(each, controls=self._controls(each.controls, region)))

    def _model(self, model: ModelValue, region: Box) -> ModelValue:
        return replace(model, controls=self._controls(model.controls, region))

    def _controls(self, controls: tuple[ControlUse, ...], region: Box) -> tuple[ControlUse, ...]:
        return tuple(replace(use, image=self._part(use.image, region)) for use in controls)

    def _part(self, image: AnyImage, region: Box) -> AnyImage:
        """Return the part of the image of a ControlNet that lies on a region, once it is as large as the whole."""
        key = image, region
        if key not in self._parts:
            node_id = f"{self.node_id}/control {len(self._parts) + 1}"
            if image not in self._whole:
                self._whole[image] = scaled(self.nodes, f"{node_id}/whole", image, self.size, crop=True)
            found = self._whole[image]
            if (region.width, region.height) != self.size:
                found = cropped(self.nodes, node_id, found, region)
            sampled_size = whole_cells(region.width), whole_cells(region.height)
            if sampled_size != (region.width, region.height):
                found = scaled(self.nodes, f"{node_id}/larger", found, sampled_size)
            self._parts[key] = found
        return self._parts[key]


def _room(box: Box, region: Box, reach: int) -> Box:
    """Return a region that is larger where a tile ends at it: a blur repeats the edge of a mask, and the tile fades
    there. At the edge of the image nothing fades."""
    left, top = (reach if a == b else 0 for a, b in ((box.left, region.left), (box.top, region.top)))
    right, bottom = (reach if a == b else 0 for a, b in ((box.right, region.right), (box.bottom, region.bottom)))
    width, height = region.width + left + right, region.height + top + bottom
    return Box(region.left - left, region.top - top, width, height)


def _reach(blur: int) -> int:
    """Return the pixels that a blur reaches. Source: `mask_blur` of the pool's operations."""
    return math.ceil(3 * blur)


def _image(value: Any) -> NodeImage:
    assert isinstance(value, NodeImage), "the result of an operation on images"
    return value


def _mask(value: Any) -> NodeMask:
    assert isinstance(value, NodeMask), "the result of an operation on masks"
    return value


def cropped(nodes: MadeNodes, node_id: str, image: AnyImage, part: Box) -> NodeImage:
    """Return a part of an image."""
    settings = {"x": part.left, "y": part.top, "width": part.width, "height": part.height}
    return _image(nodes.operate(node_id, "image_crop", NodeImage, {"image": image}, settings))


def scaled(nodes: MadeNodes, node_id: str, image: AnyImage, size: tuple[int, int], crop: bool = False) -> NodeImage:
    """Return an image in another size, stretched, or cut off at the centre."""
    settings = {"width": size[0], "height": size[1], "method": _METHOD, "crop": crop}
    return _image(nodes.operate(node_id, "image_scale", NodeImage, {"image": image}, settings))


def _check(given: Mapping[str, Any]) -> None:
    """Warn of fields that are not read. Raises NodeUnsupported for what a tile cannot have."""
    if given["tiled_decode"]:
        warn(given, "tiled_decode: found true; tiles are decoded in one piece, or in parts where they need it")
    if given["batch_size"] != 1:
        raise NodeUnsupported(f"batch_size: found {given['batch_size']}, expected 1: a tile reads those before it")
    for side in ("positive", "negative"):
        for each in given[side].all_parts:
            for name, words in _PLACED.items():
                if getattr(each, name):
                    raise NodeUnsupported(f"{side}: found {words}, which are for the whole image and would be applied "
                                          "to each tile; expected texts, and ControlNets")  # fmt: skip
    model: ModelValue = given["model"]
    texts = [each for side in ("positive", "negative") for each in given[side].all_parts]
    for use in (each for value in (model, *texts) for each in (*value.controls, *value.image_prompts)):
        if use.mask is not None:
            raise NodeUnsupported("model, positive, negative: found a ControlNet or an image prompt with a mask for "
                                  "the whole image, expected none with a mask")  # fmt: skip
    if (given.get("custom_sampler") is None) != (given.get("custom_sigmas") is None):
        raise NodeUnsupported("custom_sampler, custom_sigmas: found one of them, expected both, or none")
    if given.get("custom_sigmas") is not None:
        if given["seam_fix_mode"] != _NONE:
            raise NodeUnsupported(f"seam_fix_mode: found {given['seam_fix_mode']} with custom_sigmas, expected None: "
                                  "seams have a strength of their own")  # fmt: skip
        names = ", ".join(("steps", "sampler_name", "scheduler", "denoise"))
        warn(given, f"{names}: not read next to custom_sampler and custom_sigmas")
    if given["seam_fix_mode"] in (_HALVES, _CORNERS):
        warn_unread(given, "seam_fix_width", f"{given['seam_fix_mode']} redraws whole tiles, Band Pass bands", 64)


def _passes(given: Mapping[str, Any], grid: Grid) -> Iterator[_Pass]:
    """Yield the passes over an image: its tiles, then its seams."""
    least = grid.tile if given["force_uniform_tiles"] else (0, 0)
    if given["mode_type"] != _NONE:
        tiles = grid.tiles(given["mode_type"] == "Chess")
        denoise = 1.0 if given.get("custom_sigmas") is not None else given["denoise"]
        yield _Pass("tile", tiles, denoise, given["tile_padding"], given["mask_blur"], least)
    seam = partial(_Pass, denoise=given["seam_fix_denoise"], padding=given["seam_fix_padding"],
                   blur=given["seam_fix_mask_blur"])  # fmt: skip
    if given["seam_fix_mode"] == _BANDS:
        for number_, tiles in enumerate(grid.bands(given["seam_fix_width"]), start=1):
            yield seam(f"band {number_}", tiles, least=(0, 0))
    elif given["seam_fix_mode"] != _NONE:
        for number_, tiles in enumerate(grid.half_tiles(), start=1):
            yield seam(f"half {number_}", tiles, least=least)
    if given["seam_fix_mode"] == _CORNERS:
        yield seam("corner", grid.intersections(), least=least)


def _redrawn(given: Mapping[str, Any], image: AnyImage, size: tuple[int, int]) -> tuple[Any, ...]:
    """Return an image of a size after all passes."""
    _check(given)
    passes = [each for each in _passes(given, Grid(size, (given["tile_width"], given["tile_height"])))
              if each.denoise > 0 and each.tiles]  # fmt: skip
    count = sum(len(each.tiles) for each in passes)
    if count > MOST_TILES:
        raise NodeUnsupported(
            f"tile_width, tile_height: found {counted(count, 'tile')} of {given['tile_width']}x{given['tile_height']} "
            f"in {size[0]}x{size[1]}, expected up to {MOST_TILES}: larger tiles"
        )
    canvas = _Canvas(given["nodes"], size, image)
    redraw = _Redraw(given, size)
    for each in passes:
        redraw.run(canvas, each)
        canvas.settle(f"{given['node_id']}/{each.name}", given["node_id"] if each is passes[-1] else
                      f"{given['node_id']}/{each.name}")  # fmt: skip
    found = canvas.image
    return (replace(found, sampler=given["node_id"]) if isinstance(found, NodeImage) and passes else found,)


def _size_of(given: Mapping[str, Any], name: str) -> tuple[int, int]:
    size: tuple[int, int] | None = given["sizes"].get(name)
    if size is None:
        raise NodeUnsupported(
            f"{name}: found an image of a size that is known when it is made, and not before: the tiles follow from "
            "it; expected ImageScale between, which sets the size"
        )
    return size


def _upscaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Enlarge an image, by an upscaler if there is one, and redraw it."""
    nodes: MadeNodes = given["nodes"]
    own = _size_of(given, "image")
    size = enlarged(own, given["upscale_by"])
    if max(size) > MAX_SIDE:
        raise NodeUnsupported(f"upscale_by: found {size[0]}x{size[1]} pixels, expected sides up to {MAX_SIDE}")
    image = nodes.as_images(given["node_id"], given["image"])
    if (upscaler := given.get("upscale_model")) is not None:
        image = nodes.upscale(f"{given['node_id']}/upscale", image, upscaler)
    if upscaler is not None or size != own:
        image = scaled(nodes, f"{given['node_id']}/enlarged", image, size)
    return _redrawn(given, image, size)


def _not_upscaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    image = nodes.as_images(given["node_id"], given["upscaled_image"])
    return _redrawn(given, image, _size_of(given, "upscaled_image"))


def enlarged(size: tuple[int, int], factor: float) -> tuple[int, int]:
    """Return the size of an image that is larger by a factor."""
    width, height = (max(1, round(side * factor)) for side in size)
    return width, height


_LINKS = (link("model", "MODEL"), link("positive", "CONDITIONING"), link("negative", "CONDITIONING"),
          link("vae", "VAE"))  # fmt: skip
_FACTOR = number("upscale_by", 2.0, 0.05, 4.0)
_SAMPLING: tuple[NodeInput, ...] = (
    whole("seed", 0, 0, MAX_SEED),
    whole("steps", 20, 1, MAX_STEPS),
    number("cfg", 8.0, 0.0, 100.0),
    combo("sampler_name", SAMPLER_NAMES),
    combo("scheduler", SCHEDULE_NAMES),
    number("denoise", 0.2, 0.0, 1.0),
)
_TILES: tuple[NodeInput, ...] = (
    combo("mode_type", _ORDERS),
    whole("tile_width", 512, 64, MAX_SIDE),
    whole("tile_height", 512, 64, MAX_SIDE),
    whole("mask_blur", 8, 0, 64),
    whole("tile_padding", 32, 0, MAX_SIDE),
    combo("seam_fix_mode", _SEAMS),
    number("seam_fix_denoise", 1.0, 0.0, 1.0),
    whole("seam_fix_width", 64, 2, MAX_SIDE),
    whole("seam_fix_mask_blur", 8, 0, 64),
    whole("seam_fix_padding", 16, 0, MAX_SIDE),
    flag("force_uniform_tiles", True),
    flag("tiled_decode"),
    whole("batch_size", 1, 1, 4096),
)
_row = partial(node_row, category="custom")
TILED_NODES = (
    _row(
        "UltimateSDUpscale",
        (link("image", "IMAGE"), *_LINKS, link("upscale_model", "UPSCALE_MODEL"), _FACTOR, *_SAMPLING, *_TILES),
        only_in_workflows,
        "IMAGE",
    ),
    _row(
        "UltimateSDUpscaleNoUpscale",
        (link("upscaled_image", "IMAGE"), *_LINKS, *_SAMPLING, *_TILES),
        only_in_workflows,
        "IMAGE",
    ),
    _row(
        "UltimateSDUpscaleCustomSample",
        (
            *(link("image", "IMAGE"), *_LINKS, _FACTOR, *_SAMPLING, *_TILES),
            link("upscale_model", "UPSCALE_MODEL", is_required=False),
            link("custom_sampler", "SAMPLER", is_required=False),
            link("custom_sigmas", "SIGMAS", is_required=False),
        ),
        only_in_workflows,
        "IMAGE",
    ),
)
#: what they become in workflows
TILED_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "UltimateSDUpscale": _upscaled,
        "UltimateSDUpscaleNoUpscale": _not_upscaled,
        "UltimateSDUpscaleCustomSample": _upscaled,
    }
)
