"""`modelpool merge`: merges LoRAs into the weights of a model and saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.models.convert import Dtype, Ema, Force, ModelName, Out, SavedLayout, To, save
from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.actors.request.requests import LoraChoice

_LORAS = typer.Argument(metavar="LORA:STRENGTH...", help="LoRA names or paths.", show_default=False)


def merge(
    model: ModelName,
    loras: Annotated[list[str], _LORAS],
    out: Out,
    dtype: Dtype = None,
    to: To = SavedLayout.CHECKPOINT,
    ema: Ema = None,
    force: Force = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Save a MODEL with LoRAs merged. Produces the same images as applying the LoRAs at run time."""
    where = PoolOptions(config=config, allow_pickle=allow_pickle)
    save(model, [_choice(lora) for lora in loras], out, to, dtype, ema, force, as_json, where)


def _choice(text: str) -> LoraChoice:
    """Parse a LoRA and its strength. Raises UserError."""
    from modelpool.actors.request.lora_fields import parse_lora
    from modelpool.actors.request.requests import LoraChoice

    chosen = LoraChoice(**parse_lora(text))
    if chosen.strength == 0:
        raise unusable_field("LORA:STRENGTH", text, "a strength other than 0")
    return chosen
