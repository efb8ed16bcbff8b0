"""The row type of the architecture tables, which build and call diffusion models.

Knows no model and reads no files. `pool.families.parts.forward` names the conditioning inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, Call, Convert, Prepare, Shapes


@dataclass(frozen=True, slots=True)
class DiffusionArchitecture:
    """The way to build and call one kind of diffusion model.

    module   the class
    config   its arguments, from the sizes that recognition measured (in either naming) and the shapes of the parameters
             after `convert`. Both are equal for both namings, except that recognised sizes may be None if a naming does
             not tell. Raises UnknownArchitecture, or an arithmetic or look-up error for impossible sizes
    convert  tensors under the published names, without prefix, to the module's parameters: only renames, splits and
             reshapes rows (`pool.weights.keymaps.key_map.discover` traces it). Not used for files in the naming of
             diffusers
    call     (module, x, level_B, kwargs) -> the prediction, with the shape of x, which is the latent as the sampler
             has it: [B,C,H,W], video [B,C,T,H,W], audio [B,C,L]. Handles patches, positions, signs and the time scale.
             `level_B` is always float32, since half precision cannot represent a timestep: sigma in 0..1 for flow
             models, which predict noise - clean; otherwise the timestep, 0..999, and the family's prediction.
             The module gets the same numbers as from diffusers' pipeline
    prepare  what a run does once with its inputs, before the steps; None: nothing
    seconds_model  name in the module of the model that embeds seconds; empty: there is none
    lengths  arguments of the class that allocate no table
    """

    module: type[nn.Module]
    config: Callable[[Config, Shapes], Arguments]
    convert: Convert
    call: Call
    prepare: Prepare | None = None
    seconds_model: str = ""
    lengths: frozenset[str] = frozenset()
