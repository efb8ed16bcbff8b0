"""An output folder holds whole images only, each once, whatever fails and whoever else writes there."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs import atomic_write as whole_file
from modelpool.actors.outputs import folder as folder_module
from modelpool.actors.outputs.contact_sheet import mark_of
from modelpool.actors.outputs.folder import (
    FinishedOutput,
    OutputFolder,
    file_name,
    pixels_sha256,
    plain,
    write_atomically,
)
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.outputs.report_figures import report_figures
from modelpool.actors.outputs.report_page import report_page
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.outputs.test_image_file import RECIPE


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class FakeTask:
    stage: Colour
    worker: str


def image(seed: int = 7, prompt: str = "a red circle", index: int = 0) -> FinishedOutput:
    recipe = dataclasses.replace(RECIPE, prompt=prompt, seed=seed)
    pixels = np.random.default_rng(seed % 1000).integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
    return FinishedOutput(
        recipe, ImagePixels(pixels), index, f"job-{index}", "gpu-0", 1.25, (FakeTask(Colour.RED, "gpu-0"),)
    )


def pixels_of(finished: FinishedOutput) -> np.ndarray:
    assert isinstance(finished.output, ImagePixels)
    return finished.output.pixels_HWC


def visible(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("."))


def partials(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.name.endswith(folder_module.TEMPORARY_SUFFIX)]


def manifest_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "manifest.jsonl").read_text().splitlines()]


def test_a_image_is_kept_with_its_recipe_and_one_line(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path / "new" / "out")
    path = out.write(image()).path
    assert path == tmp_path / "new" / "out" / file_name(RECIPE)
    assert re.fullmatch(r"a-red-circle-7-[0-9a-f]{8}\.png", path.name)
    assert read_recipe(path) == RECIPE
    assert np.asarray(Image.open(path)).tobytes() == pixels_of(image()).tobytes()
    [line] = manifest_lines(out.path)
    assert line["digest"] == RECIPE.digest
    assert line["file"] == path.name
    assert line["pixels_sha256"] == pixels_sha256(pixels_of(image()))
    assert line["tasks"] == [{"stage": "red", "worker": "gpu-0"}]
    assert out.finished() == {RECIPE.digest: path}


def test_the_same_recipe_again_is_the_same_file_and_no_second_line(tmp_path: Path) -> None:
    first = OutputFolder(tmp_path).write(image()).path
    stamp = first.stat().st_mtime_ns
    again = OutputFolder(tmp_path)
    assert again.write(image()).path == first
    assert again.write(image()).path == first
    assert first.stat().st_mtime_ns == stamp
    assert len(manifest_lines(tmp_path)) == 1


def test_a_deleted_image_is_not_finished_and_is_written_again_without_a_second_line(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    path = out.write(image()).path
    path.unlink()
    assert out.finished() == {}
    assert out.write(image()).path == path
    assert path.exists()
    assert len(manifest_lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("", "image-7-"),
        ("../../etc/passwd", "etc-passwd-7-"),
        ("\u9ad8\u5c71", "image-7-"),
        ("A  Hill, at (dawn:1.2)!", "a-hill-at-dawn-1-2-7-"),
        ("very " * 100, "very-very-"),
    ],
)
def test_file_names_are_safe_and_short(prompt: str, start: str) -> None:
    name = file_name(dataclasses.replace(RECIPE, prompt=prompt))
    assert name.startswith(start)
    assert re.fullmatch(r"[a-z0-9-]+\.png", name)
    assert len(name) < 120


def test_prompts_that_look_alike_get_different_files() -> None:
    names = {
        file_name(dataclasses.replace(RECIPE, prompt=p)) for p in ("a red circle", "a red  circle", "A red circle")
    }
    assert len(names) == 3


class Killed(BaseException):
    """Stands for the end of the process: nothing in the product catches it."""


def calls_of_a_write() -> list[str]:
    return ["open", "write", "fsync", "replace", "sync_folder", "append"]


@pytest.fixture(params=calls_of_a_write())
def breaking_point(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[OSError(28, "No space left on device"), Killed()], ids=["error", "killed"])
def failure(request: pytest.FixtureRequest) -> BaseException:
    return request.param


def break_at(monkeypatch: pytest.MonkeyPatch, point: str, failure: BaseException) -> None:
    """Make one step of writing fail; a killed process also never gets to clean up."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    class HalfWritten(io.BufferedWriter):
        def write(self, content: object) -> int:
            super().write(b"half")
            self.flush()
            fail()
            return 0

    def half_written(self: Path, mode: str = "r", *rest: object, **options: object) -> object:
        if not self.name.endswith(".png" + folder_module.TEMPORARY_SUFFIX):
            return original_open(self, mode, *rest, **options)
        if point == "open":
            fail()
        return HalfWritten(io.FileIO(self, "w"))

    original_open = Path.open
    if point in ("open", "write"):
        monkeypatch.setattr(Path, "open", half_written)
    elif point == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif point == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    elif point == "sync_folder":
        monkeypatch.setattr(whole_file, "sync_folder", fail)
    else:
        monkeypatch.setattr(folder_module.Manifest, "append", fail)
    if isinstance(failure, Killed):
        monkeypatch.setattr(whole_file, "_remove_same", lambda *_: None)


