"""Conditions that distinguish UNet families at any size. Torch-free.

Knows the fields that `layouts.unet` measures. Exact sizes, which distinguish the published relatives of a family, are
in the rows of `unets`.
"""

from __future__ import annotations

from modelpool.pool.detection.layouts.shape_sizes import Config, Value
from modelpool.pool.detection.layouts.signature import Condition, having


def sd1(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 1: convolutional projections, and only text conditioning."""
    return _still(linear=False, labelled=False, **fields)


def sd2(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 2: as the first, with linear projections."""
    return _still(linear=True, labelled=False, **fields)


def unclip(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 2 with vector conditioning."""
    return _still(linear=True, labelled=True, **fields)


def sdxl(**fields: Value) -> Condition:
    """Return the condition for UNets like SDXL's: vector conditioning, and no attention at the first level."""
    own = unclip(**fields)
    return lambda config: own(config) and depths(config)[:1] == (0,)


def refiner(config: Config) -> bool:
    """Match SDXL's refiner: no attention at the last level either."""
    return sdxl()(config) and depths(config)[-1:] == (0,)


def video(**fields: Value) -> Condition:
    """Return the condition for UNets with temporal attention, as Stable Video Diffusion's."""
    return having(use_temporal_attention=True, **fields)


def depths(config: Config) -> tuple[Value, ...]:
    """Return the transformer blocks after each residual block of the down path."""
    found = config["transformer_depth"]
    assert isinstance(found, tuple), config
    return found


def _still(linear: bool, labelled: bool, **fields: Value) -> Condition:
    own = having(use_temporal_attention=False, use_linear_in_transformer=linear, **fields)
    return lambda config: (
        own(config)
        # # not a model without text input
        and config["context_dim"] is not None
        and (config["adm_in_channels"] is not None) is labelled
    )
