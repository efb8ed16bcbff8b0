"""`TeaCacheFacts`: what the authors of TeaCache published for a model. Torch-free.

Source: Liu et al. 2024 ("TeaCache"), and the scripts and tables of ali-vilab/TeaCache for each family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TeaCacheFacts:
    """How TeaCache decides for one published model.

    coefficients  of the polynomial of the relative change, highest power first
    threshold     the smallest of the published ones: the best quality
    blocks        number of blocks of the model that they were measured on; 0: of all models of the family
    most_pixels   of a frame, up to which they are meant: models of two sizes have one layout
    of_vector     the vector which modulates the blocks is compared, not the modulated input of the first
    first_steps   steps at the start that are computed in any case
    """

    coefficients: tuple[float, ...]
    threshold: float
    blocks: int = 0
    most_pixels: float = math.inf
    of_vector: bool = False
    first_steps: int = 1
