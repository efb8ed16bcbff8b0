"""Rows of a folder with a Hugging Face dataset: what `save_to_disk` writes, or Parquet and Arrow files. Needs pyarrow,
not `datasets`.

Facts about the folders: `save_to_disk` writes `state.json`; its `_data_files` list the Arrow files in order, and for
several splits `dataset_dict.json`, with a folder of each. Datasets on the Hub have Parquet files; their names begin
with the split. Source: datasets, `Dataset.save_to_disk`, `DatasetDict.save_to_disk`, and the Hub's documentation of
repository structures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from modelpool.actors.request.job_files.columns import NO_CHOICE, ColumnChoice
from modelpool.actors.request.job_files.job_source import JobSource
from modelpool.actors.request.job_files.table_rows import arrow_rows, parquet_rows
from modelpool.actors.request.job_files.text_rows import Row
from modelpool.actors.request.json_text import parse_json
from modelpool.pool.values.core.errors import UserError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_READERS = {".parquet": parquet_rows, ".arrow": arrow_rows}
#: 'train-00000-of-00002.parquet'
_SPLIT_OF_FILE = re.compile(r"([\w.]+)-\d+-of-\d+$")
#: split of a Hub file without one in its name
_DEFAULT_SPLIT = "train"


def dataset_rows(folder: JobSource, choice: ColumnChoice = NO_CHOICE) -> Iterator[Row]:
    """Yield the rows of all files of the dataset in `folder`, numbered through. Raises UserError for a folder without
    one, and for one with several splits.
    """
    count = 0
    for file in _data_files(folder):
        with file.opened() as opened:
            for number, fields in _READERS[file.ending](file.name, opened, choice, count + 1):
                yield number, fields
                count = number


def _data_files(folder: JobSource) -> list[JobSource]:
    files = folder.files()
    by_name = {file.name.removeprefix(folder.name.rstrip("/") + "/"): file for file in files}
    if _SPLITS in by_name:
        splits = _listed(by_name[_SPLITS], "splits")
        raise UserError(f"{folder.name}: has the splits {', '.join(splits)}; expected the folder of one of them")
    if _STATE in by_name:
        names = _listed(by_name[_STATE], "_data_files")
        missing = [name for name in names if name not in by_name]
        if missing:
            raise UserError(f"{folder.name}: {_STATE} lists {missing[0]}, which is missing")
        return [by_name[name] for name in names]
    found = [file for file in files if file.ending in _READERS]
    if not found:
        raise UserError(f"{folder.name}: is a folder without {' and '.join(_READERS)} files; expected a dataset")
    splits = sorted({_split(file) for file in found})
    if len(splits) > 1:
        raise UserError(
            f"{folder.name}: has the splits {', '.join(splits)}; expected one, such as the file or a folder with its "
            "files only"
        )
    return found


def _split(file: JobSource) -> str:
    stem = file.path.rpartition("/")[2].rpartition(".")[0]
    match = _SPLIT_OF_FILE.fullmatch(stem)
    return match[1] if match else _DEFAULT_SPLIT


def _listed(file: JobSource, field: str) -> list[str]:
    """Return the names that a JSON file of `save_to_disk` lists."""
    with file.opened() as opened:
        content = parse_json(opened.read())
    listed = content.get(field) if isinstance(content, dict) else None
    if isinstance(content, dict) and (content.get("_indices_data_files") or content.get("_indices_files")):
        raise UserError(f"{file.name}: a selection with indices; save it after `flatten_indices()`")
    names = [each.get("filename") if isinstance(each, dict) else each for each in listed or ()]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file.name}: found {field} = {listed!r}, expected a list of names")
    return [str(name) for name in names]
