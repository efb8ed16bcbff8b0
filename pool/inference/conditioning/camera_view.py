"""The view from which a model shows the object of an image: its numbers, and what the UNet reads of them. Knows the
form in which Zero123 was trained; does not know requests.

Shape legend: B batch, L states, D width of a state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from modelpool.pool.models.components.common.view_projection import PROJECTION
from modelpool.pool.values.core.stage_params import SampleParams, ViewCondition

#: model input: numbers of the view, and 1 where the model sees it; 0 for the prediction of no view
VIEW = "view"
#: angle, sine and cosine of another one, distance
VIEW_NUMBERS = 4


def view_inputs(work: SampleParams, count: int) -> Tensor:
    """Return the input "view" of `count` images with the view of `work`, [B, 5].

    Sources: cvlab-columbia/zero123, `sample_model` of gradio_new.py; threestudio's guidance of Stable Zero123.
    """
    views = work.all_of(ViewCondition)
    view = views[0] if views else ViewCondition()
    around, below, last = math.radians(view.azimuth), -view.elevation, view.distance
    if view.image_elevation is not None:
        below, last = view.image_elevation - view.elevation, math.radians(90.0 - view.image_elevation)
    numbers = (math.radians(below), math.sin(around), math.cos(around), last, 1.0)
    return torch.tensor([numbers], dtype=torch.float32).repeat(count, 1)


def projected(module: nn.Module, states_BLD: Tensor, view_BN: Tensor) -> Tensor:
    """Return what the UNet `module` reads in the place of a text: image embeddings with a view, projected; zeros where
    the model sees none."""
    projection = module.get_submodule(PROJECTION)
    numbers_BLN = view_BN[:, None, :VIEW_NUMBERS].expand(-1, states_BLD.shape[1], -1)
    # angles have more digits than half precision
    found_BLD: Tensor = projection(torch.cat((states_BLD.float(), numbers_BLN.float()), dim=-1))
    return (found_BLD * view_BN[:, None, VIEW_NUMBERS:]).to(states_BLD.dtype)
