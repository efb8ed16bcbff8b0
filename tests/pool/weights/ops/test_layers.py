"""Torch's stock layers one by one: each computes what torch computes, in the input's dtype, wherever its weights are.

Also: optional weights that are not there, an embedding's result dtype, interrupts at each layer's head, and that a
compiled graph holds no interrupt.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import Case, build, store_in

CPU = torch.device("cpu")
INDEX = 51  # of a simulated device that no other test uses
Make = Callable[[], tuple[nn.Module, Tensor]]

LAYERS: dict[str, Make] = {
    "linear": lambda: (nn.Linear(6, 5), torch.randn(2, 3, 6)),
    "linear without bias": lambda: (nn.Linear(6, 5, bias=False), torch.randn(2, 6)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, padding=1, groups=2), torch.randn(2, 4, 7)),
    "conv2d": lambda: (nn.Conv2d(4, 6, 3, stride=2, padding="valid"), torch.randn(2, 4, 7, 8)),
    "conv2d circular": lambda: (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), torch.randn(2, 4, 7, 8)),
    "conv3d": lambda: (nn.Conv3d(2, 3, (1, 3, 3), dilation=(1, 2, 1), bias=False), torch.randn(1, 2, 3, 7, 8)),
    "transposed 1d": lambda: (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), torch.randn(2, 4, 7)),
    "transposed 2d": lambda: (nn.ConvTranspose2d(4, 6, 3, groups=2), torch.randn(2, 4, 7, 5)),
    "transposed 3d": lambda: (nn.ConvTranspose3d(2, 3, 2, stride=2), torch.randn(1, 2, 3, 4, 5)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(2, 6, 4)),
    "group norm, plain": lambda: (nn.GroupNorm(2, 6, affine=False), torch.randn(2, 6, 4)),
    "layer norm": lambda: (nn.LayerNorm((3, 6)), torch.randn(2, 3, 6)),
    "layer norm without bias": lambda: (nn.LayerNorm(6, bias=False), torch.randn(2, 3, 6)),
    "layer norm, plain": lambda: (nn.LayerNorm(6, elementwise_affine=False), torch.randn(2, 3, 6)),
    "rms norm": lambda: (nn.RMSNorm(6, eps=1e-5), torch.randn(2, 3, 6)),
    "rms norm, plain": lambda: (nn.RMSNorm(6, elementwise_affine=False), torch.randn(2, 3, 6)),
    "embedding": lambda: (nn.Embedding(9, 4, padding_idx=2), torch.tensor([[1, 2], [8, 2]])),
    "prelu": lambda: (nn.PReLU(3), torch.randn(2, 3, 4)),
    "bilinear": lambda: (Bilinear(), torch.randn(2, 3)),
    "batch norm": lambda: (nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)),
    "attention": lambda: (SelfAttention(), torch.randn(2, 5, 8)),
}


class Bilinear(nn.Module):
    """A layer of torch's that has no forward here: what it reads is intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class SelfAttention(nn.Module):
    """A parent that reads its child's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.fixture(scope="module")
def sim_device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 26)
    return torch.device("sim", INDEX)


def rounded(make: Make, storage: torch.dtype) -> tuple[nn.Module, Tensor]:
    """The layer with random weights that `storage` holds exactly, in float32."""
    torch.manual_seed(1)
    layer, x = make()
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter).to(storage).float()
    return layer.eval().requires_grad_(False), x


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_as_torchs(name: str, storage: torch.dtype, sim_device: torch.device) -> None:
    layer, x = rounded(LAYERS[name], storage)
    expected = layer(x)
    store_in(layer, storage)
    swap_to_casting(layer)
    for device in (CPU, sim_device):
        with torch.no_grad(), compute(device, torch.float32):
            assert torch.equal(layer(x.to(device)).cpu(), expected), device


def test_the_input_says_the_dtype_of_stock_layers() -> None:
    """Compute dtype apart from storage dtype, also where a model runs a part of itself more precisely."""
    layer, x = rounded(LAYERS["linear"], torch.float16)
    expected = layer.double()(x.double())
    layer.float()
    store_in(layer, torch.float16)
    swap_to_casting(layer)
    with compute(CPU, torch.bfloat16):
        assert layer(x.bfloat16()).dtype is torch.bfloat16
        assert torch.equal(layer(x.double()), expected)


def test_a_dropout_drops_in_training_alone() -> None:
    layer, x = nn.Dropout(0.5), torch.ones(64)
    swap_to_casting(layer)
    assert layer.eval()(x) is x
    dropped = layer.train()(x)
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_a_group_of_one_value_is_refused_as_by_torch() -> None:
    """Its normalized value would be the bias, whatever the input is."""
    layer, x = nn.GroupNorm(6, 6), torch.randn(1, 6, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value") as torchs:
        layer(x)
    swap_to_casting(layer)
    with pytest.raises(ValueError, match="more than 1 value") as ours:
        layer(x)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_an_embedding_gives_the_dtype_that_is_asked_for(storage: torch.dtype) -> None:
    table, ids = rounded(LAYERS["embedding"], storage)
    expected = table(ids)
    store_in(table, storage)
    swap_to_casting(table)
    with compute(CPU, torch.float16):
        assert table(ids).dtype is torch.float16
        assert torch.equal(table(ids, out_dtype=torch.float32), expected)
        assert torch.equal(table(ids, out_dtype=torch.float64), expected.double())
    assert torch.equal(table(ids, out_dtype=torch.float32), expected)
    set_weight_functions(table, "weight", (lambda w: w.add_(1.0),))
    with compute(CPU, torch.float16):
        assert torch.equal(table(ids, out_dtype=torch.float32), expected + 1)


@pytest.mark.parametrize(
    "name", ["linear", "conv1d", "transposed 2d", "group norm", "layer norm", "rms norm", "embedding"]
)
def test_a_layer_asks_before_it_computes(name: str) -> None:
    class Stopped(Exception):
        pass

    def interrupt() -> None:
        raise Stopped

    layer, x = rounded(LAYERS[name], torch.float16)
    layer.register_forward_hook(lambda *_: pytest.fail("it computed"))
    swap_to_casting(layer)
    with compute(CPU, torch.float32, interrupt), pytest.raises(Stopped):
        layer(x)


def test_a_layer_with_a_forward_of_its_own_asks_where_it_reads_a_weight() -> None:
    """Causal convolutions of video VAEs and norms of many models are such; a run of them could not be stopped."""

    class Causal(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.pad(x, (2, 0)))

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain[:, None]

    asked: list[int] = []
    module = nn.Sequential(Causal(3, 3, 3), Gain()).requires_grad_(False)
    swap_to_casting(module)
    with compute(CPU, torch.float32, lambda: asked.append(1)):
        for layer in module:
            asked.clear()
            layer(torch.zeros(1, 3, 5))
            assert asked


def test_a_compiled_graph_is_whole_and_holds_no_interrupt() -> None:
    module = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8), nn.GroupNorm(1, 3))
    module = module.requires_grad_(False)
    store_in(module, torch.float16)
    swap_to_casting(module)
    ids = torch.tensor([[1, 2, 3]])
    calls: list[int] = []
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad(), compute(CPU, torch.float32, interrupt=lambda: calls.append(1)):
        expected = module(ids)
        assert len(calls) == 5
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert torch.equal(compiled(ids), expected)
        assert torch.equal(compiled(ids), expected)
    assert len(graphs) == 1
    assert len(calls) == 5, "the compiled graph calls the interrupt"


def test_a_real_model_compiles_to_one_graph() -> None:
    """Its norms, and a dtype that it asks its own weights for, among it."""
    case = build("wan", torch.float16)
    expected = case.run()
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = Case(torch.compile(case.module, backend=backend), case.inputs)
    with compute(CPU, torch.float32):
        assert all(torch.equal(a, b) for a, b in zip(compiled.run(), expected, strict=True))
    assert len(graphs) == 1
