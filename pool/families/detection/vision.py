"""Recognise the vision encoder in a file, from keys and shapes. Torch-free and pure.

The width and patch size of its patch embedding distinguish the published sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.files.formats.safetensors_file import Shape

#: patch embedding by code base, keys without prefix
_PATCHES: tuple[tuple[str, str], ...] = (
    ("vision_model.embeddings.patch_embedding.weight", "clip"),
    ("embeddings.patch_embeddings.projection.weight", "dino2"),
    ("visual.conv1.weight", "clip"),
    ("conv1.weight", "clip"),
)
#: projection of the image embedding, and the dimension that is its width
_PROJECTIONS: tuple[tuple[str, int], ...] = (("visual_projection.weight", 0), ("visual.proj", 1), ("proj", 1))
#: names by code base, width and patch size
_SIZES: Mapping[tuple[str, int, int], tuple[str, str]] = {
    ("clip", 768, 32): ("clip_vision_b32", "CLIP vision B/32"),
    ("clip", 768, 16): ("clip_vision_b16", "CLIP vision B/16"),
    ("clip", 1024, 14): ("clip_vision_l", "CLIP vision L/14"),
    ("clip", 1280, 14): ("clip_vision_h", "CLIP vision H/14"),
    ("clip", 1664, 14): ("clip_vision_g", "CLIP vision bigG/14"),
    ("clip", 1152, 14): ("siglip_vision", "SigLIP vision so400m/14"),
    ("clip", 1152, 16): ("siglip2_vision", "SigLIP 2 vision so400m/16"),
    ("dino2", 1024, 14): ("dino2_large", "DINOv2 large"),
    ("dino2", 1536, 14): ("dino2_giant", "DINOv2 giant"),
}
#: SigLIP pools its states with attention; its smaller models have sizes of CLIP's
_SIGLIP_HEAD = "vision_model.head.probe"


def recognise_vision(shapes: Mapping[str, Shape]) -> tuple[str, str] | None:
    """Return name and title of the vision encoder with tensors of `shapes`; None if unknown."""
    is_siglip = _SIGLIP_HEAD in shapes
    for key, code in _PATCHES:
        shape = shapes.get(key, ())
        if len(shape) == 4 and shape[1] == 3:
            found = _SIZES.get((code, shape[0], shape[2]))
            return None if found is not None and is_siglip and not found[0].startswith("siglip") else found
    return None


def states_widths(shapes: Mapping[str, Shape]) -> frozenset[int]:
    """Return the widths that the outputs of a vision encoder with tensors of `shapes` may have: of its states, and of
    its projection. Empty if the names are unknown here."""
    patches = [shapes[key][0] for key, _ in _PATCHES if len(shapes.get(key, ())) == 4]
    if not patches:
        return frozenset()
    projected = [shapes[key][place] for key, place in _PROJECTIONS if len(shapes.get(key, ())) == 2]
    return frozenset((*patches, *projected))
