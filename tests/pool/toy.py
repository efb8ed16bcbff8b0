"""A small module with every kind of weight that the pool treats on its own, and low-rank patches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.skip_init import without_initialisation
from modelpool.pool.weights.patches.patch_set import LowRank, PatchSet, WeightPatch


class Gain(nn.Module):
    """A raw parameter that no stock layer owns, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("offset", torch.arange(width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD * self.gain + self.offset.to(x_BLD.dtype) * 0.01


class Toy(nn.Module):
    """Embedding, linear, norm, raw parameter and convolution in a row: ids [B, L] -> [B, width, L, 1]."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.gain = Gain(width)
        self.conv = nn.Conv2d(width, width, (3, 1), padding=(1, 0))

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLD = self.table(ids_BL)
        x_BLD = self.gain(self.norm(self.narrow(torch.relu(self.wide(x_BLD)))))
        return self.conv(x_BLD.transpose(1, 2)[..., None])


def make_toy(seed: int = 0, storage: torch.dtype = torch.float16) -> Toy:
    """A toy with parameters that are random, rounded to `storage`, and frozen."""
    generator = torch.Generator().manual_seed(seed)
    with without_initialisation():
        toy = Toy().eval().requires_grad_(False)
    for module in toy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                rounded = torch.randn(parameter.shape, generator=generator).mul(0.3).to(storage)
                module._parameters[name] = nn.Parameter(rounded, requires_grad=False)
    return toy


def make_patch(parameter: str, shape: tuple[int, ...], identity: str, strength: float = 1.0) -> WeightPatch:
    """A rank-2 patch with factors that follow from its identity."""
    generator = torch.Generator().manual_seed(sum(identity.encode()))
    rows, columns = shape[0], int(torch.Size(shape[1:]).numel())
    up_OR = torch.randn(rows, 2, generator=generator).half()
    down_RI = torch.randn(2, columns, generator=generator).half()
    return WeightPatch(parameter, identity, LowRank(up_OR, down_RI, 0.1), strength)


def patches_for(toy: Toy, identity: str, names: tuple[str, ...], strength: float = 1.0) -> PatchSet:
    """One patch for each named weight."""
    shapes = {name: tuple(p.shape) for name, p in toy.named_parameters()}
    return PatchSet(tuple(make_patch(n, shapes[n], f"{identity}:{n}", strength) for n in names))


def reference(toy: Toy, patches: PatchSet, ids_BL: Tensor) -> Tensor:
    """What plain torch computes in float32 from the rounded weights with the deltas added."""
    plain = Toy().eval().requires_grad_(False)
    state = {}
    for name, weight in toy.state_dict().items():
        value = weight.clone()
        if value.is_floating_point():
            value = value.float()
            for patch in patches.functions(name):
                value = patch(value)
        state[name] = value
    plain.load_state_dict(state)
    return plain(ids_BL)