def test_a_failure_at_any_step_leaves_nothing_or_a_whole_image(
    tmp_path: Path, breaking_point: str, failure: BaseException
) -> None:
    """1. One image is kept. 2. The next fails at a step. 3. Under its own name stands nothing or all of it, and what
    was there is untouched. 4. The next run clears up and makes it good."""
    out = OutputFolder(tmp_path)
    kept = out.write(image(seed=1)).path
    with pytest.MonkeyPatch.context() as monkeypatch:
        break_at(monkeypatch, breaking_point, failure)
        with pytest.raises((OutputFailed, Killed)) as caught:
            out.write(image(seed=2))
    if isinstance(failure, OSError):
        assert str(tmp_path) in str(caught.value)
        assert "No space left on device" in str(caught.value)
        assert partials(tmp_path) == []

    path = tmp_path / file_name(image(seed=2).recipe)
    if path.exists():
        assert read_recipe(path) == image(seed=2).recipe
        assert np.asarray(Image.open(path)).tobytes() == pixels_of(image(seed=2)).tobytes()
    assert out.finished() == {image(seed=1).recipe.digest: kept}

    later = OutputFolder(tmp_path)
    assert partials(tmp_path) == []
    assert later.write(image(seed=2)).path == path
    assert list(later.finished().values()) == [kept, path]
    assert len(manifest_lines(tmp_path)) == 2


