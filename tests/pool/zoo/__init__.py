"""A zoo of real architectures: tiny configurations of diffusers and transformers classes, random weights, inputs.

`FAMILIES` names them; `build` makes one. Weights are random everywhere, because zero-initialised gates would hide the
layers behind them. Sizes are as small as the code allows, so that a test can run all of them many times.
"""

import torch

from tests.pool.zoo.autoencoders import AUTOENCODERS
from tests.pool.zoo.case import Case, Maker, build_with, store_in
from tests.pool.zoo.denoisers import DENOISERS
from tests.pool.zoo.encoders import ENCODERS
from tests.pool.zoo.image_transformers import IMAGE_TRANSFORMERS
from tests.pool.zoo.video_transformers import VIDEO_TRANSFORMERS

#: name -> a function that makes the module and its inputs
FAMILIES: dict[str, Maker] = {
    **DENOISERS,
    **IMAGE_TRANSFORMERS,
    **VIDEO_TRANSFORMERS,
    **AUTOENCODERS,
    **ENCODERS,
}


def build(family: str, storage: torch.dtype = torch.float32) -> Case:
    """The case `family`, in evaluation mode; weights are random float32 numbers that `storage` holds exactly."""
    return build_with(FAMILIES[family], storage)


__all__ = ["FAMILIES", "Case", "build", "store_in"]
