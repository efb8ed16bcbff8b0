"""LoRAs that change in a run: with strengths that change over the steps, or that act only for some texts of it.

The latter are hooks of the conditions: texts with other LoRAs are predicted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.values.core.lora_texts import NEGATIVE, PROMPT, acts_for, region_text
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.weights.patcher.scheduled_patches import ScheduledPatches


@dataclass(frozen=True, slots=True)
class TextLoras:
    """The hooks of a condition: the indices of those LoRAs of the run that act for its text."""

    places: tuple[int, ...]

    @classmethod
    def of(cls, work: SampleParams, text: str) -> TextLoras:
        """Return the LoRAs of the text of this name (`pool.values.core.lora_texts`)."""
        return cls(tuple(place for place, lora in enumerate(work.loras) if acts_for(lora.only, text)))


def changing_loras_part(run: DenoisingRun) -> RunPart | None:
    """Give the model the patches of each step and text."""
    resources, clock = run.resources, run.clock
    has_text_loras = any(lora.only for lora in run.work.loras)
    if resources.patches_at is None:
        assert not has_text_loras, f"a run with LoRAs for some texts needs their patches: {run.work}"
        return None
    patches = ScheduledPatches(run.model, resources.patches_at, resources.cache_bytes)
    if has_text_loras:
        run.prompts, run.apply_hooks = with_text_loras(run.prompts, run.work), patches.begin_texts

    def begin_call(call: CallInputs) -> None:
        patches.begin_call(clock.now)

    return RunPart(around=lambda module: patches.restored(), before_call=begin_call)


def with_text_loras(prompts: Prompts, work: SampleParams) -> Prompts:
    """Return `prompts` with the LoRAs of each text. The prediction without an image has the negative prompt's."""
    uncond = prompts.uncond
    regional = prompts.regions.conditions
    return replace(
        prompts,
        cond=replace(prompts.cond, hooks=TextLoras.of(work, PROMPT)),
        uncond=None if uncond is None else replace(uncond, hooks=TextLoras.of(work, NEGATIVE)),
        regions=replace(
            prompts.regions,
            conditions=tuple(
                replace(condition, hooks=TextLoras.of(work, region_text(number)))
                for number, condition in enumerate(regional)
            ),
        ),
    )
