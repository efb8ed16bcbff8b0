"""Recognises a vision encoder in a file of its own, as a checkpoint with one component.

IP-Adapters and Redux read such encoders, whatever the diffusion model is. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.safetensors_file import Header
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role

#: a key of the encoder at the top of its file, by the prefix of its keys
_SIGNS: Mapping[str, str] = {
    "vision_model.embeddings.patch_embedding.weight": "",
    "visual.conv1.weight": "visual.",
}
#: file names in a folder of transformers, which has a configuration with facts that shapes do not tell
_FOLDER_WEIGHTS = ("model", "pytorch_model")
_FOLDER_CONFIG = "config.json"
#: of no latent: the file has no VAE and no diffusion model
_NO_LATENT = LatentFacts(4, 8, 1.0)


def vision_family(header: Header) -> LocatedFamily | None:
    """Return the family of a file that contains a vision encoder only; None for any other file."""
    if header.configs:
        return None
    prefix = next((prefix for sign, prefix in _SIGNS.items() if sign in header.tensors), None)
    if prefix is None or any(
        key.startswith(("model.diffusion_model.", "multi_modal_projector.")) for key in header.tensors
    ):
        return None
    config = _folder_config(Path(header.path))
    return LocatedFamily(
        name="vision_encoder",
        title="vision encoder",
        prefixes={Role.VISION_ENCODER: prefix},
        architectures={Role.VISION_ENCODER: Architecture.VISION_MODEL},
        texts={},
        native_pixels=224,
        scaling_factor=1.0,
        configs={Role.VISION_ENCODER: config} if config else {},
        latent=_NO_LATENT,
    )


def _folder_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration in the folder of the file; empty if there is none for it."""
    place = path.parent / _FOLDER_CONFIG
    if path.name.partition(".")[0] not in _FOLDER_WEIGHTS or not place.is_file():
        return {}
    try:
        found = read_object(read_text_file(place, "the configuration of a vision encoder"))
    except BadJson:
        return {}
    inner = found.get("vision_config")
    return inner if isinstance(inner, dict) else found
