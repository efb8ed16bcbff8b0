"""Job files: each line alone, its number told, seeds that stay the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from modelpool.actors.cli.run.job_file import JobFile, read_job_file
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.values.core.errors import UserError

MODEL = {"model": "shapes"}


def read(path: Path, content: str | bytes, seed: int = 0, name: str = "jobs.jsonl") -> JobFile:
    file = path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_job_file(file, MODEL, seed)


def test_a_line_is_a_request_and_its_own_model_goes_before_the_default(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"prompt": "a red circle", "seed": 7, "loras": [["light", 0.8], "outline"]}\n'
        "\n"
        '{"model": "portraits", "prompt": "a hill", "seed": 8, "width": 64, "height": 96}\n',
    )
    assert [(line.number, line.request) for line in found.lines] == [
        (
            1,
            GenerateRequest(
                model="shapes", prompt="a red circle", seed=7, loras=(LoraChoice(name="light", strength=0.8), "outline")
            ),
        ),
        (3, GenerateRequest(model="portraits", prompt="a hill", seed=8, width=64, height=96)),
    ]
    assert found.broken == ()


def test_null_leaves_a_field_to_the_default(tmp_path: Path) -> None:
    """Of the command, which gives the model here, and of a request; seeds are those without the field."""
    plain = read(tmp_path, '{"prompt": "a red circle"}\n').lines[0].request
    for field in GenerateRequest.model_fields:
        if field != "prompt":
            found = read(tmp_path, json.dumps({"prompt": "a red circle", field: None}))
            assert [line.request for line in found.lines] == [plain], (field, found.broken)


def test_broken_lines_are_told_by_number_and_the_others_stand(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        b'{"prompt": "one"}\n'
        b"{oops\n"
        b'{"prompt": "two", "stpes": 3}\n'
        b'["prompt"]\n'
        b'{"prompt": "\xff"}\n'
        b'{"prompt": "three", "steps": -3}\n'
        b'{"seed": 4}\n'
        b'{"prompt": "a", "prompt": "b"}\n'
        b'{"prompt": "four", "steps": NaN}\n'
        b'{"prompt": "five", "loras": ["light:x"]}\n'
        b'{"prompt": "\\ud800"}\n'
        b'{"prompt": "six"}',
    )
    assert [line.request.prompt for line in found.lines] == ["one", "six"]
    assert [line.number for line in found.lines] == [1, 12]
    told = {line.number: line.message for line in found.broken}
    assert told.keys() == set(range(2, 12))
    assert told[2].startswith("not JSON: ")
    assert told[3].startswith("unknown field of GenerateRequest 'stpes'; did you mean 'steps'?")
    assert told[4].startswith("found list, expected an object")
    assert told[5] == "not UTF-8 text (byte 12 of the line)"
    assert told[6].startswith("steps: found -3, expected")
    assert told[7].startswith("prompt: missing; this field is required")
    assert told[8] == "field 'prompt' occurs twice"
    assert told[9].startswith("steps: found nan")
    assert told[10].startswith("loras.0.strength: found 'x'")
    assert told[11].startswith("found half a character")


def test_csv_rows_are_requests_and_empty_cells_are_not_given(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "prompt,loras,steps,seed\n"
        '"a red circle, large",light:0.8; outline,12,7\n'
        "a hill,,,\n"
        "\n"
        "a tree,,many,\n"
        "a lake,,3,4,5\n"
        '"two\nlines",,3,4\n',
        name="jobs.csv",
    )
    assert [(line.number, line.request.prompt) for line in found.lines] == [
        (2, "a red circle, large"),
        (3, "a hill"),
        (8, "two\nlines"),
    ]
    first, second = found.lines[0].request, found.lines[1].request
    assert first.loras == (LoraChoice(name="light", strength=0.8), LoraChoice(name="outline", strength=1.0))
    assert (first.steps, first.seed) == (12, 7)
    assert (second.steps, second.loras) == (20, ())
    assert {line.number: line.message.split(",")[0] for line in found.broken} == {
        5: "steps: found 'many'",
        6: "found 5 cells",
    }


def test_a_spreadsheets_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    assert len(read(tmp_path, b"\xef\xbb\xbfprompt\na hill\n", name="jobs.csv").lines) == 1
    assert len(read(tmp_path, b'\xef\xbb\xbf{"prompt": "a hill"}\n').lines) == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("jobs.doc", "x", r"job file: found '.*jobs\.doc', expected a name that ends in \.jsonl"),
        ("jobs.jsonl", "\n\n", "no lines; expected one request"),
        ("jobs.csv", "prompt\n", "no lines; expected one request"),
        ("jobs.csv", "promt,seed\na,1\n", "header: unknown column 'promt'; did you mean 'prompt'?"),
        ("jobs.csv", "prompt,prompt\na,b\n", "header: column 'prompt' occurs twice"),
        ("jobs.csv", b"prompt\n\xff\n", r"not UTF-8 text \(byte 7\)"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_is_refused(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        read(tmp_path, content, name=name)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read \(No such file"):
        read_job_file(tmp_path / "none.jsonl", MODEL)


def test_seeds_of_lines_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """The seeds are those before options and settings of options were added: a batch goes on after an update."""
    parts = ("", ', "loras": ["light"]', ', "options": {"pag": 3}', ', "options": {"slg": {"layers": [7]}}')
    parts += (', "hires": {"via": "picture"}', ', "options": {"slg": {"layers": [7], "rescale": 0.5}}')
    found = read(tmp_path, "".join(f'{{"prompt": "p"{part}}}\n' for part in parts))
    *earlier, rescaled = [line.request.seed for line in found.lines]
    assert earlier == [4250066949, 1442229906, 3764546752, 454773674, 2412040042]
    assert rescaled not in earlier


def test_seeds_of_workflows_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """An option that came later changed the seeds of rows with any option in a node."""
    request = {"model": "m", "steps": 4, "options": {"cfg_norm": {"strength": 0.5}}}
    nodes = {
        "t": {"kind": "text", "prompt": "a", "model": "m"},
        "s": {"kind": "sample", "request": request, "inputs": {"positive": "t"}},
        "d": {"kind": "decode", "model": "m", "inputs": {"latent": "s"}},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"workflow": {"nodes": nodes, "output": "d"}}))
    (line,) = read_job_file(file, {}, 0).lines
    changed = {**request, "options": {"cfg_norm": {"strength": 0.5}, "fresca": {}}}
    nodes["s"]["request"] = changed
    file.write_text(json.dumps({"workflow": {"nodes": nodes, "output": "d"}}))
    (other,) = read_job_file(file, {}, 0).lines
    assert line.request.seed == 2523713333
    assert other.request.seed != line.request.seed


def test_seeds_of_lines_without_one_stay_the_same_and_differ(tmp_path: Path) -> None:
    """Equal lines get different images; a line keeps its seed when others are added or moved around it."""
    content = '{"prompt": "a"}\n{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "b", "seed": 5}\n'
    seeds = [line.request.seed for line in read(tmp_path, content).lines]
    assert len(set(seeds)) == 4
    assert seeds[3] == 5
    assert [line.request.seed for line in read(tmp_path, content).lines] == seeds
    moved = '{"prompt": "c"}\n{"prompt": "b"}\n{"prompt": "a", "steps": 20}\n{"prompt": "a"}\n'
    assert [line.request.seed for line in read(tmp_path, moved).lines][1:] == [seeds[2], seeds[0], seeds[1]]
    others = [line.request.seed for line in read(tmp_path, content, seed=1).lines]
    assert not set(others[:3]) & set(seeds)


@given(st.lists(st.fixed_dictionaries({"prompt": st.text(st.characters(codec="utf-8")), "steps": st.integers(1, 99)})))
def test_csv_and_json_lines_say_the_same(tmp_path_factory, requests: list[dict]) -> None:
    folder = tmp_path_factory.mktemp("jobs")
    requests = [r for r in requests if r["prompt"].strip()] or [{"prompt": "x", "steps": 1}]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests), encoding="utf-8")
    with (folder / "jobs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "steps"], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(requests)
    from_json = read_job_file(folder / "jobs.jsonl", MODEL)
    from_csv = read_job_file(folder / "jobs.csv", MODEL)
    assert from_json.broken == from_csv.broken == ()
    assert [line.request for line in from_csv.lines] == [line.request for line in from_json.lines]
    assert [line.request.prompt for line in from_json.lines] == [r["prompt"] for r in requests]


def test_fields_that_came_later_change_no_seed_where_they_are_not_used(tmp_path: Path) -> None:
    """Files that were half done before there were images to start from are gone on with."""
    old = '{"prompt": "a red circle"}\n{"prompt": "a red circle", "loras": ["light:0.5"], "width": 64}\n'
    assert [line.request.seed for line in read(tmp_path, old).lines] == [2751904492, 707680633]


def test_images_are_named_in_both_kinds_of_file(tmp_path: Path) -> None:
    """Several ControlNets or regions stand in one cell of CSV. What an image is used for is part of the seed."""
    image = tmp_path / "a.png"
    Image.new("RGB", (16, 8)).save(image)
    fields = {
        "prompt": "p",
        "image": str(image),
        "strength": 0.5,
        "hires": "2:0.5",
        "controls": [f"canny={image}:0.8", f"depth={image}"],
        "regions": ["0,0,8,8=a square", "8,0,8,8:2=a circle"],
    }
    (line,) = read(tmp_path, json.dumps(fields)).lines
    header = ",".join(fields)
    cells = ["p", str(image), "0.5", "2:0.5", ";".join(fields["controls"]), '"' + ";".join(fields["regions"]) + '"']
    (row,) = read(tmp_path, f"{header}\n{','.join(cells)}\n", name="jobs.csv").lines
    assert row.request == line.request
    assert [control.strength for control in row.request.controls] == [0.8, 1.0]
    assert [region.prompt for region in row.request.regions] == ["a square", "a circle"]
    (other,) = read(tmp_path, json.dumps({**fields, "strength": 0.6})).lines
    assert other.request.seed != line.request.seed
    broken = read(tmp_path, json.dumps({**fields, "image": "nowhere.png"})).broken
    assert "image: found 'nowhere.png', expected an existing file" in broken[0].message


def test_several_references_stand_in_one_cell_as_controls_do(tmp_path: Path) -> None:
    """And one asks for what it asks for in a file of JSON lines, in a list or alone."""
    files = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for file in files:
        Image.new("RGB", (16, 8)).save(file)
    lines = [{"prompt": "p", "reference": said} for said in (files, files[0], files[:1])]
    json_lines = read(tmp_path, "\n".join(map(json.dumps, lines))).lines
    rows = read(tmp_path, f"prompt,reference\np,{files[0]}; {files[1]}\np,{files[0]}\np,\n", name="jobs.csv").lines
    assert [row.request for row in rows[:2]] == [line.request for line in json_lines[:2]]
    assert [len(row.request.references) for row in rows] == [2, 1, 0]
    assert json_lines[1].request.reference == json_lines[2].request.reference
