"""ComfyUI nodes that merge models: another model's weights are put into a model as patches, as LoRAs are. Pure.

The second model of a node is one as it is in its file. Text encoders have nodes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import NodeInput, NodeUnsupported, link, node_row, number
from modelpool.actors.http.comfy.comfy_values import ClipValue, LoraUse, ModelValue

#: blocks of the pool's merges for each group of the node with three shares
_GROUPS = {"input": ("IN", "TIME", "LABEL", "OTHER"), "middle": ("MID",), "out": ("OUT", "HEAD")}
_MODELS = (link("model1", "MODEL"), link("model2", "MODEL"))
_CLIPS = (link("clip1", "CLIP"), link("clip2", "CLIP"))
_MULTIPLIER = number("multiplier", 1.0, -10.0, 10.0)


def _of_model(
    given: Mapping[str, Any], merge: str, strength: float, blocks: Mapping[str, float] = MappingProxyType({})
) -> tuple[Any, ...]:
    model: ModelValue = given["model1"]
    other: ModelValue = given["model2"]
    if other.loras:
        names = ", ".join(use.name for use in other.loras)
        raise NodeUnsupported(f"model2: found a model with {names}, expected one as it is in its file")
    if other.image_prompts:
        raise NodeUnsupported("model2: found a model that reads images, expected one as it is in its file")
    if not other.name:
        raise NodeUnsupported("model2: expected a model that a loader names")
    use = LoraUse(other.name, strength, 0.0, merge, tuple(sorted(blocks.items())))
    return (replace(model, loras=(*model.loras, use)),)


def _of_clip(given: Mapping[str, Any], merge: str, strength: float) -> tuple[Any, ...]:
    clip: ClipValue = given["clip1"]
    other: ClipValue = given["clip2"]
    if other.loras:
        names = ", ".join(use.name for use in other.loras)
        raise NodeUnsupported(f"clip2: found text encoders with {names}, expected those of a file")
    if not other.name:
        raise NodeUnsupported("clip2: found text encoders of files of their own, expected those of a checkpoint")
    return (replace(clip, loras=(*clip.loras, LoraUse(other.name, 0.0, strength, merge))),)


def _check_multiplier(given: Mapping[str, Any]) -> float:
    found: float = given["multiplier"]
    if not found:
        raise NodeUnsupported("multiplier: found 0, which leaves no weights, expected another number")
    return found


def _mixed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_model(given, "mix", 1.0 - given["ratio"])


def _added(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_model(given, "add", 1.0)


def _subtracted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_model(given, "subtract", _check_multiplier(given))


def _mixed_by_groups(given: Mapping[str, Any]) -> tuple[Any, ...]:
    blocks = {block: 1.0 - given[name] for name, names in _GROUPS.items() for block in names}
    return _of_model(given, "mix", 1.0, blocks)


def _mixed_by_blocks(given: Mapping[str, Any]) -> tuple[Any, ...]:
    blocks = {_block_of(name): 1.0 - given[name] for name in given if name.endswith(".")}
    # weights in none of the blocks have the share of the first
    return _of_model(given, "mix", 1.0, {**blocks, "OTHER": blocks["TIME"]})


def _block_of(name: str) -> str:
    """Return the block of the pool's merges for an input: "input_blocks.4." is IN04."""
    group, _, place = name.removesuffix(".").partition(".")
    known = {"time_embed": "TIME", "label_emb": "LABEL", "out": "HEAD"}
    groups = {"input_blocks": "IN", "middle_block": "MID", "output_blocks": "OUT"}
    return known[group] if group in known else f"{groups[group]}{int(place):02}"


def _clip_mixed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_clip(given, "mix", 1.0 - given["ratio"])


def _clip_added(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_clip(given, "add", 1.0)


def _clip_subtracted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _of_clip(given, "subtract", _check_multiplier(given))


_row = partial(node_row, category="model_merging")


def _shares(*names: str) -> tuple[NodeInput, ...]:
    return tuple(number(name, 1.0, 0.0, 1.0) for name in names)


def _blocks(inputs: int, outputs: int) -> tuple[NodeInput, ...]:
    counts = {"input_blocks": inputs, "middle_block": 3, "output_blocks": outputs}
    names = [f"{group}.{place}." for group, count in counts.items() for place in range(count)]
    return _shares("time_embed.", "label_emb.", *names, "out.")


MERGE_NODES = (
    _row("ModelMergeSimple", (*_MODELS, *_shares("ratio")), _mixed, "MODEL"),
    _row("ModelMergeBlocks", (*_MODELS, *_shares(*_GROUPS)), _mixed_by_groups, "MODEL"),
    _row("ModelMergeAdd", _MODELS, _added, "MODEL"),
    _row("ModelMergeSubtract", (*_MODELS, _MULTIPLIER), _subtracted, "MODEL"),
    _row("ModelMergeSD1", (*_MODELS, *_blocks(12, 12)), _mixed_by_blocks, "MODEL"),
    _row("ModelMergeSDXL", (*_MODELS, *_blocks(9, 9)), _mixed_by_blocks, "MODEL"),
    _row("CLIPMergeSimple", (*_CLIPS, *_shares("ratio")), _clip_mixed, "CLIP"),
    _row("CLIPMergeAdd", _CLIPS, _clip_added, "CLIP"),
    _row("CLIPMergeSubtract", (*_CLIPS, _MULTIPLIER), _clip_subtracted, "CLIP"),
)
