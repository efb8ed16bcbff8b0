"""The LoRAs of a request: their place in recipes, and the check that those for some texts act for a text that the runs
read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section, span_text
from modelpool.actors.graph.features.recorded import FILE_NAME, LATER, as_json
from modelpool.actors.request.lora_fields import LoraChoice
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.expert_names import HIGH, LOW
from modelpool.pool.values.core.lora_texts import NEGATIVE, acts_for, texts_of_run
from modelpool.pool.values.core.stage_params import SampleParams

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


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


@dataclass(frozen=True, slots=True)
class RecipeLora:
    """A LoRA as it was applied. `noise` is the expert, if it was applied to one of two; the other fields are as in
    `LoraRef` of `pool.values.core.refs`."""

    name: str = field(metadata=FILE_NAME)
    sha256: str
    strength: float
    noise: str = field(default="", metadata=LATER)
    text_strength: float | None = field(default=None, metadata=LATER)
    start: float = field(default=0.0, metadata=LATER)
    end: float = field(default=1.0, metadata=LATER)
    blocks: tuple[tuple[str, float], ...] = field(default=(), metadata=LATER)
    keyframes: tuple[tuple[float, float], ...] = field(default=(), metadata=LATER)
    interpolation: str = field(default="", metadata=LATER)
    only: tuple[str, ...] = field(default=(), metadata=LATER)
    merge: str = field(default="", metadata=LATER)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    names = [each.name for each in fields(RecipeLora)]
    return {"loras": tuple(RecipeLora(**{name: getattr(lora, name) for name in names}) for lora in source.loras)}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    used = (as_json(lora) for lora in recipe.loras)
    return {"loras": tuple({name: value for name, value in lora.items() if name != "sha256"} for lora in used)}


def _lines(recipe: Recipe) -> Iterator[Line]:
    for lora in recipe.loras:
        where = f" on the {lora.noise}-noise expert" if lora.noise else ""
        how = "" if lora.text_strength is None else f", {lora.text_strength:g} on the text encoders"
        if span := span_text(lora.start, lora.end, "the schedule"):
            how += f", {span}"
        if lora.blocks:
            how += f", by block: {', '.join(f'{name} {factor:g}' for name, factor in lora.blocks)}"
        if lora.keyframes:
            steps = ", ".join(f"{strength:g} from {share:g}" for share, strength in lora.keyframes)
            how += f", over the steps: {steps}" + (f" ({lora.interpolation})" if lora.interpolation else "")
        how += f", only for {', '.join(lora.only)}" if lora.only else ""
        kind = f"merged model {lora.name} ({lora.merge})" if lora.merge else f"LoRA {lora.name}"
        yield kind, f"strength {lora.strength:g}{where}{how}  (sha256 {lora.sha256})"


LORAS = Feature(recipe=Section(_recorded, _restored, _lines))
