"""Convolutions by dimensions. The way around cuDNN's fault: when it is taken, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops import casting_classes as classes
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.convolution import conv3d, conv3d_by_cudnn, has_conv3d_fault

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("torch_version", "cudnn_version", "faulty"),
    [
        ("2.9.0+cu130", 91002, True),
        ("2.10.1", 91499, True),
        ("2.9.0", 91001, False),
        ("2.9.0", 91500, False),
        ("2.8.1", 91200, False),
        ("2.11.0", 91200, False),
        ("2.13.0a0+git", 91200, False),
        ("2.9.0", None, False),
    ],
)
def test_versions_with_the_fault(torch_version: str, cudnn_version: int | None, faulty: bool) -> None:
    assert has_conv3d_fault(torch_version, cudnn_version) is faulty


def plain_convolution(
    x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, **switches: bool
) -> Tensor:
    """What `torch.cudnn_convolution` promises, on a CPU."""
    assert switches == {"benchmark": False, "deterministic": False, "allow_tf32": True}
    return nn.functional.conv3d(x, weight, None, stride, padding, dilation, groups)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"stride": (1, 2, 2), "dilation": 2},
        {"groups": 2},
        {"padding": "same", "kernel_size": (3, 1, 3)},
        {"padding_mode": "replicate"},
        {"padding_mode": "circular", "padding": (1, 0, 2)},
    ],
    ids=str,
)
def test_the_other_way_computes_the_same(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv3d(2, 4, **({"kernel_size": 3, "padding": 1} | options))
    x = torch.randn(1, 2, 6, 7, 8)
    with torch.no_grad():
        found = conv3d_by_cudnn(layer, x, layer.weight, layer.bias, plain_convolution)
        torch.testing.assert_close(found, layer(x), rtol=0, atol=1e-6)


class Causal(nn.Conv3d):
    """As the video autoencoders have them: a forward of its own around torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_faulty_versions_give_every_3d_convolution_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    make = classes.casting_class.__wrapped__
    assert "_conv_forward" not in vars(make(nn.Conv3d, True))
    monkeypatch.setattr(classes, "installed_torch_has_conv3d_fault", lambda: True)
    for kind in (nn.Conv3d, Causal):
        casting = make(kind, True)
        assert vars(casting)["_conv_forward"] is conv3d
        layer = kind(2, 2, 1).requires_grad_(False)
        x = torch.ones(1, 2, 1, 1, 1)
        expected = layer(x)
        layer.__class__ = casting
        with compute(CPU, torch.float32):
            assert torch.equal(layer(x), expected)  # on a CPU torch's own way is right
    assert "_conv_forward" not in vars(make(nn.Conv2d, True))


def test_on_audio_versions_swapping_leaves_torchs_way() -> None:
    layer = nn.Conv3d(1, 1, 1).requires_grad_(False)
    swap_to_casting(layer)
    assert type(layer)._conv_forward is nn.Conv3d._conv_forward
