"""`modelpool convert`: saves a model in another dtype, as one file or as a diffusers folder; also the base of
`merge`.

Reads the model and writes a new one. Starts no pool, and overwrites a file only with --force.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.pool.values.core.errors import OutputFailed, UserError, counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.actors.request.requests import LoraChoice
    from modelpool.pool.models.saving.checkpoint_file import Saved


class SavedDtype(StrEnum):
    """Dtype of saved weights."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class SavedLayout(StrEnum):
    """Layout of a saved model."""

    CHECKPOINT = "checkpoint"
    DIFFUSERS = "diffusers"


_MODEL = typer.Argument(metavar="MODEL", help="Model name or path.", show_default=False)
_OUT = typer.Option("--out", "-o", help="Output: a .safetensors file, or a new folder.", metavar="OUT")
_DTYPE = typer.Option("--dtype", help="Dtype of the weights (default: unchanged).", show_default=False)
_TO = typer.Option("--to", help="One file, or a diffusers folder.")
_EMA = typer.Option("--ema/--no-ema", help="Keep EMA weights (default: if no weight changes).")
_FORCE = typer.Option("--force", help="Overwrite OUT.", metavar=" ")

#: number of left-out tensors that are listed by name
_MOST_NAMED = 5

ModelName = Annotated[str, _MODEL]
Out = Annotated[Path, _OUT]
Dtype = Annotated[SavedDtype | None, _DTYPE]
To = Annotated[SavedLayout, _TO]
Ema = Annotated[bool | None, _EMA]
Force = Annotated[bool, _FORCE]


def convert(
    model: ModelName,
    out: Out,
    dtype: Dtype = None,
    to: To = SavedLayout.CHECKPOINT,
    ema: Ema = None,
    force: Force = False,
    as_json: options.AsJson = False,
    config: options.Config = None,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Save a MODEL in another dtype, as one .safetensors file or as a diffusers folder."""
    save(model, (), out, to, dtype, ema, force, as_json, PoolOptions(config=config, allow_pickle=allow_pickle))


def save(
    model: str,
    loras: Sequence[LoraChoice],
    out: Path,
    to: SavedLayout,
    dtype: SavedDtype | None,
    ema: bool | None,
    force: bool,
    as_json: bool,
    where: PoolOptions,
) -> None:
    """Write `model` with `loras` merged to `out`, and report the result.

    Raises UserError for unknown names, an existing output, and whatever else saving refuses.
    """
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.actors.graph.features.expert_graph import check_expert_loras
    from modelpool.pool.catalog.catalog import Catalog
    from modelpool.pool.models.loading.open_model import OpenModel

    if os.path.lexists(out) and not force:
        raise OutputFailed(f"{out}: already exists; use --force to overwrite it")
    if to is SavedLayout.DIFFUSERS and ema is not None:
        raise UserError("--ema: diffusers folders cannot hold EMA weights; use --to checkpoint")
    console, folders = user_console(), settings_for(where).models
    catalog = Catalog(
        folders.folders, folders.loras, "cpu", folders.registry, True, folders.allow_pickle, folders.assemblies
    )
    opened = OpenModel(catalog.find_model(model, whole=False), "cpu", whole=False)
    check_expert_loras(loras, model, opened.checkpoint.family.sampling)
    found = tuple(lora.applied(catalog.find_lora(lora.name, lora.strength)) for lora in loras)
    warnings = {lora.name: warning for lora in found if (warning := opened.lora_warning(lora))}
    for name, warning in warnings.items():
        say(console, f"LoRA {name}: {warning}", "yellow")
    with _progress(console, str(out)) as progress:
        saved = _save_as(opened, out, to, dtype, ema, {"loras": found, "overwrite": force, "progress": progress})
    if as_json:
        print_json(sys.stdout, {"kind": "saved", **_plain(saved), "warnings": warnings})
        return
    patched = f", {counted(saved.patched, 'weight')} patched" if found else ""
    tensors = counted(saved.tensors, "tensor")
    say(console, f"written: {saved.path} ({tensors}, {format_bytes(saved.file_bytes)}{patched})")
    for lack in saved.missing:
        say(console, f"without {lack}", "yellow")
    if saved.left_out:
        say(console, _left_out(saved.left_out), "yellow")


def _plain(saved: Saved) -> dict[str, Any]:
    """Return the result as JSON values."""
    plain = {"path": str(saved.path), "file_bytes": saved.file_bytes, "tensors": saved.tensors}
    left_out = {"tensors": len(saved.left_out), "first": saved.left_out[:_MOST_NAMED]}
    return {**plain, "patched": saved.patched, "lacks": saved.missing, "left_out": left_out}


def _left_out(keys: Sequence[str]) -> str:
    """Describe the tensors that were left out of a folder."""
    others = len(keys) - _MOST_NAMED
    named = ", ".join(keys[:_MOST_NAMED]) + (f" and {others} more" if others > 0 else "")
    count = (
        "1 tensor that belongs to no component was"
        if len(keys) == 1
        else f"{counted(len(keys), 'tensor')} that belong to no component were"
    )
    return f"{count} left out: {named}"


def _save_as(
    model: Any, out: Path, to: SavedLayout, dtype: SavedDtype | None, ema: bool | None, saving: dict[str, Any]
) -> Saved:
    from modelpool.pool.models.saving.checkpoint_file import SAVED_DTYPES, save_checkpoint
    from modelpool.pool.models.saving.diffusers_folder import save_diffusers

    stored = None if dtype is None else SAVED_DTYPES[dtype.value]
    if to is SavedLayout.DIFFUSERS:
        return save_diffusers(model, out, dtype=stored, **saving)
    return save_checkpoint(model, out, dtype=stored, keep_ema=ema, **saving)


@contextlib.contextmanager
def _progress(console: Console, name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show progress: a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
