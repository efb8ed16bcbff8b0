"""The projection of an image embedding and the numbers of a view to what a UNet reads in the place of a text: a part of
the module of the UNet, and a component of its own in files and folders."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from modelpool.pool.families.parts.unet_facts import VIEW_PREFIX
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

#: its name in the module of the UNet
PROJECTION = VIEW_PREFIX.removesuffix(".")
#: a level of its names in folders
_LEVEL = "proj."


def projection_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of the projection among the tensors of a file or a folder, by their names in the module of
    the UNet."""
    return {
        VIEW_PREFIX + key.removeprefix(VIEW_PREFIX).removeprefix(_LEVEL): value
        for key, value in tensors.items()
        if key.startswith(VIEW_PREFIX)
    }


def empty_projection(shapes: Mapping[str, Shape]) -> nn.Module:
    """Return the projection without weights, on the meta device, for the parameters of `shapes`. Raises
    UnknownArchitecture unless the weight has two dimensions."""
    shape = shapes.get(f"{VIEW_PREFIX}weight", ())
    if len(shape) != 2:
        raise UnknownArchitecture(f"found {VIEW_PREFIX}weight of shape {shape}, expected two dimensions")
    rows, columns = shape
    return nn.Linear(columns, rows, device="meta").eval().requires_grad_(False)
