"""The rows of a job file for one workflow: each sets inputs of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.actors.cli.run.job_file import BrokenLine, JobLine
from modelpool.actors.cli.run.run_workflow import read_workflow, requests_with_names
from modelpool.actors.request.job_files.columns import ColumnChoice
from modelpool.actors.request.job_files.rows import read_rows
from modelpool.actors.request.requests import WORKFLOW_FIELDS, GenerateRequest
from modelpool.actors.request.workflow_inputs import value_of_text, with_inputs
from modelpool.pool.values.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from modelpool.actors.client.start_checks import NameCheck

#: columns that are fields of a request beside its workflow; its seeds are inputs of nodes
_FIELDS = WORKFLOW_FIELDS - {"workflow", "seed", "n"}


@dataclass(frozen=True, slots=True)
class InputColumns(ColumnChoice):
    """Columns that are inputs of nodes, or fields of a request beside its workflow."""

    def field_names(self, where: str, columns: Sequence[str]) -> list[str]:
        """Return the columns as they are. Raises UserError for one that is neither, and for two of one name."""
        for column in columns:
            if "." not in column and column not in _FIELDS:
                raise unusable_field(f"{where}: column", column, f"NODE.INPUT, or one of {', '.join(sorted(_FIELDS))}")
            if columns.count(column) > 1:
                raise UserError(f"{where}: column {column!r} occurs twice")
        return list(columns)

    def row(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row of JSON."""
        return dict(fields)


def workflow_lines(path: str, workflow: Path, names: NameCheck) -> Iterator[JobLine | BrokenLine]:
    """Yield the requests of each row of a job file at an address of `read_rows`: those of the workflow in a file, with
    the inputs in the row. Raises UserError if either file is unusable."""
    graph = read_workflow(workflow, names.may_be_own_node)
    number = 0
    for number, found in read_rows(path, InputColumns()):
        if isinstance(found, str):
            yield BrokenLine(number, found)
            continue
        try:
            yield from (JobLine(number, request) for request in _requests(graph, workflow, names, found))
        except UserError as problem:
            yield BrokenLine(number, str(problem))
    if not number:
        raise UserError(f"{path}: no lines; expected the inputs of one workflow per line")


def _requests(
    graph: dict[str, Any], workflow: Path, names: NameCheck, row: Mapping[str, Any]
) -> Iterator[GenerateRequest]:
    given = {name: value for name, value in row.items() if value is not None}
    fields = {name: given.pop(name) for name in _FIELDS if name in given}
    inputs = {name: value_of_text(value) if isinstance(value, str) else value for name, value in given.items()}
    for request in requests_with_names(with_inputs(graph, inputs), workflow, names):
        beside = GenerateRequest(model="any", prompt="", **fields) if fields else request
        update = {name: getattr(beside, name) for name in fields}
        changed = request.model_copy(update=update)
        own = None if changed.workflow is None else changed.workflow.own_seed
        yield changed if changed.seed is not None else changed.model_copy(update={"seed": own or 0})
