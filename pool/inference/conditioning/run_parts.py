"""The protocol of run parts: what each feature does in a sampling run.

A feature has one function of a run, `PreparePart`, a row of the tuple in `pool.engine.all_run_parts`. It returns None
if the run does not use the feature. Otherwise it changes the run for the parts behind it (its prompts, options, hooks),
and returns a `RunPart`: what the feature does while the model runs. The engine goes through the parts in their order
and knows no feature.

Shape legend: B batch, C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from modelpool.pool.inference.conditioning.conditions import ApplyHooks
from modelpool.pool.inference.conditioning.micro_conditioning import Residuals
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import Latent, RunHooks, RunState, SampleParams, SamplerState
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.scheduled_patches import PatchesAtStep

#: the results of a run, one for each task
RunResults: TypeAlias = tuple[Latent | SamplerState | RunState, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunResources:
    """What the worker has ready for the parts of a run, in addition to its inputs.

    controls, adapters  models of the ControlNets and of the image prompts, in the order of the tasks
    gligens      the GLIGEN model, if the tasks have boxes
    resumed      states that the tasks resume from, all at one step; () starts from the beginning
    patches_at   patches of the diffusion model that change over the steps or from text to text
    cache_bytes  of the device, for patched weights that the next step needs again
    silence_1LC  latent of silence, for a model of music without one in its file
    """

    controls: Sequence[ModelPatcher] = ()
    adapters: Sequence[ModelPatcher] = ()
    resumed: Sequence[RunState] = ()
    patches_at: PatchesAtStep | None = None
    cache_bytes: int = 0
    silence_1LC: Tensor | None = None
    gligens: Sequence[ModelPatcher] = ()


NO_RESOURCES = RunResources()


@dataclass(slots=True, eq=False)
class DenoisingRun:
    """One run of a diffusion model for a batch. The fields from `prompts` on are for the parts to change.

    works, inputs  of each task; the works differ in seeds and texts
    shape_CHW    of the latent of each task
    table        the noise levels of the model's training
    partial_run  the steps of this run, and its state between two of them
    prompts      the conditions, on the host
    options      of the model in this run
    hooks        of the run
    max_batch    texts that the model predicts together: 1 is each by itself, 0 is no limit
    cells        latent frames of a video that has something else behind them; 0: all
    apply_hooks  called with the hooks of texts before the model predicts for them
    spread       as in `ModelCall`
    """

    works: Sequence[SampleParams]
    inputs: Sequence[TaskInputs]
    model: ModelPatcher
    latent: LatentFacts
    facts: SamplingFacts
    shape_CHW: tuple[int, ...]
    table: SigmaTable
    partial_run: PartialRun
    resources: RunResources
    prompts: Prompts
    options: ModelOptions
    hooks: RunHooks
    max_batch: int
    cells: int = 0
    apply_hooks: ApplyHooks | None = None
    spread: Callable[[Sequence[Callable[[], Tensor]], Tensor], Sequence[Tensor]] | None = None

    @property
    def work(self) -> SampleParams:
        """What the works have in common; its seed is the first one's."""
        return self.works[0]

    @property
    def clock(self) -> StepClock:
        """The step that is computed."""
        return StepClock(self.work.schedule, self.partial_run)


@dataclass(slots=True, eq=False)
class CallInputs:
    """The inputs of one call of the model, which parts change.

    module        the diffusion model, which runs
    x_BCHW        the noisy latents, in the dtype of the model, as are the text states `context_BLD`
    level_B       timesteps or noise levels, float32
    model_kwargs  the other inputs by name
    residuals     of ControlNets
    """

    module: nn.Module
    x_BCHW: Tensor
    level_B: Tensor
    context_BLD: Tensor
    model_kwargs: dict[str, Tensor]
    residuals: Residuals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunPart:
    """What a feature does while the model of a run runs. By default, nothing.

    around       returns a context around all steps. The contexts are entered in the order of the parts, when the
                 weights are ready, and left in the opposite order, whatever raises. What outlives the run is changed
                 only in there
    before_call  called before each call of the model; changes its inputs
    results      returns the results of the run, from the latents after its last step (float32, [B, C, H, W] on the
                 CPU); None leaves them to the next part
    captures     it acts by the inputs of calls and the results alone, so calls of the model may be CUDA graphs
    """

    around: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    before_call: Callable[[CallInputs], None] | None = None
    results: Callable[[Tensor], RunResults | None] | None = None
    captures: bool = False


#: changes the run; returns the part that a feature has in it, None if it has none
PreparePart: TypeAlias = Callable[[DenoisingRun], RunPart | None]
