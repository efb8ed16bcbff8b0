"""Rows of job files: every kind of file gives the same fields with the numbers of its rows, one after the other."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modelpool.actors.cli.run.job_file import JobLine, job_lines
from modelpool.actors.request.job_files.columns import ColumnChoice
from modelpool.actors.request.job_files.rows import read_rows
from modelpool.actors.request.job_files.text_rows import json_rows
from modelpool.actors.request.other_names import OTHER_NAMES
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError

TABLE = pa.table({"prompt": ["a", "b", None], "seed": [7, None, 9], "loras": [["light:0.8"], None, []]})
ROWS = [(1, {"prompt": "a", "seed": 7, "loras": ["light:0.8"]}), (2, {"prompt": "b"}), (3, {"seed": 9, "loras": []})]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_has_any_delimiter_and_headers_in_any_case(tmp_path: Path, delimiter: str) -> None:
    lines = ["\n", delimiter.join(["Prompt", "CFG", " Clip Skip ", "loras"]), delimiter.join(["a", "5", "1", '"x; y"'])]
    path = written(tmp_path / "jobs.csv", lines[0] + "\r\n".join(lines[1:]))
    assert list(read_rows(path)) == [(3, {"prompt": "a", "cfg": "5", "clip_skip": "1", "loras": ["x", "y"]})]


def test_a_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path / "jobs.txt", b'\xef\xbb\xbfa hill\r\n\n  a lake, {"x": 1} \n\xff\n')
    assert list(read_rows(path)) == [
        (1, {"prompt": "a hill"}),
        (3, {"prompt": 'a lake, {"x": 1}'}),
        (4, "not UTF-8 text (byte 0 of the line)"),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\n {"prompt": "a"}\n{"prompt": "b"}', [(2, {"prompt": "a"}), (3, {"prompt": "b"})]),
        (b"a hill\na lake\n", [(1, {"prompt": "a hill"}), (2, {"prompt": "a lake"})]),
        (b"\n\n", []),
    ],
)
def test_the_standard_input_is_json_lines_or_prompts(
    monkeypatch: pytest.MonkeyPatch, content: bytes, expected: list[object]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content))))
    assert list(read_rows("-")) == expected


def test_parquet_and_arrow_give_rows_without_their_nulls(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "jobs.parquet", row_group_size=2)
    assert list(read_rows(tmp_path / "jobs.parquet")) == ROWS
    for name, new in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new(tmp_path / name, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=2)
        assert list(read_rows(tmp_path / name)) == ROWS


def test_a_url_of_any_library_is_read() -> None:
    with fsspec.open("memory://rows/jobs.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    assert list(read_rows("memory://rows/jobs.parquet")) == ROWS
    with fsspec.open("memory://rows/jobs.csv", "wb") as file:
        file.write(b"prompt\na\n")
    assert list(read_rows("memory://rows/jobs.csv")) == [(2, {"prompt": "a"})]
    with pytest.raises(UserError, match=r"memory://rows/none\.csv: cannot be read"):
        list(read_rows("memory://rows/none.csv"))


def test_a_dataset_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    """The two layouts: what `save_to_disk` writes, and what the Hub has."""
    saved = tmp_path / "saved"
    saved.mkdir()
    parts = {"data-00000-of-00002.arrow": TABLE.slice(0, 2), "data-00001-of-00002.arrow": TABLE.slice(2)}
    for name, part in parts.items():
        with pa.ipc.new_stream(saved / name, TABLE.schema) as writer:
            writer.write_table(part)
    written(saved / "dataset_info.json", "{}")
    written(saved / "state.json", json.dumps({"_data_files": [{"filename": name} for name in parts]}))
    assert list(read_rows(saved)) == ROWS

    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for i in range(2):
        pq.write_table(TABLE.slice(2 * i, 2), hub / f"train-{i:05}-of-00002.parquet")
    assert list(read_rows(hub.parent)) == ROWS
    pq.write_table(TABLE, hub / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match="has the splits test, train; expected one"):
        list(read_rows(hub.parent))
    with pytest.raises(UserError, match=r"is a folder without \.parquet and \.arrow files"):
        list(read_rows(_empty(tmp_path)))


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.parametrize("name", ["noise_seed", "CFG Scale", "denoising_strength", "ckpt_name"])
def test_a_name_of_another_program_is_refused_with_the_field(tmp_path: Path, name: str) -> None:
    field = OTHER_NAMES[name.lower().replace(" ", "_")]
    with pytest.raises(UserError, match=f"unknown column '{name}'; did you mean '{field}'"):
        list(read_rows(written(tmp_path / "jobs.csv", f"prompt,{name}\na,1\n")))
    with pytest.raises(UserError, match=f"unknown field of GenerateRequest '{name}'; did you mean '{field}'"):
        GenerateRequest(model="m", prompt="p", **{name: 1})


def test_rows_are_read_as_they_are_wanted() -> None:
    """A file without an end gives its first rows, and 20,000 of them take less memory than their text."""

    class Endless:
        def __init__(self) -> None:
            self._lines: Iterator[bytes] = (b'{"prompt": "%d"}\n' % number for number in itertools.count())

        def readline(self, size: int = -1, /) -> bytes:
            return next(self._lines)

    tracemalloc.start()
    try:
        last = next(itertools.islice(json_rows("endless", Endless()), 20_000, None))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last == (20_001, {"prompt": "20000"})
    assert peak_bytes < 200_000


def test_a_named_column_that_no_line_has_is_a_problem_of_the_last_line(tmp_path: Path) -> None:
    """A misspelled one left the field unset in every line, without a word."""
    lines = [{"prompt": "a"}, {"text": "b"}, {}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for given, problems in (
        ("negative=Text", []),
        ("seed=sead", [(3, "no line has column 'sead' for seed (--column)")]),
    ):
        rows = list(read_rows(tmp_path / "rows.jsonl", ColumnChoice.of([given])))
        assert [row for row in rows if isinstance(row[1], str)] == problems
        assert len(rows) == 3 + len(problems)
    (tmp_path / "rows.txt").write_text("a prompt\n")
    with pytest.raises(UserError, match=r"no line has column 'caption' for prompt .* each line is a prompt"):
        list(read_rows(tmp_path / "rows.txt", ColumnChoice.of(["prompt=caption"])))
    assert list(read_rows(tmp_path / "rows.txt", ColumnChoice.of(["width="]))) == [(1, {"prompt": "a prompt"})]


def test_columns_of_a_real_dataset_are_named_or_left_out(tmp_path: Path) -> None:
    """Any further column ended the file."""
    columns = {"Caption": ["a", "b"], "url": ["u", "v"], "width": [4000, 3000], "id": [17, 18]}
    objects = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    csv_lines = [",".join(columns), *(",".join(map(str, each.values())) for each in objects)]
    written(tmp_path / "rows.csv", "\n".join(csv_lines))
    written(tmp_path / "rows.jsonl", "\n".join(json.dumps(each) for each in objects))
    for name in ("rows.parquet", "rows.csv", "rows.jsonl"):
        choice = ColumnChoice.of(["prompt=caption", "width="], ignores=True)
        found = [GenerateRequest(model="m", **fields) for _, fields in read_rows(tmp_path / name, choice)]
        assert [(one.prompt, one.id, one.width) for one in found] == [("a", "17", None), ("b", "18", None)], name
    for name in ("rows.parquet", "rows.csv"):
        with pytest.raises(UserError, match=r"unknown column 'url'.*--ignore-columns"):
            list(read_rows(tmp_path / name, ColumnChoice.of(["prompt=caption"])))
        with pytest.raises(UserError, match="has no column 'text' for prompt; found Caption, url"):
            list(read_rows(tmp_path / name, ColumnChoice.of(["prompt=text"], ignores=True)))
    _, fields = next(read_rows(tmp_path / "rows.jsonl", ColumnChoice.of(["prompt=Caption"])))
    assert fields["url"] == "u", "the request names it"
    for wrong, message in (
        (["caption"], "FIELD=COLUMN"),
        (["promt=x"], "did you mean 'prompt'"),
        (["id=a", "id=b"], "one column"),
        (["id=a", "negative=A"], "one field for column 'A'"),  # one of them was not set
    ):
        with pytest.raises(UserError, match=message):
            ColumnChoice.of(wrong)


def test_metadata_of_a_csv_cell_are_json_and_lists_are_split(tmp_path: Path) -> None:
    """Metadata were a text, and image prompts one name."""
    lines = ["prompt,metadata,image_prompts", 'a,"{""row"": 1}",x=1.png; y=2.png', "b,[1] and more,", "c,17,"]
    rows = [fields for _, fields in read_rows(written(tmp_path / "jobs.csv", "\n".join(lines)))]
    assert rows == [
        {"prompt": "a", "metadata": {"row": 1}, "image_prompts": ["x=1.png", "y=2.png"]},
        {"prompt": "b", "metadata": "[1] and more"},
        {"prompt": "c", "metadata": "17"},
    ]


def test_an_id_may_be_a_whole_number() -> None:
    for given, expected in ((17, "17"), (-3, "-3"), ("017", "017")):
        assert GenerateRequest(model="m", prompt="p", id=given).id == expected
    for wrong in (True, 1.5, "", 10**50):
        with pytest.raises(UserError, match="id: found"):
            GenerateRequest(model="m", prompt="p", id=wrong)


def test_names_of_other_programs_for_the_number_and_the_negative_prompt_are_known() -> None:
    for name, field in (("neg_prompt", "negative"), ("num_images", "n"), ("batch_size", "n"), ("n_iter", "n")):
        with pytest.raises(UserError, match=f"'{name}'; did you mean '{field}'"):
            GenerateRequest(model="m", prompt="p", **{name: 1})


def test_hires_via_image_is_what_picture_was(tmp_path: Path) -> None:
    """Also for the seeds that lines without one get: the same file means the same images."""
    requests = [GenerateRequest(model="m", prompt="p", hires={"scale": 2, "via": via}) for via in ("image", "picture")]
    assert [one.hires.via for one in requests if one.hires] == ["image", "image"]
    lines = [
        json.dumps({"model": "m", "prompt": "p", "hires": {"scale": 2, "via": via}}) for via in ("image", "picture")
    ]
    seeds = []
    for line in lines:
        (found,) = job_lines(written(tmp_path / "jobs.jsonl", line), {})
        assert isinstance(found, JobLine)
        seeds.append(found.request.seed)
    assert seeds == [3181275750] * 2, "as before the name changed"
    with pytest.raises(UserError, match="'latent' or 'image'"):
        GenerateRequest(model="m", prompt="p", hires={"scale": 2, "via": "pixels"})


def test_a_row_at_which_a_csv_file_was_cut_is_no_row(tmp_path: Path) -> None:
    """The beginning of its prompt was generated, with the defaults of all cells that were missing."""
    path = tmp_path / "jobs.csv"
    for text, is_cut in (
        ("prompt,seed,steps\na,1,4\na red ci", True),
        ("prompt,seed,steps\na,1,4\nb,2", True),
        ("prompt,seed,steps\na,1,4\nb,2\n", False),
        ("prompt,seed,steps\na,1,4\nb,2,4", False),
        ("prompt\na\nb", False),
    ):
        path.write_text(text)
        (number, last) = list(read_rows(path))[-1]
        assert isinstance(last, str) == is_cut, text
        assert number == text.count("\n") + (not text.endswith("\n"))
    assert "the file may be incomplete" in list(_rows_of(path, "prompt,seed\na"))[-1][1]


def test_lines_with_carriage_returns_within_are_no_prompts(tmp_path: Path) -> None:
    """All lines of a file of an old program were one prompt."""
    path = tmp_path / "jobs.txt"
    assert list(_rows_of(path, "a\rb\r")) == [
        (1, "found a carriage return within the line, expected a prompt per line")
    ]
    assert list(_rows_of(path, "a\r\nb\r\n")) == [(1, {"prompt": "a"}), (2, {"prompt": "b"})]


def _rows_of(path: Path, text: str) -> Iterator[Any]:
    path.write_bytes(text.encode())
    return read_rows(path)
