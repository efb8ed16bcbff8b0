"""Custom nodes that save images with formats, paths and metadata of their own. Pure.

They are here under their own names, with what their public descriptions say. Files have the names and the recipes of
the pool: of a format and its quality, the nodes decide; what else they would write is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import IMAGE_NODES
from modelpool.actors.http.comfy.comfy_node_types import (
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    any_of,
    combo,
    flag,
    link,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import DecodedImage, SavedAs
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES

_SAVED_IMAGE = next(row.build for row in IMAGE_NODES if row.name == "SaveImage")
#: the formats of files that are written, by the endings that nodes name
_FORMATS: Mapping[str, str] = MappingProxyType({"png": "png", "jpg": "jpg", "jpeg": "jpg", "webp": "webp"})
#: webp files of this quality lose nothing
_LOSSLESS = 100


@dataclass(frozen=True, slots=True)
class _Saver:
    """A node that saves images: how it names its format, or the only one that it has; how it names its quality; what
    makes a webp file lossless; and what it would write next to the image."""

    name: str
    inputs: tuple[NodeInput, ...]
    format: str
    quality: str
    lossless: Callable[[Mapping[str, Any]], bool]
    unwritten: tuple[str, ...] = ()
    source: str = "images"

    def file(self, given: Mapping[str, Any]) -> SavedAs | None:
        """Return the file; None for the usual one, a PNG. Raises NodeUnsupported for a format that is not written."""
        written = {each.name: each.default for each in self.inputs}
        told = [name for name in self.unwritten if given.get(name) not in (None, "", written.get(name))]
        if told:
            warn(given, f"{', '.join(told)}: not written: a file of the pool has its own recipe, name and folder")
        ending = given.get(self.format, self.format).strip(".").lower()
        if ending not in _FORMATS:
            raise NodeUnsupported(f"{self.format}: found {ending[:40]}, expected one of {', '.join(_FORMATS)}")
        if ending == "png":
            return None
        quality = _LOSSLESS if ending == "webp" and self.lossless(given) else max(1, min(100, given[self.quality]))
        if ending == "webp" and quality == _LOSSLESS and not self.lossless(given):
            quality -= 1
        return SavedAs(_FORMATS[ending], 0.0, quality)

    def plain(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the outputs of a node, for a request without a workflow."""
        file = self.file(given)
        (image,) = _SAVED_IMAGE({**given, "images": given[self.source]})
        assert isinstance(image, DecodedImage), "the builder of SaveImage checks it"
        return (image if file is None else replace(image, saved=file),)

    def in_workflow(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the outputs of a node of a workflow."""
        file = self.file(given)
        (image,) = WORKFLOW_NODES["SaveImage"]({**given, "images": given[self.source]})
        return (image if file is None else replace(image, saved=file),)

    @property
    def kind(self) -> NodeType:
        """The kind of node."""
        inputs = (link(self.source, "IMAGE"), *self.inputs)
        return NodeType(self.name, "image", inputs, ("IMAGE",), self.plain, is_output=True)


def _is_true(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda given: given[name] in (True, "true")


_QUALITY = "quality_jpeg_or_webp"
#: what nodes write in the metadata of a file
_ABOUT = (
    "modelname", "positive", "negative", "width", "height", "seed_value", "steps", "cfg", "denoise", "clip_skip",
    "additional_hashes", "custom",
)  # fmt: skip
_HOW = (
    text("sampler_name", "", False, choices=SAMPLER_NAMES),
    text("scheduler_name", "", False, choices=SCHEDULE_NAMES),
)
_WHERE = ("counter", "time_format", "path", "filename")
_SAVERS = (
    _Saver(
        "Image Save",
        (
            text("output_path", "", False),
            text("filename_prefix", "ComfyUI", False),
            text("filename_delimiter", "_", False),
            whole("filename_number_padding", 4, 1, 9, False),
            text("filename_number_start", "false", False),
            text("extension", "png", False),
            whole("dpi", 300, 1, 2400, False),
            whole("quality", 100, 1, 100, False),
            text("optimize_image", "true", False),
            text("lossless_webp", "false", False),
            text("overwrite_mode", "false", False),
            text("show_history", "false", False),
            text("show_history_by_prefix", "true", False),
            text("embed_workflow", "true", False),
            text("show_previews", "true", False),
        ),
        "extension",
        "quality",
        _is_true("lossless_webp"),
        ("output_path", "filename_number_start", "dpi", "overwrite_mode", "embed_workflow"),
    ),
    _Saver(
        "Save Image (LoraManager)",
        (
            text("filename_prefix", "ComfyUI"),
            combo("file_format", ("png", "jpeg", "webp")),
            flag("lossless_webp"),
            whole("quality", 100, 1, 100),
            flag("embed_workflow"),
            flag("save_with_metadata", True),
            flag("add_counter_to_filename", True),
            flag("save_as_recipe"),
        ),
        "file_format",
        "quality",
        _is_true("lossless_webp"),
        ("embed_workflow", "save_with_metadata", "save_as_recipe"),
    ),
    *(
        _Saver(
            name,
            (
                text("filename", "%time_%basemodelname_%seed"),
                text("path", "", False),
                text("extension", "png"),
                flag("lossless_webp", True),
                whole(_QUALITY, 100, 1, 100),
                flag("optimize_png"),
                whole("counter", 0, 0, 2**63),
                text("time_format", "%Y-%m-%d-%H%M%S"),
                flag("save_workflow_as_json"),
                flag("embed_workflow", True),
                flag("show_preview", True),
                *_HOW,
                *any_of("metadata", "scheduler", *_ABOUT, "download_civitai_data", "easy_remix"),
            ),
            "extension",
            _QUALITY,
            _is_true("lossless_webp"),
            (
                *_WHERE,
                *_ABOUT,
                "sampler_name",
                "scheduler_name",
                "scheduler",
                "metadata",
                "save_workflow_as_json",
                "embed_workflow",
            ),
        )
        for name in ("Image Saver", "Image Saver Simple", "Save Image w/Metadata")
    ),
    _Saver(
        "Save_as_webp",
        (text("filename_prefix", "ComfyUI"), combo("mode", ("lossy", "lossless")), whole("compression", 80, 1, 100)),
        "webp",
        "compression",
        lambda given: given["mode"] == "lossless",
    ),
    _Saver(
        "LayerUtility: SaveImagePlus",
        (
            text("custom_path", "", False),
            text("filename_prefix", "comfyui", False),
            text("timestamp", "None", False),
            combo("format", ("png", "jpg")),
            whole("quality", 80, 10, 100),
            flag("meta_data"),
            text("blind_watermark", "", False),
            flag("save_workflow_as_json"),
            flag("preview", True),
        ),
        "format",
        "quality",
        lambda given: False,
        ("custom_path", "timestamp", "meta_data", "blind_watermark", "save_workflow_as_json"),
        source="images",
    ),
)


def _metadata(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What would be written in a file: nothing here."""
    return "", "", ""


_METADATA = NodeType(
    "Image Saver Metadata",
    "image",
    (*_HOW, *any_of(*_ABOUT, "download_civitai_data", "easy_remix")),
    ("METADATA", "STRING", "STRING"),
    _metadata,
)
SAVING_NODES = (*(saver.kind for saver in _SAVERS), _METADATA)
#: what they become in workflows
SAVING_BUILDERS: Mapping[str, Builder] = MappingProxyType({saver.name: saver.in_workflow for saver in _SAVERS})
