"""Opens the place of outputs at an address: a folder, or an object store."""

from __future__ import annotations

import os
from pathlib import Path

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.folder import MANIFEST_NAME, OutputFolder
from modelpool.actors.outputs.layout import LayoutKind, read_layout
from modelpool.actors.outputs.place import OutputPlace
from modelpool.actors.outputs.sharded import ShardedOutputs
from modelpool.actors.outputs.store import OutputStore
from modelpool.pool.values.core.errors import unusable_field


def open_outputs(address: OutputAddress) -> OutputPlace:
    """Return the place at `address`, to write to: a folder is created, and a store must accept a small object. Raises
    OutputFailed.
    """
    layout = read_layout(address)
    if layout.kind is not LayoutKind.FILES:
        sharded = ShardedOutputs(address, layout)
        sharded.prepare()
        return sharded
    if isinstance(address, Path):
        return OutputFolder(address, layout.thumbnail_pixels)
    store = OutputStore(address, layout.thumbnail_pixels)
    store.prepare()
    return store


def existing_outputs(address: OutputAddress) -> OutputPlace:
    """Return the place at `address`, which has a manifest. Writes nothing to a store. Raises UserError if it has
    none.
    """
    layout = read_layout(address)
    if layout.kind is not LayoutKind.FILES:
        return ShardedOutputs(address, layout)
    if isinstance(address, Path):
        if not (address / MANIFEST_NAME).is_file():
            raise unusable_field("DIR_OR_ID", str(address), f"an output folder, with a {MANIFEST_NAME}")
        return OutputFolder(address)
    store = OutputStore(address)
    if not store.has_outputs() and not store.failures():
        raise unusable_field("DIR_OR_ID", address, f"the URL of outputs, with a {store.manifest_path}")
    return store


def check_store(address: OutputAddress) -> None:
    """Raise OutputFailed if outputs cannot be written to a store: before a pool starts, in a second. A folder is
    checked when it is opened, since that creates it.
    """
    if not isinstance(address, Path):
        open_outputs(address)


def opened_if_exists(address: OutputAddress) -> OutputPlace | None:
    """Return the place at `address`; None for a folder that does not exist, which is not created. Raises
    OutputFailed.
    """
    return open_outputs(address) if not isinstance(address, Path) or os.path.lexists(address) else None
