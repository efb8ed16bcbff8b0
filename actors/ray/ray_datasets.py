"""Datasets of Ray Data from rows and files. Imports Ray Data at once: import this module when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.data

from modelpool.actors.config.output_address import OutputAddress
from modelpool.pool.files.fetch.file_system import open_file_system
from modelpool.pool.values.core.errors import UserError


def from_rows(rows: Sequence[dict[str, Any]]) -> ray.data.Dataset:
    """Return rows as a Dataset."""
    return ray.data.from_items(list(rows))


def with_row_ids(dataset: ray.data.Dataset, column: str) -> ray.data.Dataset:
    """Return a Dataset with a column of whole numbers, each unique in the dataset: of the task that reads a row, and of
    the row in it. Raises UserError for Ray before 2.55."""
    try:
        from ray.data.expressions import monotonically_increasing_id
    except ImportError:
        raise UserError(
            f"ray: found {ray.__version__}, expected 2.55 or newer for datasets with `id` of each row"
        ) from None
    return dataset.with_column(column, monotonically_increasing_id())


def read_parquet_shards(address: OutputAddress) -> ray.data.Dataset:
    """Return the Parquet shards of a place as a Dataset."""
    if isinstance(address, Path):
        return ray.data.read_parquet([str(path) for path in sorted(address.glob("shard-*.parquet"))])
    system = open_file_system(address)
    paths = sorted(system.glob(f"{system._strip_protocol(address)}/shard-*.parquet"))
    return ray.data.read_parquet(paths, filesystem=system)
