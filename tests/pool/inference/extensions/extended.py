"""Predictions of a bare module with options of a run, as `pool.engine.sampling_stage` combines both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelpool.pool.inference.extensions.run_extension import RunExtension, run_extension
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.run_options import RunOptions
from modelpool.pool.values.core.stage_params import SamplingSchedule
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.patcher.blocks.applied import applied


@dataclass
class Extended:
    """A module inside of a run with options; `step` moves to a step of the schedule."""

    module: nn.Module
    extension: RunExtension

    def step(self, number: int) -> None:
        """Make `number` the step that is computed."""
        self.extension.clock.part.done = number


@contextmanager
def extended(
    module: nn.Module, options: RunOptions, steps: int = 10, row: str = "", base: ModelOptions | None = None
) -> Iterator[Extended]:
    """Yield `module` with `options` installed, in step 0 of `steps`."""
    clock = StepClock(SamplingSchedule(steps, "euler", "normal"), PartialRun())
    extension = run_extension(options, base or ModelOptions(), module, row, clock)
    with torch.no_grad(), applied(module, extension.model_options), extension.installed(module):
        yield Extended(module, extension)


def counted(modules: dict[str, nn.Module]) -> dict[str, int]:
    """Return how often each module is called from now on, by name."""
    calls = dict.fromkeys(modules, 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            calls[name] += 1

        return count

    for name, module in modules.items():
        module.register_forward_hook(counter(name))
    return calls


def inner(block: nn.Module) -> nn.Module:
    """The last linear layer of `block`, which runs if the block does; an option replaces the block's own call."""
    return [module for module in block.modules() if isinstance(module, nn.Linear)][-1]


def latents(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
