"""`modelpool models`: what a pool can make pictures with. Reads the headers of files; starts nothing."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import typer

from actors.cli import options
from actors.cli.options import PoolOptions
from actors.cli.session import session_of

if TYPE_CHECKING:
    from pool.catalog import LoraListing, ModelListing


def models(
    context: typer.Context,
    as_json: options.AsJson = False,
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """List the models and LoRAs that can be named, and what is wrong with files that cannot be used."""
    from actors.cli.screen import people_console, print_json, say, show
    from actors.cli.tables import loras_table, models_table

    found_models, found_loras, places = _listings(context, PoolOptions(config=config, pool=pool))
    if as_json:
        for kind, listings in (("model", found_models), ("lora", found_loras)):
            for listing in listings:
                print_json(sys.stdout, {"kind": kind, **dataclasses.asdict(listing)})
        return
    console = people_console(sys.stdout)
    if found_models:
        show(console, models_table(found_models))
    if found_loras:
        show(console, loras_table(found_loras))
    if not found_models:
        say(console, f"No models in {places}: put .safetensors files there, or name a configuration with --config")


def _listings(
    context: typer.Context, options: PoolOptions
) -> tuple[tuple[ModelListing, ...], tuple[LoraListing, ...], str]:
    """Models, LoRAs, and where was looked."""
    if options.pool is not None:
        with session_of(context).open_pool(options) as running:
            return running.models(), running.loras(), f"the folders of pool {options.pool}"
    from actors.cli.opening import settings_for
    from pool.catalog import Catalog

    folders = settings_for(options).models
    catalog = Catalog(folders.folders, folders.loras, "cpu")
    return catalog.models(), catalog.loras(), ", ".join(map(str, folders.folders)) or "no folder (none is configured)"
