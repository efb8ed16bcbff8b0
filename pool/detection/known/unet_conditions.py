"""Which of the UNet families a configuration is of, by what sets them apart whatever their size. Torch-free.

Knows the fields that `layouts.unet` measures. Exact sizes tell the published relatives of a family apart; they are in
the table of `signatures`.
"""

from __future__ import annotations

from modelpool.pool.detection.layouts.shape_sizes import Config, Value
from modelpool.pool.detection.layouts.signature import Condition, having


def sd1(**fields: Value) -> Condition:
    """A UNet of Stable Diffusion 1: its projections are convolutions, and only texts steer it."""
    return _still(linear=False, labelled=False, **fields)


def sd2(**fields: Value) -> Condition:
    """A UNet of Stable Diffusion 2: as the first, with linear projections."""
    return _still(linear=True, labelled=False, **fields)


def unclip(**fields: Value) -> Condition:
    """A UNet of Stable Diffusion 2 that reads a vector beside texts."""
    return _still(linear=True, labelled=True, **fields)


def sdxl(**fields: Value) -> Condition:
    """A UNet of SDXL's kind: it reads a vector beside texts, and its first level attends to nothing."""
    own = unclip(**fields)
    return lambda config: own(config) and depths(config)[:1] == (0,)


def refiner(config: Config) -> bool:
    """SDXL's refiner: its last level attends to nothing either."""
    return sdxl()(config) and depths(config)[-1:] == (0,)


def video(**fields: Value) -> Condition:
    """A UNet that attends over time, as Stable Video Diffusion's."""
    return having(use_temporal_attention=True, **fields)


def depths(config: Config) -> tuple[Value, ...]:
    """Transformer blocks behind each residual block on the way down."""
    found = config["transformer_depth"]
    assert isinstance(found, tuple), config
    return found


def _still(linear: bool, labelled: bool, **fields: Value) -> Condition:
    own = having(use_temporal_attention=False, use_linear_in_transformer=linear, **fields)
    return lambda config: (
        own(config)
        # one that reads no texts is none of these
        and config["context_dim"] is not None
        and (config["adm_in_channels"] is not None) is labelled
    )
