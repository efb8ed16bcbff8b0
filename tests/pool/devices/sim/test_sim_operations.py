"""Operations on the simulated device behave as on CUDA and compute what the CPU computes.

Proves: mixed devices raise, the host sees no device memory, factories and layers give the CPU's numbers bit for bit,
the CPU's stream of random numbers is left alone, and a deep copy is charged.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim.operations import factory_ops
from tests.each_case import each_case

BUDGET_BYTES = 1 << 20
INDEX = 6  # of a device that only tests of this folder use
DEVICE = "sim:6"
OTHER = "sim:5"


@pytest.fixture(autouse=True)
def _devices() -> None:
    for index in (INDEX, 5):
        sim.configure(index, BUDGET_BYTES)
        sim.reset_peak(index)
        sim.reset_counters(index)


def used_bytes() -> int:
    return sim.memory_stats(INDEX).used_bytes


def test_torch_tensor_makes_a_device_tensor() -> None:
    made = torch.tensor([[1, 2], [3, 4]], device=DEVICE)
    assert str(made.device) == DEVICE
    assert made.tolist() == [[1, 2], [3, 4]]
    assert str(torch.as_tensor(np.ones(3), device=DEVICE).device) == DEVICE
    assert made.new_tensor([5]).item() == 5
    assert sim.memory_stats(INDEX).h2d_bytes == 32 + 24 + 8


MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "linear": nn.functional.linear,
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "embedding": lambda a, b: nn.functional.embedding(a.long(), b),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, (4,), b[0]),
    "out": lambda a, b: torch.add(a, a, out=b),
    "index_put": lambda a, b: a.index_put_((torch.tensor(0),), b[0]),
}


@each_case("mix", MIXES.values(), ids=MIXES.keys())
@each_case("places", [(DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, OTHER)], ids="-".join)
def test_mixed_devices_raise(mix: Callable[[Tensor, Tensor], object], places: tuple[str, str]) -> None:
    first, second = (torch.ones(4, 4).to(place) for place in places)
    mix(first, first.clone())
    with pytest.raises(RuntimeError, match="same device"):
        mix(first, second)
    assert torch.equal(first.cpu(), second.cpu()) or mix is MIXES["add_"]


def test_a_number_on_the_host_may_meet_a_device_tensor_but_not_the_reverse() -> None:
    device = torch.ones(3, device=DEVICE)
    assert (device * torch.tensor(2.0)).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3) * torch.tensor(2.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(torch.tensor(2.0, device=DEVICE))


def test_a_device_that_was_not_configured_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="sim:99 does not exist"):
        torch.zeros(1, device="sim:99")
    with pytest.raises(RuntimeError, match="sim:99 does not exist"):
        sim.memory_stats(99)


def test_host_views_of_device_memory_are_refused() -> None:
    device = torch.ones(3, device=DEVICE)
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        device.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        np.asarray(device)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(device)
    with pytest.raises(BufferError):
        np.from_dlpack(device)
    assert f"{device[0]:.2f}" == "1.00"
    assert repr(device) == "tensor([1., 1., 1.], device='sim:6')"


def test_a_deep_copy_is_charged_and_keeps_sharing_and_parameters() -> None:
    layer = nn.Linear(8, 8, device=DEVICE).requires_grad_(False)
    layer.tied = layer.weight
    before = used_bytes()
    layer_bytes = layer.weight.nbytes + layer.bias.nbytes
    twin = copy.deepcopy(layer)
    assert used_bytes() == before + layer_bytes
    assert twin.tied is twin.weight
    assert isinstance(twin.weight, nn.Parameter)
    assert not twin.weight.requires_grad
    assert torch.equal(twin.weight, layer.weight)
    base = torch.ones(10, device=DEVICE)
    pair = copy.deepcopy([base, base[2:]])
    pair[0].zero_()
    assert pair[1].sum().item() == 0
    assert base.sum().item() == 10
    assert used_bytes() == before + layer_bytes + 80


def test_random_draws_leave_the_cpu_stream_alone_and_follow_the_seed() -> None:
    torch.manual_seed(3)
    host = torch.rand(4)
    torch.manual_seed(3)
    drawn = [torch.randn(4, device=DEVICE), torch.rand_like(torch.ones(4, device=DEVICE))]
    drawn.append(nn.functional.dropout(torch.ones(4, device=DEVICE)))
    drawn.append(torch.empty(4, device=DEVICE).normal_())
    assert torch.equal(torch.rand(4), host)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=DEVICE), drawn[0])
    assert not torch.equal(drawn[0], drawn[3])
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(4, device=DEVICE, generator=torch.Generator())
    with pytest.raises(NotImplementedError):
        torch.Generator(DEVICE)


def test_every_factory_makes_what_the_cpu_makes() -> None:
    samples = {"size": (3, 2), "n": 4, "end": 5, "steps": 5, "start": 1, "window_length": 6, "row": 3, "col": 3}
    samples |= {"fill_value": 2.5, "s": 1.5, "m": 3, "stride": (2, 1), "physical_layout": (0, 1), "high": 9, "low": 2}
    samples |= {"step": 2, "periodic": True, "alpha": 0.5, "beta": 0.4, "mean": 1.0, "std": 2.0}
    compared = 0
    for op in factory_ops():
        needed = [a for a in op._schema.arguments if not a.has_default_value() and a.name not in ("generator", "dtype")]
        args = [samples[a.name] for a in needed]
        kwargs = {"generator": None} if any(a.name == "generator" for a in op._schema.arguments) else {}
        made = op(*args, **kwargs, device=DEVICE)
        assert str(made.device) == DEVICE, op
        expected = op(*args, **kwargs, device="cpu")
        assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride()), op
        if "empty" not in str(op) and torch.Tag.nondeterministic_seeded not in op.tags:
            assert torch.equal(made.cpu(), expected), op
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_compute_what_the_cpu_computes(mode: Callable[[], torch.no_grad]) -> None:
    torch.manual_seed(0)
    layers: dict[nn.Module, tuple[int, ...]] = {
        nn.Linear(8, 6): (2, 3, 8),
        nn.Conv2d(4, 6, 3, padding="same"): (2, 4, 5, 5),
        nn.ConvTranspose2d(4, 6, 3, stride=2): (2, 4, 5, 5),
        nn.Conv3d(2, 3, 2): (1, 2, 3, 3, 3),
        nn.GroupNorm(2, 4): (2, 4, 5, 5),
        nn.LayerNorm(8): (3, 8),
        nn.RMSNorm(8): (3, 8),
        nn.BatchNorm1d(8).eval(): (3, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(): (2, 3, 8),
        nn.Upsample(scale_factor=2.0): (1, 2, 3, 3),
        nn.GELU(): (5,),
    }
    for layer, shape in layers.items():
        layer.requires_grad_(False)
        x = torch.randn(shape)
        with mode():
            expected = layer(x)
            given_device = x.to(DEVICE)
            result = layer.to(DEVICE)(given_device)
            assert torch.equal(result.cpu(), expected), layer
            assert torch.equal(result.transpose(0, -1).contiguous().cpu(), expected.transpose(0, -1)), layer


def test_conjugates_are_computed() -> None:
    host = torch.view_as_complex(torch.randn(4, 2))
    device = host.to(DEVICE)
    assert torch.equal(torch.view_as_real(device.conj()).cpu(), torch.view_as_real(host.conj().resolve_conj()))
    assert torch.equal((device.conj() * device).imag.cpu(), (host.conj() * host).imag)


def test_a_layer_that_would_need_a_gradient_says_so() -> None:
    layer = nn.Linear(2, 2).to(DEVICE)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        layer(torch.ones(1, 2, device=DEVICE))
    with torch.no_grad():
        layer(torch.ones(1, 2, device=DEVICE))


def test_autocast_changes_nothing() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast("sim", dtype=torch.float16):
        assert (x @ x).dtype is torch.float32
