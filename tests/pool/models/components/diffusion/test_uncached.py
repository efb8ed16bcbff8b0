"""Models keep no tensors in caches of their methods: they compute the same without, and leave nothing on a device."""

from __future__ import annotations

import copy
from functools import lru_cache, wraps

import diffusers
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.models.components.diffusion.uncached import without_caches

CONFIG = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}


def forward(model: nn.Module, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x_BLC, text_BLD = torch.randn(1, 6, 16, generator=generator), torch.randn(1, 5, 12, generator=generator)
    with torch.no_grad():
        made: Tensor = model(
            x_BLC.to(device), encoder_hidden_states=text_BLD.to(device),
            encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.long, device=device),
            timestep=torch.tensor([0.5], device=device), img_shapes=[[(1, 2, 3)]], return_dict=False,
        )[0]  # fmt: skip
    return made.cpu()


def test_positions_of_qwen_image_stay_on_no_device() -> None:
    sim.configure(0, 64 << 20)
    model = diffusers.QwenImageTransformer2DModel(**CONFIG).eval()
    plain = forward(copy.deepcopy(model), "cpu")
    without_caches(model)
    assert torch.equal(forward(model, "cpu"), plain)
    before_bytes = sim.memory_stats(0).used_bytes
    torch.testing.assert_close(forward(model.to("sim:0"), "sim:0"), plain, atol=1e-5, rtol=0)
    model.to("cpu")
    assert sim.memory_stats(0).used_bytes == before_bytes


def test_only_what_keeps_results_is_changed() -> None:
    calls: list[int] = []

    def doubled(function):  # type: ignore[no-untyped-def]
        @wraps(function)
        def twice(self: nn.Module, x: int) -> int:
            return 2 * function(self, x)  # type: ignore[no-any-return]

        return twice

    class Part(nn.Module):
        @lru_cache  # noqa: B019 - that is what it is about
        def kept(self, x: int) -> int:
            calls.append(x)
            return x

        @doubled
        def twice(self, x: int) -> int:
            return x

    plain, part = nn.Linear(1, 1), Part()
    without_caches(nn.ModuleList([plain, part]))
    assert type(plain) is nn.Linear
    assert isinstance(part, Part)
    assert (part.kept(3), part.kept(3), part.twice(4)) == (3, 3, 8)
    assert calls == [3, 3]
