"""A module that was built without values gets those that `load_state_dict(assign=True)` gives it, and no copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill


class Parts(nn.Module):
    """A tree with what torch has: nested modules, a table that no file carries, one that does, a bias that is not
    there, a weight made of others and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), weight_norm(nn.Linear(6, 4)))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.first, self.second = nn.Embedding(7, 2), nn.Embedding(7, 2)
        self.second.weight = self.first.weight


def empty() -> Parts:
    with torch.device("meta"):
        return Parts().eval()


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(value.shape, generator=generator).to(value.dtype)
        for key, value in Parts().state_dict().items()
    }


def test_values_are_given_as_torch_gives_them() -> None:
    given, ours, theirs = values(), empty(), empty()
    assert fill(ours, given) == ()
    theirs.load_state_dict(given, assign=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == given.keys()
    for key, value in given.items():
        assert ours.state_dict()[key].data_ptr() == theirs.state_dict()[key].data_ptr() == value.data_ptr()
    assert {name: type(held) for name, held in ours.named_parameters()} == {
        name: type(held) for name, held in theirs.named_parameters()
    }
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_a_name_without_a_place_is_told() -> None:
    given = {**values(), "layers.0.bias": torch.ones(6), "table": torch.ones(5), "nobody.weight": torch.ones(1)}
    module = empty()
    assert fill(module, given) == ("layers.0.bias", "table", "nobody.weight")
    assert module.layers[0].bias is None
    assert module.table.is_meta


def test_what_is_left_is_named() -> None:
    module = empty()
    fill(module, {key: value for key, value in values().items() if key not in ("scale", "layers.1.running_mean")})
    with pytest.raises(AssertionError, match=r"\['scale', 'table', 'layers.1.running_mean'\]"):
        assert_filled(module)
    module.scale, module.table = nn.Parameter(torch.ones(4)), torch.ones(5)
    module.layers[1].running_mean = torch.ones(6)
    assert_filled(module)


def test_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"scale: found \(5,\) for \(4,\)"):
        fill(empty(), {"scale": torch.ones(5)})
