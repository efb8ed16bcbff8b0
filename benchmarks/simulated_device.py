"""Measures what the simulated device costs: CPU time of a forward on `cpu` divided by that on `sim:0`.

    python -m benchmarks.simulated_device [--rounds 30]

Prints a Markdown table for small models of several architectures, with random weights. The devices take turns, so that
other load on the machine affects both; each figure is a median, and the ratio is the median of those of the rounds.
Fails if a result differs from the CPU's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim

BUDGET_BYTES = 1 << 30


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    sim.configure(0, BUDGET_BYTES)
    print("| model | cpu, ms | sim, ms | speed of sim / cpu |")
    print("|---|---|---|---|")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        module, inputs = make()
        module.eval().requires_grad_(False)
        print(f"| {name} | {row(module, inputs, rounds)} |", flush=True)


def row(module: nn.Module, inputs: Mapping[str, Tensor], rounds: int) -> str:
    """Return the cells of one model."""
    seconds: dict[str, list[float]] = {"cpu": [], "sim:0": []}
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        # the weights of both devices exist at once, as in a worker the file's and the device's
        twins = {"cpu": module, "sim:0": _moved(module, "sim:0")}
        given = {place: {name: x.to(place) for name, x in inputs.items()} for place in twins}
        for _ in range(rounds + 2):
            for place, twin in twins.items():
                started = time.thread_time()
                result = twin(**given[place], return_dict=False)[0]
                seconds[place].append(time.thread_time() - started)
                results[place] = result.cpu()
    assert torch.equal(results["cpu"], results["sim:0"]), "the simulated device computes something else"
    pairs = list(zip(seconds["cpu"][2:], seconds["sim:0"][2:], strict=True))  # the first are a warm-up
    cpu_ms, sim_ms = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{cpu_ms:.2f} | {sim_ms:.2f} | {statistics.median(cpu / other for cpu, other in pairs):.2f}"


def _moved(module: nn.Module, place: str) -> nn.Module:
    twin: Any = type(module)(**dict(module.config))  # type: ignore[arg-type] # diffusers' configuration
    twin.load_state_dict(module.state_dict())
    moved: nn.Module = twin.eval().requires_grad_(False).to(place)
    return moved


def unet(side: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a UNet with the sizes of the shapes model, and inputs for an image of `side` x `side` pixels with CFG."""
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
        layers_per_block=1,
    )
    return module, {
        "sample": torch.randn(2, 4, side // 8, side // 8),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, 77, 32),
    }


def flux() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small Flux transformer and its inputs for 64 latent tokens."""
    module = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    return module, {
        "hidden_states": torch.randn(1, 64, 16),
        "encoder_hidden_states": torch.randn(1, 32, 64),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(32, 3),
    }


def sd3() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small SD3 transformer and its inputs for 64 latent tokens."""
    module = diffusers.SD3Transformer2DModel(
        sample_size=32,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=128,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
    )
    return module, {
        "hidden_states": torch.randn(2, 16, 16, 16),
        "encoder_hidden_states": torch.randn(2, 32, 64),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([500, 500]),
    }


def wan() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small Wan transformer and its inputs for 5 latent frames."""
    module = diffusers.WanTransformer3DModel(
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=256,
    )
    return module, {
        "hidden_states": torch.randn(1, 16, 5, 8, 8),
        "encoder_hidden_states": torch.randn(1, 32, 64),
        "timestep": torch.tensor([500]),
    }


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "UNet, 64x64": lambda: unet(64),
    "UNet, 128x128": lambda: unet(128),
    "Flux, 2 + 4 blocks, 64 tokens": flux,
    "SD3, 4 blocks, 64 tokens": sd3,
    "Wan, 4 blocks, 80 tokens": wan,
}


if __name__ == "__main__":
    main()
