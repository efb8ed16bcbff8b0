"""`modelpool convert`: a model in another dtype, as one file or as a folder of diffusers. And what `merge` shares.

Reads the model and writes a new one; starts no pool and changes no file that it was not told to write over.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli import options
from modelpool.actors.cli.options import PoolOptions
from modelpool.pool.core.errors import OutputFailed, UserError, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.actors.request.requests import LoraChoice
    from modelpool.pool.saving.checkpoint_file import Saved


class SavedDtype(StrEnum):
    """What weights are saved in."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Layout(StrEnum):
    """What is written."""

    CHECKPOINT = "checkpoint"
    DIFFUSERS = "diffusers"


_MODEL = typer.Argument(metavar="MODEL", help="A model by name or path.", show_default=False)
_OUT = typer.Option("--out", "-o", help="Where to: a .safetensors file, or a new folder.", metavar="OUT")
_DTYPE = typer.Option("--dtype", help="Store weights as this (default: as they are).", show_default=False)
_TO = typer.Option("--to", help="One file, or a folder of diffusers.")
_EMA = typer.Option("--ema/--no-ema", help="Keep averages of training (default: where no weight changes).")
_FORCE = typer.Option("--force", help="Write over OUT.", metavar=" ")

#: tensors that are named where some are left out
_MOST_NAMED = 5

ModelName = Annotated[str, _MODEL]
Out = Annotated[Path, _OUT]
Dtype = Annotated[SavedDtype | None, _DTYPE]
To = Annotated[Layout, _TO]
Ema = Annotated[bool | None, _EMA]
Force = Annotated[bool, _FORCE]


def convert(
    model: ModelName,
    out: Out,
    dtype: Dtype = None,
    to: To = Layout.CHECKPOINT,
    ema: Ema = None,
    force: Force = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Save a MODEL again: in another dtype, as one .safetensors file, or as a folder of diffusers."""
    save(model, (), out, to, dtype, ema, force, as_json, PoolOptions(config=config, allow_pickle=allow_pickle))


def save(
    model: str,
    loras: Sequence[LoraChoice],
    out: Path,
    to: Layout,
    dtype: SavedDtype | None,
    ema: bool | None,
    force: bool,
    as_json: bool,
    where: PoolOptions,
) -> None:
    """Write `model` with `loras` merged to `out`, and tell of it.

    Raises UserError for names that are not known, a place that is taken, and what else saving refuses.
    """
    from modelpool.actors.cli.open_pool import settings_for
    from modelpool.actors.cli.screen import people_console, print_json, say
    from modelpool.actors.graph.expert_cut import check_halves
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.loading.open_model import OpenModel

    if os.path.lexists(out) and not force:
        raise OutputFailed(f"{out}: is there already, expected a new name, or --force to write over it")
    if to is Layout.DIFFUSERS and ema is not None:
        raise UserError("--ema: folders of diffusers have no place for averages of training, expected --to checkpoint")
    console, folders = people_console(), settings_for(where).models
    catalog = Catalog(
        folders.folders, folders.loras, "cpu", folders.registry, True, folders.allow_pickle, folders.assemblies
    )
    opened = OpenModel(catalog.find_model(model, whole=False), "cpu", whole=False)
    check_halves(loras, model, opened.checkpoint.family.sampling)
    found = tuple(replace(catalog.find_lora(lora.name, lora.strength), noise=lora.noise) for lora in loras)
    warnings = {lora.name: warning for lora in found if (warning := opened.lora_warning(lora))}
    for name, warning in warnings.items():
        say(console, f"LoRA {name}: {warning}", "yellow")
    with _shown(console, str(out)) as progress:
        saved = _written(opened, out, to, dtype, ema, {"loras": found, "overwrite": force, "progress": progress})
    if as_json:
        print_json(sys.stdout, {"kind": "saved", **_plain(saved), "warnings": warnings})
        return
    patched = f", {saved.patched} weights of the model patched" if found else ""
    say(console, f"{saved.path} is written: {saved.tensors} tensors, {format_bytes(saved.file_bytes)}{patched}")
    for lack in saved.lacks:
        say(console, f"it has no {lack}", "yellow")
    if saved.left_out:
        say(console, _left_out(saved.left_out), "yellow")


def _plain(saved: Saved) -> dict[str, Any]:
    """What was written, as programs read it."""
    plain = {"path": str(saved.path), "file_bytes": saved.file_bytes, "tensors": saved.tensors}
    left_out = {"tensors": len(saved.left_out), "first": saved.left_out[:_MOST_NAMED]}
    return {**plain, "patched": saved.patched, "lacks": saved.lacks, "left_out": left_out}


def _left_out(keys: Sequence[str]) -> str:
    """Which tensors are not in a folder, as people read it."""
    others = len(keys) - _MOST_NAMED
    named = ", ".join(keys[:_MOST_NAMED]) + (f" and {others} more" if others > 0 else "")
    count = (
        "1 tensor that no component takes is" if len(keys) == 1 else f"{len(keys)} tensors that no component takes are"
    )
    return f"{count} left out: {named}"


def _written(
    model: Any, out: Path, to: Layout, dtype: SavedDtype | None, ema: bool | None, beside: dict[str, Any]
) -> Saved:
    from modelpool.pool.saving.checkpoint_file import SAVED_DTYPES, save_checkpoint
    from modelpool.pool.saving.diffusers_folder import save_diffusers

    stored = None if dtype is None else SAVED_DTYPES[dtype.value]
    if to is Layout.DIFFUSERS:
        return save_diffusers(model, out, dtype=stored, **beside)
    return save_checkpoint(model, out, dtype=stored, keep_ema=ema, **beside)


@contextlib.contextmanager
def _shown(console: Console, name: str) -> Iterator[Callable[[int, int], None] | None]:
    """How far writing is: a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
