"""Writes shards from outputs, and finds an output in one: WebDataset tars, and Parquet files.

A tar has two files of each output: `KEY.json`, its entry of the manifest, and `KEY.png` (or its other ending). A
Parquet file has the fields of the manifest as columns, and the file in a column `image`, `video` or `audio`, in the
form that Hugging Face datasets read as such. Equal outputs give equal bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.outputs.layout import LayoutKind
from modelpool.actors.outputs.place import kind_of_recipe
from modelpool.actors.outputs.shard_plan import PlannedOutput, ShardPlan
from modelpool.actors.request.job_files.table_rows import import_arrow

#: an output of a plan with the content of its file
Packed: TypeAlias = tuple[PlannedOutput, bytes]
#: rows of a Parquet row group: a reader of one row reads all of them
GROUP_ROWS = 32
#: columns from the recipe, and from the entry, with their types
_RECIPE_COLUMNS = {
    "prompt": "string",
    "negative": "string",
    "model": "string",
    "seed": "uint64",
    "steps": "int64",
    "cfg": "float64",
    "sampler": "string",
    "schedule": "string",
    "width": "int64",
    "height": "int64",
}
_ENTRY_COLUMNS = {
    "id": "string",
    "line": "int64",
    "digest": "string",
    "file": "string",
    "run": "int64",
    "index": "int64",
    "job_id": "string",
    "worker": "string",
    "seconds": "float64",
    "pixels_sha256": "string",
    "file_bytes": "int64",
    "file_sha256": "string",
}
#: as JSON
_JSON_COLUMNS = ("recipe", "tasks", "metadata")
_FEATURES = {"image": "Image", "video": "Video", "audio": "Audio"}


def write_shard(kind: LayoutKind, path: Path, outputs: Iterable[Packed]) -> None:
    """Write outputs to a shard at `path`, one after the other. Raises UserError without pyarrow for Parquet."""
    if kind is LayoutKind.PARQUET:
        _write_parquet(path, outputs)
    else:
        _write_tar(path, outputs)


class ShardReader(Protocol):
    """A shard, as far as it is read."""

    def range(self, start: int, end: int) -> bytes:
        """Return its bytes from `start` to `end`."""

    def opened(self) -> AbstractContextManager[BinaryIO]:
        """Open it as a file."""


def entry_starts(plan: ShardPlan) -> list[int]:
    """Return where each output of a plan begins in a tar."""
    sizes = (_entry_blocks(output) + _blocks_bytes(output.entry.file_bytes or 0) for output in plan.outputs)
    return list(accumulate(sizes, initial=0))[:-1]


def read_from_shard(kind: LayoutKind, output: PlannedOutput, place: int, start: int, shard: ShardReader) -> bytes:
    """Return the file of the output at `place` of a shard, which begins at byte `start` of a tar."""
    if kind is LayoutKind.WEBDATASET:
        start += _entry_blocks(output) + tarfile.BLOCKSIZE
        return shard.range(start, start + (output.entry.file_bytes or 0))
    parquet = import_arrow("pyarrow.parquet", output.entry.file)
    column = kind_of_recipe(output.entry.recipe)
    with shard.opened() as file:
        group = parquet.ParquetFile(file).read_row_group(place // GROUP_ROWS, columns=[column])
        return bytes(group.column(column)[place % GROUP_ROWS].as_py()["bytes"])


def _write_tar(path: Path, outputs: Iterable[Packed]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for output, content in outputs:
            ending = output.entry.file.rpartition(".")[2]
            for name, part in ((f"{output.key}.json", _entry_bytes(output.entry)), (f"{output.key}.{ending}", content)):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))


def _entry_bytes(entry: ManifestEntry) -> bytes:
    return json.dumps(entry.fields, allow_nan=False).encode()


def _blocks_bytes(size_bytes: int) -> int:
    """Return the bytes of a file in a tar, with its header."""
    return tarfile.BLOCKSIZE * (1 + -(-size_bytes // tarfile.BLOCKSIZE))


def _entry_blocks(output: PlannedOutput) -> int:
    return _blocks_bytes(len(_entry_bytes(output.entry)))


def _write_parquet(path: Path, outputs: Iterable[Packed]) -> None:
    pa, parquet = import_arrow("pyarrow", path.name), import_arrow("pyarrow.parquet", path.name)
    rows = iter(outputs)
    first = list(islice(rows, GROUP_ROWS))
    column = kind_of_recipe(first[0][0].entry.recipe)
    schema = _schema(pa, column)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(first, rows):
            table = pa.Table.from_pylist([_row(output, content, column) for output, content in group], schema)
            writer.write_table(table, row_group_size=GROUP_ROWS)


def _groups(first: list[Packed], rest: Iterator[Packed]) -> Iterator[list[Packed]]:
    group = first
    while group:
        yield group
        group = list(islice(rest, GROUP_ROWS))


def _schema(pa: Any, column: str) -> Any:
    """Return the columns, with what Hugging Face datasets read them as."""
    plain = {"key": "string", **_RECIPE_COLUMNS, **_ENTRY_COLUMNS, **dict.fromkeys(_JSON_COLUMNS, "string")}
    features: dict[str, Any] = {column: {"_type": _FEATURES[column]}}
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in plain.items()}
    files = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields = [(column, files), *((name, pa.type_for_alias(dtype)) for name, dtype in plain.items())]
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def _row(output: PlannedOutput, content: bytes, column: str) -> dict[str, Any]:
    fields: Mapping[str, Any] = output.entry.fields
    recipe = output.entry.recipe
    row: dict[str, Any] = {column: {"bytes": content, "path": output.entry.file}, "key": output.key}
    row |= {name: getattr(recipe, name) for name in _RECIPE_COLUMNS}
    row |= {name: fields.get(name) for name in _ENTRY_COLUMNS}
    row |= {name: json.dumps(fields[name]) if fields.get(name) is not None else None for name in _JSON_COLUMNS}
    return row
