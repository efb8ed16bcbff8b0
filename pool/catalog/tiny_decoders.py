"""Finds tiny decoders (TAESD and its relatives) among the files of the models, by name and content. Torch-free.

Their tensors do not tell for which latents they were distilled, so their names must: `taesd_decoder.safetensors`,
`taesdxl_decoder.pth`, `taef1/diffusion_pytorch_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from modelpool.pool.families.detection.vaes import recognise_vae
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, read_single_header
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.weights.quant.detect_layers import weight_shapes

#: latent channels of each decoder, by its name
CHANNELS: Mapping[str, int] = MappingProxyType({"taesd": 4, "taesdxl": 4, "taesd3": 16, "taef1": 16})
#: names that diffusers gives to every file; its folder has the name of the model
_PLAIN_NAMES = ("diffusion_pytorch_model", "model", "pytorch_model")


def find_tiny_decoders(paths: Iterable[Path], allow_pickle: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the name and the path of each tiny decoder among `paths`; of several with one name, the first that has a
    decoder with the right latents. Files that cannot be read are left out."""
    found: dict[str, str] = {}
    for path in paths:
        name = decoder_name(path)
        if name and name not in found and _decodes(path, CHANNELS[name], allow_pickle):
            found[name] = str(path)
    return tuple(found.items())


def decoder_name(path: Path) -> str:
    """Return the name of the tiny decoder that a file or folder is named after; "" for others."""
    stem = path.stem if path.suffix else path.name
    if stem.partition(".")[0] in _PLAIN_NAMES:
        stem = path.parent.name
    plain = stem.lower().replace("-", "_").removesuffix("_decoder")
    return plain if plain in CHANNELS else ""


def _decodes(path: Path, channels: int, allow_pickle: bool) -> bool:
    if path.suffix in PICKLE_SUFFIXES and not allow_pickle:
        return False
    try:
        shapes = weight_shapes(read_single_header(str(path), allow_pickle=allow_pickle))
    except (UserError, OSError):
        return False
    facts = recognise_vae(shapes)
    return facts is not None and facts.name == "taesd" and facts.has_decoder and facts.latent_channels == channels
