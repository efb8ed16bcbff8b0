"""Writes a component's weights to a diffusers folder: one file, or several and their index. Torch-free.

Names and size limit are as in `save_pretrained` of diffusers 0.42.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from modelpool.pool.files.formats.safetensors_writer import TensorToWrite, write_safetensors

#: limit of the tensor bytes in one file
SHARD_BYTES = 10 * 1000**3
ENDING = ".safetensors"


def write_shards(
    folder: Path,
    stem: str,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str],
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write `tensors` to the file `stem` in `folder`, or to several of at most `shard_bytes` each, except for a tensor
    that is larger by itself. Raises as `write_safetensors` does."""
    shards = list(sharded(tensors, shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}{ENDING}", tensors, metadata, on_bytes=on_bytes)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}{ENDING}"
        write_safetensors(folder / name, shard, metadata, on_bytes=on_bytes)
        places |= {tensor.name: name for tensor in shard}
    total = {"total_size": sum(tensor.storage_bytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": {name: places[name] for name in sorted(places)}}
    (folder / f"{stem}{ENDING}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def sharded(tensors: Sequence[TensorToWrite], shard_bytes: int) -> Iterator[tuple[TensorToWrite, ...]]:
    """Split `tensors`, in order, before each that would make a file larger than `shard_bytes`."""
    shard: list[TensorToWrite] = []
    used_bytes = 0
    for tensor in tensors:
        if shard and used_bytes + tensor.storage_bytes > shard_bytes:
            yield tuple(shard)
            shard, used_bytes = [], 0
        shard.append(tensor)
        used_bytes += tensor.storage_bytes
    yield tuple(shard)