def test_a_torn_manifest_line_is_repaired_and_its_image_counts_as_not_made(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    out.write(image(seed=1))
    out.write(image(seed=2))
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    later = OutputFolder(tmp_path)
    assert list(later.finished()) == [image(seed=1).recipe.digest]
    later.write(image(seed=2))
    assert [line["recipe"]["seed"] for line in manifest_lines(tmp_path)] == [1, 2]


def test_write_whole_replaces_or_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sheet.png"
    write_atomically(path, b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert visible(tmp_path) == ["sheet.png"]
    assert partials(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused_by_name_before_anything_runs(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(OutputFailed, match=r"file.*cannot be written"):
        OutputFolder(occupied)
    with pytest.raises(OutputFailed, match=r"out.*cannot be written"):
        OutputFolder(occupied / "out")


@pytest.mark.parametrize("name", ["manifest.jsonl", "failures.jsonl", ".lock"])
def test_what_is_in_the_place_of_a_file_of_the_folder_is_named(tmp_path: Path, name: str) -> None:
    """A folder called manifest.jsonl was refused as "o3: cannot be written (Is a directory)"."""
    (tmp_path / "o3" / name).mkdir(parents=True)
    with pytest.raises(OutputFailed) as refused:
        OutputFolder(tmp_path / "o3")
    assert str(refused.value) == f"{tmp_path / 'o3' / name}: cannot be written (Is a directory)"


def test_a_manifest_that_became_a_folder_is_named_instead_of_the_image(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    out.manifest_path.unlink(missing_ok=True)
    out.manifest_path.mkdir()
    with pytest.raises(OutputFailed, match=r"manifest\.jsonl: cannot be written \(Is a directory\)"):
        out.write(image())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputFailed, match="Permission denied"):
        OutputFolder(tmp_path)


def test_a_full_disk_is_noticed_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputFailed, match="No space left on device"):
        OutputFolder(tmp_path)


def test_a_manifest_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text('{"image": 1}\n')
    with pytest.raises(OutputFailed, match=r"manifest.jsonl: byte 0: no 'digest'"):
        OutputFolder(tmp_path)


def damage(path: Path, how: str) -> None:
    """Damage a file in one of the ways in which disks, copies and people do."""
    content = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(content[:-10])
        case "overwritten":  # the size is right: only its hash tells
            path.write_bytes(content[:-60] + bytes(48) + content[-12:])


@pytest.mark.parametrize("how", ["missing", "empty", "truncated"])
@pytest.mark.parametrize("listed", ["now", "by an earlier version"])
def test_a_damaged_file_does_not_count_as_finished_and_is_repaired(tmp_path: Path, how: str, listed: str) -> None:
    """Decided by existence and size; entries of earlier versions list no size, but a PNG has an end."""
    out = OutputFolder(tmp_path)
    path, other = out.write(image()).path, out.write(image(seed=8)).path
    content = path.read_bytes()
    if listed != "now":
        forget_file_facts(tmp_path)
        out = OutputFolder(tmp_path)
    damage(path, how)
    assert list(out.finished().values()) == [other]
    assert [(one.path, bool(one.reason)) for one in out.damaged(quick=True)] == [(path, True)]
    assert out.write(image()).path == path
    assert path.read_bytes() == content
    assert list(out.finished().values()) == [path, other]
    assert len(manifest_lines(tmp_path)) == 2


def forget_file_facts(folder: Path) -> None:
    lines = manifest_lines(folder)
    for line in lines:
        del line["file_bytes"], line["file_sha256"]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("listed", ["now", "by an earlier version"])
def test_damage_that_keeps_the_size_is_found_by_reading_and_repaired(tmp_path: Path, listed: str) -> None:
    out = OutputFolder(tmp_path)
    path = out.write(image()).path
    content = path.read_bytes()
    if listed != "now":
        forget_file_facts(tmp_path)
        out = OutputFolder(tmp_path)
    assert list(out.damaged()) == []
    damage(path, "overwritten")
    assert list(out.damaged(quick=True)) == []
    (found,) = out.damaged()
    assert found.reason.startswith("damaged: ")
    out.write(image())
    assert path.read_bytes() == content


def test_a_file_with_other_pixels_after_damage_is_listed_anew(tmp_path: Path) -> None:
    """Another device may compute slightly other pixels: the last line counts, also for another reader."""
    out, reader = OutputFolder(tmp_path), OutputFolder(tmp_path)
    path = out.write(image()).path
    assert len(reader.finished()) == 1
    path.unlink()
    other = np.full((9, 9, 3), 7, np.uint8)
    written = out.write(dataclasses.replace(image(), output=ImagePixels(other)))
    assert written.pixels_sha256 == pixels_sha256(other)
    assert len(manifest_lines(tmp_path)) == 2
    (kept,) = reader.kept().values()
    assert kept.pixels_sha256 == pixels_sha256(other)
    assert list(reader.damaged()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": []},
        {"recipe": {"steps": "many"}},
        {"run": "1"},
        {"index": None},
        {"digest": 5},
        {"file": "../../etc/passwd"},
        {"file": ".hidden"},
        {"file_bytes": 1.5},
    ],
    ids=repr,
)
def test_a_wrong_type_in_a_line_costs_that_line_alone(tmp_path: Path, change: dict) -> None:
    out = OutputFolder(tmp_path)
    out.write(image(seed=1))
    kept = out.write(image(seed=2)).path
    lines = manifest_lines(tmp_path)
    merged = change | ({"recipe": lines[0]["recipe"] | change["recipe"]} if change.get("recipe") else {})
    lines[0] |= merged
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    later = OutputFolder(tmp_path)
    assert list(later.finished().values()) == [kept]
    assert later.damaged_line_count == 1
    assert next(iter(change)) in later.damaged_lines[0] or "steps" in later.damaged_lines[0]
    assert later.contact_sheet().exists()
    later.write(image(seed=1))
    assert len(OutputFolder(tmp_path).finished()) == 2


def test_a_folder_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path / "out")
    out.write(image(seed=1))
    (tmp_path / "out").rename(tmp_path / "away")
    (tmp_path / "out").mkdir()
    assert out.finished() == {}
    out.write(image(seed=2))
    assert list(out.finished()) == [image(seed=2).recipe.digest]


@pytest.mark.parametrize("how", ["removed", "a file", "full"])
def test_a_failure_of_the_folder_is_told_apart_from_one_of_a_file(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = OutputFolder(tmp_path / "out")
    if how == "full":
        monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    else:
        (tmp_path / "out").rename(tmp_path / "away")
    if how == "a file":
        (tmp_path / "out").write_text("in the way")
    with pytest.raises(FolderFailed, match=r"out: cannot be written"):
        out.write(image())


def test_a_failure_of_one_file_is_not_one_of_the_folder(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    (tmp_path / file_name(RECIPE)).mkdir()
    with pytest.raises(OutputFailed, match="Is a directory") as caught:
        out.write(image())
    assert not isinstance(caught.value, FolderFailed)
    assert out.write(image(seed=8)).path.exists()


def write_many(path: Path, seeds: range) -> None:
    out = OutputFolder(path)
    for seed in seeds:
        out.write(image(seed=seed, index=seed))


def test_two_runs_at_once_share_a_folder(tmp_path: Path) -> None:
    """Two processes write overlapping sets of recipes: every image is whole and listed exactly once."""
    context = multiprocessing.get_context("spawn")
    runs = [context.Process(target=write_many, args=(tmp_path, seeds)) for seeds in (range(30), range(15, 45))]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    lines = manifest_lines(tmp_path)
    assert sorted(line["recipe"]["seed"] for line in lines) == list(range(45))
    finished = OutputFolder(tmp_path).finished()
    assert {digest: read_recipe(path).digest for digest, path in finished.items()} == {d: d for d in finished}
    assert len(finished) == 45


def test_the_contact_sheet_shows_the_runs_one_after_the_other_each_in_its_order(tmp_path: Path) -> None:
    """Images arrive in any order; the sheet has them in the order in which they were asked for."""

    def solid(value: int, index: int, out: OutputFolder) -> None:
        recipe = dataclasses.replace(RECIPE, seed=value)
        out.write(
            FinishedOutput(recipe, ImagePixels(np.full((64, 64, 3), value, np.uint8)), index, "job", "gpu-0", 1.0)
        )

    first, second = OutputFolder(tmp_path), OutputFolder(tmp_path)
    solid(60, 1, first)
    solid(90, 0, second)
    solid(30, 0, first)
    path = second.contact_sheet()
    assert path == tmp_path / "contact_sheet.png"
    with Image.open(path) as sheet:
        shades = list(column_shades(np.asarray(sheet.convert("L"))))
    assert shades == [30, 60, 90]
    assert path not in second.finished().values()


def column_shades(sheet_HW: np.ndarray) -> Iterator[int]:
    """The grey of each image from left to right, along a line through the middle of the first row of images."""
    row = sheet_HW[28 + 96]
    for value in (30, 60, 90):
        columns = np.flatnonzero(row == value)
        assert len(columns) == 192, "each image is shown at the width of a cell"
    yield from (int(v) for v in row[np.sort([np.flatnonzero(row == v)[0] for v in (30, 60, 90)])])


def test_a_contact_sheet_is_drawn_again_only_if_the_files_on_it_have_changed(tmp_path: Path) -> None:
    """Drawing takes seconds, and each resumed batch drew the same sheet again."""
    out = OutputFolder(tmp_path)

    def add(seed: int) -> Path:
        recipe = dataclasses.replace(RECIPE, seed=seed)
        return out.write(finished_output(recipe)).path

    def drawn() -> int:
        return OutputFolder(tmp_path).contact_sheet().stat().st_ino  # of a file that replaced the one before

    def finished_output(recipe: Recipe) -> FinishedOutput:
        return FinishedOutput(recipe, ImagePixels(np.full((64, 64, 3), recipe.seed, np.uint8)), 0, "job", "gpu-0", 1.0)

    paths = [add(1), add(2)]
    first = drawn()
    assert drawn() == first
    add(3)
    second = drawn()
    assert second != first, "a file was added"
    paths[0].unlink()
    third = drawn()
    assert third != second, "a file was removed"
    (tmp_path / "contact_sheet.png").write_bytes(b"damaged")
    assert mark_of(tmp_path / "contact_sheet.png") == ""
    drawn()
    assert mark_of(tmp_path / "contact_sheet.png")


def test_an_empty_folder_has_a_sheet_that_says_so(tmp_path: Path) -> None:
    path = OutputFolder(tmp_path).contact_sheet()
    with Image.open(path) as sheet:
        assert min(sheet.size) > 60
        assert len(set(sheet.convert("L").tobytes())) > 2, "there is text on it"


def test_enum_members_become_their_values() -> None:
    assert plain(FakeTask(Colour.RED, "gpu-1")) == {"stage": "red", "worker": "gpu-1"}


def test_a_recipe_and_its_twin_with_other_versions_are_the_same_image(tmp_path: Path) -> None:
    out = OutputFolder(tmp_path)
    first = out.write(image()).path
    newer: Recipe = dataclasses.replace(RECIPE, versions={"modelpool": "9.9"})
    assert out.write(dataclasses.replace(image(), recipe=newer)).path == first
    assert len(manifest_lines(tmp_path)) == 1


def test_a_file_that_is_not_ours_keeps_the_name_that_was_asked_for(tmp_path) -> None:
    (tmp_path / "same.png").write_bytes(b"mine")
    out = OutputFolder(tmp_path)
    wanted = dataclasses.replace(image(), labels=Labels("a", name="same"))
    path = out.write(wanted).path
    assert (tmp_path / "same.png").read_bytes() == b"mine"
    assert path.name == f"same-{wanted.key[:8]}.png"


def test_a_file_of_a_killed_run_is_found_again_with_its_labels(tmp_path) -> None:
    wanted = dataclasses.replace(image(), labels=Labels("a", [1], 7, "same"))
    path = OutputFolder(tmp_path).write(wanted).path
    (tmp_path / "manifest.jsonl").unlink()
    assert OutputFolder(tmp_path).write(wanted).path == path
    (tmp_path / "manifest.jsonl").unlink()
    assert OutputFolder(tmp_path).repair_manifest() == (0, 1)
    (entry,) = OutputFolder(tmp_path).entries()
    assert (entry.key, entry.labels) == (wanted.key, Labels("a", [1], 7))


def test_a_report_names_the_ids_of_outputs(tmp_path) -> None:
    out = OutputFolder(tmp_path)
    out.write(dataclasses.replace(image(), labels=Labels("<mine>", {"row": 5}, 7)))
    page = report_page("Report", report_figures(out.entries()), out.local_file)
    assert "<b>&lt;mine&gt;</b>" in page
    assert "metadata: {&quot;row&quot;: 5}" in page
    assert "line 7 of the job file" in page
