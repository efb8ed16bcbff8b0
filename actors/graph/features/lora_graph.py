"""Checks that LoRAs for some texts of a request act for a text that its runs read. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from modelpool.actors.request.lora_fields import LoraChoice
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.expert_names import HIGH, LOW
from modelpool.pool.values.core.lora_texts import NEGATIVE, acts_for, texts_of_run
from modelpool.pool.values.core.stage_params import SampleParams


def check_lora_texts(loras: Iterable[LoraChoice], work: SampleParams) -> None:
    """Raise UnusableField for a LoRA that acts for no text that the run `work` reads, and for a region that it does not
    have."""
    texts = texts_of_run(work.reads_negative, len(work.regions))
    other = HIGH if work.schedule.low_noise else LOW
    for lora in loras:
        if not lora.only or not lora.has_effect or lora.noise == other:
            continue
        for name in lora.only:
            if not any(acts_for((name,), text) for text in texts):
                reason = f"; at cfg {work.guidance.cfg:g} no negative prompt is read" if name == NEGATIVE else ""
                raise UnusableField(
                    f"loras.only: found {name!r} of LoRA {lora.name!r}, expected texts of this run: "
                    f"{', '.join(texts)}{reason}"
                )
