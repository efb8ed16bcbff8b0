"""Recognise the diffusion model in a file of weights from keys and shapes, with the table of signatures.

Torch-free and pure. Knows the prefixes that files put before a diffusion model's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.pool.families.detection.layouts.shape_sizes import Config, ShapeReader
from modelpool.pool.families.detection.layouts.signature import Layout, LayoutNaming, Naming, Signature
from modelpool.pool.families.detection.other_files import other_file
from modelpool.pool.families.detection.signatures import LAYOUTS, SIGNATURES
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

#: key prefixes of diffusion models in files
PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "diffusion_model.", "model.", "transformer.", "unet.")


@dataclass(frozen=True, slots=True)
class DiffusionFacts:
    """A recognised diffusion model.

    name     of its family, short and stable; empty for a known architecture of unknown sizes
    title    for human readers
    naming   naming of its keys
    prefix   its key prefix in the file
    config   sizes inferred from shapes; fields named as in its own configuration
    latent   name of its latents; empty if unknown
    comfyui  its class in ComfyUI; empty if none
    runs     diffusers class with its architecture; empty if our dependencies have none
    """

    name: str
    title: str
    naming: Naming
    prefix: str
    config: Config
    latent: str = ""
    comfyui: str = ""
    runs: str = ""


def recognise_diffusion(shapes: Mapping[str, Shape]) -> DiffusionFacts | None:
    """Return the diffusion model among tensors of `shapes`, keys as in the file; None if there is no known one, or if
    the file is something else that shares keys with one (`other_file`).

    Raises UnknownArchitecture naming model and tensor, for keys of a known model with impossible shapes.
    """
    if other_file(shapes) is not None:
        return None
    found = find_layout(shapes)
    if found is None:
        return None
    prefix, layout, layout_naming = found
    own = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
    try:
        config = layout_naming.measure(ShapeReader(own))
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"its keys are those of {layout.title}, but: {error}") from error
    row = next((row for row in SIGNATURES if row.layout is layout and _is(row, config, shapes)), None)
    if row is None:
        return DiffusionFacts("", f"{layout.title}, of unknown sizes", layout_naming.naming, prefix, config)
    return DiffusionFacts(row.name, row.title, layout_naming.naming, prefix, config, row.latent, row.comfyui, row.runs)


def find_layout(keys: Mapping[str, Shape]) -> tuple[str, Layout, LayoutNaming] | None:
    """Return prefix, layout and naming of the diffusion model in a file with `keys`; None if there is no known one."""
    for prefix in prefixes_of(keys):
        for layout in LAYOUTS:
            for layout_naming in layout.namings:
                if layout_naming.fits(keys, prefix):
                    return prefix, layout, layout_naming
    return None


def prefixes_of(keys: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return the possible prefixes of a diffusion model, the one with the most keys first, the empty one last."""
    counted = Counter({prefix: sum(key.startswith(prefix) for key in keys) for prefix in PREFIXES})
    return (*(prefix for prefix, count in counted.most_common() if count), "")


def _is(row: Signature, config: Config, keys: Mapping[str, Shape]) -> bool:
    return all(key in keys for key in row.extra_keys) and row.when(config)
