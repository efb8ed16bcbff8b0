"""Which diffusion model a file of weights holds, from keys and shapes alone: the door to the table of signatures.

Torch-free and pure. Knows the prefixes that files put before a diffusion model's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.layouts.shape_sizes import Config, ShapeReader
from modelpool.pool.detection.layouts.signature import Layout, Naming, Signature, Spelling
from modelpool.pool.detection.signatures import LAYOUTS, SIGNATURES
from modelpool.pool.formats.safetensors_file import Shape

#: what the keys of the diffusion model begin with in files
PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "diffusion_model.", "model.", "transformer.", "unet.")


@dataclass(frozen=True, slots=True)
class DiffusionFacts:
    """A diffusion model, recognised.

    name     of its family, short and stable; empty for an architecture that is known with sizes that are not
    title    for human readers
    naming   whose names its tensors have
    prefix   what its keys begin with in the file
    config   the sizes that follow from its shapes; fields as its own configuration calls them
    latent   name of its latents; empty where it is not known
    comfyui  the class that ComfyUI knows it as; empty where it has none
    runs     the class of diffusers that has its architecture; empty where our dependencies have none
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
    """The diffusion model among tensors of `shapes`, keys as the file has them; None for a file without a known one.

    Raises UnknownArchitecture naming the model and the tensor, for one whose keys are a known model's and whose shapes
    cannot be.
    """
    found = find_layout(shapes)
    if found is None:
        return None
    prefix, layout, spelling = found
    own = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
    try:
        config = spelling.measure(ShapeReader(own))
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"its keys are those of {layout.title}, but: {error}") from error
    row = next((row for row in SIGNATURES if row.layout is layout and _is(row, config, shapes)), None)
    if row is None:
        return DiffusionFacts("", f"{layout.title}, of sizes that are not known", spelling.naming, prefix, config)
    return DiffusionFacts(row.name, row.title, spelling.naming, prefix, config, row.latent, row.comfyui, row.runs)


def find_layout(keys: Mapping[str, Shape]) -> tuple[str, Layout, Spelling] | None:
    """The prefix, layout and spelling of the diffusion model in a file with `keys`; None for no known one."""
    for prefix in prefixes_of(keys):
        for layout in LAYOUTS:
            for spelling in layout.spellings:
                if spelling.fits(keys, prefix):
                    return prefix, layout, spelling
    return None


def prefixes_of(keys: Mapping[str, Shape]) -> tuple[str, ...]:
    """The prefixes under which a diffusion model may be, the one with the most keys first; none at all comes last."""
    counted = Counter({prefix: sum(key.startswith(prefix) for key in keys) for prefix in PREFIXES})
    return (*(prefix for prefix, count in counted.most_common() if count), "")


def _is(row: Signature, config: Config, keys: Mapping[str, Shape]) -> bool:
    return all(key in keys for key in row.beside) and row.when(config)
