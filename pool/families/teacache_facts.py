"""What the authors of TeaCache published for each family: the polynomial of the relative change, and thresholds.

Source: Liu et al. 2024 ("TeaCache"), and the scripts and tables of ali-vilab/TeaCache for each family. For Wan 2.1,
those with retention steps. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TeaCacheFacts:
    """How TeaCache decides for one published model.

    coefficients  of the polynomial of the relative change, highest power first
    threshold     the smallest of the published ones: the best quality
    blocks        number of blocks of the model that they were measured on; 0: of all models of the family
    most_pixels   of a frame, up to which they are meant: models of two sizes have one layout
    of_vector     the change is that of the vector which modulates the blocks, not of the modulated input of the first
    first_steps   steps at the start that are computed in any case
    """

    coefficients: tuple[float, ...]
    threshold: float
    blocks: int = 0
    most_pixels: float = math.inf
    of_vector: bool = False
    first_steps: int = 1


_FLUX = TeaCacheFacts((4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01), 0.25)
_COGVIDEOX_5B = TeaCacheFacts(
    (-1.53880483e03, 8.43202495e02, -1.34363087e02, 7.97131516e00, -5.23162339e-02), 0.1, of_vector=True
)
#: between the sizes of the two image-to-video models of Wan 2.1: the geometric mean of 832 x 480 and 1280 x 720 pixels
_WAN_480_PIXELS = math.sqrt(832 * 480 * 1280 * 720)


def _wan(coefficients: tuple[float, ...], threshold: float, blocks: int, pixels: float = math.inf) -> TeaCacheFacts:
    return TeaCacheFacts(coefficients, threshold, blocks, pixels, of_vector=True, first_steps=5)


#: by the name of a row; of several for one size, the first whose pixels suffice counts
TEACACHE_FACTS: Mapping[str, tuple[TeaCacheFacts, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("flux_dev", "flux_schnell", "flux_fill", "flux_control"), (_FLUX,)),
        "hunyuan_video": (
            TeaCacheFacts((7.33226126e02, -4.01131952e02, 6.75869174e01, -3.14987800e00, 9.61237896e-02), 0.1),
        ),
        "ltxv": (
            TeaCacheFacts((2.14700694e01, -1.28016453e01, 2.31279151e00, 7.92487521e-01, 9.69274326e-03), 0.03, 28),
        ),
        "mochi": (TeaCacheFacts((-3.51241319e03, 8.11675948e02, -6.09400215e01, 2.42429681e00, 3.05291719e-03), 0.06),),
        # the first of the two published versions
        "lumina2": (TeaCacheFacts((393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344), 0.2),),
        "cogvideox_2b": (
            TeaCacheFacts(
                (-3.10658903e01, 2.54732368e01, -5.92380459e00, 1.75769064e00, -3.61568434e-03), 0.1, of_vector=True
            ),
        ),
        **dict.fromkeys(("cogvideox", "cogvideox_i2v"), (_COGVIDEOX_5B,)),
        "cogvideox_15": (
            TeaCacheFacts(
                (2.50210439e02, -1.65061612e02, 3.57804877e01, -7.81551492e-01, 3.58559703e-02), 0.1, of_vector=True
            ),
        ),
        "cogvideox_15_i2v": (
            TeaCacheFacts(
                (1.22842302e02, -1.04088754e02, 2.62981677e01, -3.06009921e-01, 3.71213220e-02), 0.1, of_vector=True
            ),
        ),
        "wan_t2v": (
            _wan((-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02), 0.05, 30),
            _wan((-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01), 0.1, 40),
        ),
        "wan21_i2v": (
            _wan(
                (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01), 0.2, 40, _WAN_480_PIXELS
            ),
            _wan((8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02), 0.2, 40),
        ),
    }
)


def teacache_facts(row: str, blocks: int) -> tuple[TeaCacheFacts, ...]:
    """Return what was published for a model of the row `row` with so many blocks, by rising pixels; empty for none."""
    return tuple(facts for facts in TEACACHE_FACTS.get(row, ()) if facts.blocks in (0, blocks))
