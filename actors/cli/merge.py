"""`modelpool merge`: LoRAs made part of a model's weights, and the model saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.convert import Dtype, Ema, Force, Layout, ModelName, Out, To, save
from modelpool.actors.cli.options import PoolOptions
from modelpool.pool.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.actors.request.requests import LoraChoice

_LORAS = typer.Argument(metavar="LORA:STRENGTH...", help="LoRAs by name or path.", show_default=False)


def merge(
    model: ModelName,
    loras: Annotated[list[str], _LORAS],
    out: Out,
    dtype: Dtype = None,
    to: To = Layout.CHECKPOINT,
    ema: Ema = None,
    force: Force = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Save a MODEL with LoRAs merged into its weights: it draws what the model draws with them."""
    where = PoolOptions(config=config, allow_pickle=allow_pickle)
    save(model, [_choice(lora) for lora in loras], out, to, dtype, ema, force, as_json, where)


def _choice(text: str) -> LoraChoice:
    """The LoRA that `text` names, and how strongly. Raises UserError."""
    from modelpool.actors.request.low_noise_fields import lora_parts
    from modelpool.actors.request.requests import LoraChoice

    chosen = LoraChoice(**lora_parts(text))
    if chosen.strength == 0:
        raise unusable_field("LORA:STRENGTH", text, "a strength other than 0")
    return chosen
