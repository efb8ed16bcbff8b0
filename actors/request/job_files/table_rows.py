"""Rows of Parquet and Arrow files, read by pyarrow in batches."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from modelpool.actors.request.job_files.columns import NO_CHOICE, ColumnChoice
from modelpool.actors.request.job_files.text_rows import Row, with_lists
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.install_hint import install_command

#: rows that become Python values at a time
_BATCH_ROWS = 1024


def parquet_rows(name: str, file: BinaryIO, choice: ColumnChoice = NO_CHOICE, first: int = 1) -> Iterator[Row]:
    """Yield the rows of a Parquet file, from number `first` on; nulls are fields that are not set. Raises UserError."""
    parquet = import_arrow("pyarrow.parquet", name)
    try:
        opened = parquet.ParquetFile(file, buffer_size=1 << 20)
    except Exception as error:  # pyarrow's errors have no common class
        raise UserError(f"{name}: cannot be read as Parquet ({error})") from error
    names = choice.field_names(name, opened.schema_arrow.names)
    read = [column for column, field in zip(opened.schema_arrow.names, names, strict=True) if field]
    batches = opened.iter_batches(_BATCH_ROWS, columns=read)
    yield from _batch_rows(name, [field for field in names if field], batches, first)


def arrow_rows(name: str, file: BinaryIO, choice: ColumnChoice = NO_CHOICE, first: int = 1) -> Iterator[Row]:
    """Yield the rows of an Arrow file, in the stream or the file format, from number `first` on. Raises UserError."""
    ipc = import_arrow("pyarrow.ipc", name)
    try:
        opened = _opened_stream(ipc, file)
    except Exception as error:
        raise UserError(f"{name}: cannot be read as Arrow ({error})") from error
    names = choice.field_names(name, opened.schema.names)
    yield from _batch_rows(name, names, opened, first)


def import_arrow(module: str, name: str) -> Any:
    """Import a module of pyarrow to read or write `name`. Raises UserError naming what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{name}: needs pyarrow; install it with `{install_command('parquet')}`") from None


def _opened_stream(ipc: Any, file: BinaryIO) -> Any:
    """Return an iterable of record batches with a `schema`."""
    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file_format:
        return ipc.open_stream(file)
    return _FileBatches(ipc.open_file(file))


class _FileBatches:
    """The batches of an Arrow file in the file format."""

    def __init__(self, opened: Any) -> None:
        self.schema = opened.schema
        self._opened = opened

    def __iter__(self) -> Iterator[Any]:
        return (self._opened.get_batch(i) for i in range(self._opened.num_record_batches))


def _batch_rows(name: str, names: list[str], batches: Iterable[Any], first: int) -> Iterator[Row]:
    number = first - 1
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                part = batch.slice(start, _BATCH_ROWS)
                columns = [column.to_pylist() for column in part.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    fields = {n: value for n, value in zip(names, values, strict=True) if n and value is not None}
                    yield number, with_lists(fields)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: cannot be read after row {number} ({error})") from error
