"""LoRAs that act only for some texts of a run, as hooks of the conditions: texts with other LoRAs are predicted
apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelpool.pool.inference.guidance.guided_steps import Prompts
from modelpool.pool.values.core.lora_texts import NEGATIVE, PROMPT, acts_for, region_text
from modelpool.pool.values.core.stage_params import SampleParams


@dataclass(frozen=True, slots=True)
class TextLoras:
    """The hooks of a condition: the indices of those LoRAs of the run that act for its text."""

    places: tuple[int, ...]

    @classmethod
    def of(cls, work: SampleParams, text: str) -> TextLoras:
        """Return those of the text of this name (`pool.values.core.lora_texts`)."""
        return cls(tuple(place for place, lora in enumerate(work.loras) if acts_for(lora.only, text)))


def with_text_loras(prompts: Prompts, work: SampleParams) -> Prompts:
    """Return `prompts` with the LoRAs of each text. The prediction without an image has those of the negative
    prompt."""
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
