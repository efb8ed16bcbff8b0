"""Small files of weights for the tests of the registry, and a registry with a clock that can be set."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelpool.pool.catalog.registry.folder_scan import ModelLocation
from modelpool.pool.catalog.registry.registry import SETTLED_NS, Registry
from modelpool.pool.catalog.registry.registry_store import RegistryStore

#: keys that give each kind of file away
CHECKPOINT = ("model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight")
LORA = ("lora_unet_a.lora_up.weight", "lora_unet_a.lora_down.weight")
VAE = ("decoder.conv_in.weight", "encoder.conv_in.weight")


def write_weights(
    path: Path, keys: Sequence[str] = CHECKPOINT, fill: int = 0, metadata: Mapping[str, str] | None = None
) -> Path:
    """A whole safetensors file with one small tensor a key; `fill` makes contents differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for place, key in enumerate(keys):
        header[key] = {"dtype": "U8", "shape": [4, 4], "data_offsets": [16 * place, 16 * place + 16]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([fill % 256]) * 16 * len(keys))
    return path


def later_ns() -> int:
    """A clock at which every file has been as it is for long."""
    return time.time_ns() + 2 * SETTLED_NS


def make_registry(folder: Path, *configured: ModelLocation) -> Registry:
    """A registry that keeps its database in `folder`."""
    return Registry(RegistryStore(folder), configured, now_ns=later_ns)


def no_wait(seconds: float) -> None:
    """In the place of a sleep: `later_ns` says that the time is over."""
