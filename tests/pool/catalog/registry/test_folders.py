"""Folders of ComfyUI, A1111 and Forge are looked through; unused files have a reason, and links stay inside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from modelpool.pool.catalog.registry import folder_scan as folders
from modelpool.pool.catalog.registry.file_purpose import FileKind
from modelpool.pool.catalog.registry.folder_scan import FileForm, ModelLocation, scan_locations
from modelpool.pool.catalog.registry.header_summary import MAX_PIPELINE_BYTES, read_facts
from tests.pool.catalog.registry.weights import write_weights


def scan(*locations: Path) -> folders.FolderScan:
    return scan_locations([ModelLocation(path, is_registered=True) for path in locations])


def found_names(found: folders.FolderScan) -> list[str]:
    return [file.path.name for file in found.files]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("models/checkpoints/sdxl/base.safetensors", FileKind.CHECKPOINT),
        ("models/loras/a.safetensors", FileKind.LORA),
        ("models/vae/a.safetensors", FileKind.VAE),
        ("models/text_encoders/a.sft", FileKind.TEXT_ENCODER),
        ("models/clip/a.safetensors", FileKind.TEXT_ENCODER),
        ("models/diffusion_models/a.safetensors", FileKind.DIFFUSION_MODEL),
        ("models/unet/a.safetensors", FileKind.DIFFUSION_MODEL),
        ("models/controlnet/a.safetensors", FileKind.CONTROLNET),
        ("models/embeddings/a.safetensors", FileKind.EMBEDDING),
        ("models/upscale_models/a.safetensors", FileKind.UPSCALER),
        ("models/clip_vision/a.safetensors", FileKind.CLIP_VISION),
        ("models/hypernetworks/a.safetensors", FileKind.HYPERNETWORK),
        ("models/Stable-diffusion/a.safetensors", FileKind.CHECKPOINT),
        ("models/Lora/style/a.safetensors", FileKind.LORA),
        ("models/VAE/a.safetensors", FileKind.VAE),
        ("models/ControlNet/a.safetensors", FileKind.CONTROLNET),
        ("somewhere/a.safetensors", None),
    ],
)
def test_the_folder_says_what_a_file_is_for(tmp_path: Path, file: str, kind: FileKind | None) -> None:
    write_weights(tmp_path / file)
    for place in (tmp_path, (tmp_path / file).parent, tmp_path / file):
        [found] = scan(place).files
        assert (found.path, found.folder_kind) == (tmp_path / file, kind)


def test_what_was_said_of_a_place_goes_before_folders_around_it_and_after_folders_in_it(tmp_path: Path) -> None:
    base = tmp_path / "loras" / "mine"
    write_weights(base / "a.safetensors")
    write_weights(base / "vae" / "b.safetensors")
    found = scan_locations([ModelLocation(base, FileKind.CHECKPOINT)])
    assert [file.folder_kind for file in found.files] == [FileKind.CHECKPOINT, FileKind.VAE]


def test_a_place_within_a_place_is_looked_at_for_what_it_was_said_to_hold(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors")
    write_weights(tmp_path / "styles" / "b.safetensors")
    for order in (1, -1):
        locations = [ModelLocation(tmp_path, FileKind.CHECKPOINT), ModelLocation(tmp_path / "styles", FileKind.LORA)][
            ::order
        ]
        assert [file.folder_kind for file in scan_locations(locations).files] == [FileKind.CHECKPOINT, FileKind.LORA]


def test_hidden_files_and_downloads_that_are_not_done_are_left_out(tmp_path: Path) -> None:
    for name in (".hidden.safetensors", "a.safetensors.part", "b.safetensors.crdownload", "c.safetensors.aria2"):
        (tmp_path / name).write_bytes(b"x")
    write_weights(tmp_path / "c.safetensors")
    write_weights(tmp_path / "Unconfirmed 12345.crdownload")
    write_weights(tmp_path / ".cache" / "d.safetensors")
    write_weights(tmp_path / "whole.safetensors")
    (tmp_path / "notes.txt.part").write_text("a download of no weights")
    found = scan(tmp_path)
    assert found_names(found) == ["whole.safetensors"]
    assert [path.name for path in found.unfinished] == [
        "Unconfirmed 12345.crdownload",
        "a.safetensors.part",
        "b.safetensors.crdownload",
        "c.safetensors",
        "c.safetensors.aria2",
    ]
    assert found.refused == ()


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_followed(tmp_path: Path) -> None:
    outside = write_weights(tmp_path / "private" / "secret.safetensors")
    base = tmp_path / "models"
    blob = base / "blobs" / "0123"
    write_weights(blob)
    (base / "inside.safetensors").symlink_to(blob)
    (base / "out.safetensors").symlink_to(outside)
    (base / "folder").symlink_to(outside.parent)
    (base / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    # a sibling with a name that begins alike is outside too
    beside = write_weights(tmp_path / "models2" / "b.safetensors")
    (base / "beside.safetensors").symlink_to(beside)
    found = scan(base)
    assert found_names(found) == ["inside.safetensors"]
    assert found.files[0].real_path == blob
    assert {refused.path.name: refused.problem for refused in found.refused} == {
        "beside.safetensors": f"a link out of the folder, to {beside}; add that path to use it",
        "folder": f"a link out of the folder, to {outside.parent}; add that path to use it",
        "gone.safetensors": f"a link to {tmp_path / 'nowhere'}, which does not exist",
        "out.safetensors": f"a link out of the folder, to {outside}; add that path to use it",
    }


def test_a_link_may_lead_into_another_place_and_a_place_may_be_a_link(tmp_path: Path) -> None:
    there = write_weights(tmp_path / "store" / "a.safetensors")
    base = tmp_path / "models"
    base.mkdir()
    (base / "named.safetensors").symlink_to(there)
    assert found_names(scan(base, tmp_path / "store")) == ["named.safetensors", "a.safetensors"]
    (tmp_path / "short").symlink_to(base)
    found = scan(tmp_path / "short", there.parent)
    assert [file.path for file in found.files] == [tmp_path / "short" / "named.safetensors", there]


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    write_weights(tmp_path / "a" / "a.safetensors")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "a" / "self.safetensors").symlink_to(tmp_path / "a" / "self.safetensors")
    found = scan(tmp_path)
    assert found_names(found) == ["a.safetensors"]
    assert [refused.path.name for refused in found.refused] == ["self.safetensors"]


def test_a_diffusers_folder_is_one_model_unless_a_part_leads_out(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "sdxl"
    write_weights(folder / "unet" / "diffusion_pytorch_model.safetensors")
    write_weights(folder / "vae" / "diffusion_pytorch_model.safetensors")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    [found] = scan(tmp_path / "models").files
    assert (found.path, found.form, len(found.members)) == (folder, FileForm.FOLDER, 3)
    assert found.fingerprint.size_bytes == sum(member.stat().st_size for member in found.members)
    secret = write_weights(tmp_path / "private.safetensors")
    (folder / "unet" / "more.safetensors").symlink_to(secret)
    refused = scan(tmp_path / "models")
    assert refused.files == ()
    assert [(r.path, r.problem) for r in refused.refused] == [
        (folder, f"its part more.safetensors is a link out of the folder, to {secret}; add that path to use it")
    ]


def test_a_file_in_parts_is_one_model_by_its_index(tmp_path: Path) -> None:
    for part in (1, 2):
        write_weights(tmp_path / f"big-0000{part}-of-00002.safetensors")
        write_weights(tmp_path / f"lost-0000{part}-of-00002.safetensors")
    write_index(tmp_path / "big.safetensors.index.json", "big-00001-of-00002", "big-00002-of-00002")
    found = scan(tmp_path)
    assert [(file.path.name, file.form, len(file.members)) for file in found.files] == [
        ("big.safetensors.index.json", FileForm.SHARDED, 3)
    ]
    assert [refused.path.name for refused in found.refused] == [
        "lost-00001-of-00002.safetensors",
        "lost-00002-of-00002.safetensors",
    ]


def write_index(path: Path, *parts: str) -> Path:
    """An index that names these parts."""
    locations = {f"key.{number}": f"{part}.safetensors" for number, part in enumerate(parts)}
    path.write_text(json.dumps({"weight_map": locations}))
    return path


def test_parts_are_those_that_the_index_names_however_they_are_called(tmp_path: Path) -> None:
    """Programs that cut files call the pieces as they like; a file that is not named is a model of its own."""
    for number, name in enumerate(("first", "second", "other")):
        write_weights(tmp_path / f"{name}.safetensors", [f"key.{number}"])
    index = write_index(tmp_path / "cut.safetensors.fp16.index.json", "first", "second")
    by_name = {file.path.name: file for file in scan(tmp_path).files}
    assert by_name.keys() == {"other.safetensors", index.name}
    assert [member.name for member in by_name[index.name].members] == [
        index.name,
        "first.safetensors",
        "second.safetensors",
    ]


def test_an_index_hides_no_file_that_is_not_a_part_of_it(tmp_path: Path) -> None:
    """Else one small file would take other people's models out of every list."""
    base = write_weights(tmp_path / "base.safetensors")
    evil = write_index(tmp_path / "evil.safetensors.index.json", "base")
    by_name = {file.path: file for file in scan(tmp_path).files}
    assert by_name.keys() == {base, evil}
    assert "is not in base.safetensors" in read_facts(by_name[evil]).problem


@pytest.mark.parametrize("allowed", [True, False])
def test_parts_that_are_pickles_are_hidden_where_they_may_be_read(tmp_path: Path, allowed: bool) -> None:
    """Those that are called as parts are in any case: nothing has to be read for it."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name, key in (("one.bin", "a"), ("pytorch_model-00001-of-00001.bin", "b")):
        torch.save({key: torch.zeros(2)}, folder / name)
    for index, key, part in (("cut", "a", "one.bin"), ("pytorch_model", "b", "pytorch_model-00001-of-00001.bin")):
        (folder / f"{index}.bin.index.json").write_text(json.dumps({"weight_map": {key: part}}))
    found = found_names(scan_locations([ModelLocation(folder)], allow_pickle=allowed))
    assert found == ["cut.bin.index.json", *([] if allowed else ["one.bin"]), "pytorch_model.bin.index.json"]


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_pipelines_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    write_weights(tmp_path / "model" / "unet" / "model.safetensors")
    os.mkfifo(tmp_path / "model" / "model_index.json")
    [found] = scan(tmp_path).files
    assert "model_index.json: not a regular file" in read_facts(found).problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"_class_name": "A", "_class_name": "B"}', "names '_class_name' twice"),
        (b'{"_class_name": "A", "x": ' + b"[" * 100_000, "is damaged"),
        (b'{"_class_name": "A", "x": NaN}', "holds NaN"),
        (b'{"_class_name": "' + b"A" * MAX_PIPELINE_BYTES + b'"}', "more than 1048576 bytes"),
    ],
)
def test_a_pipelines_file_is_read_as_strictly_as_any(tmp_path: Path, text: bytes, problem: str) -> None:
    write_weights(tmp_path / "model" / "unet" / "model.safetensors")
    (tmp_path / "model" / "model_index.json").write_bytes(text)
    [found] = scan(tmp_path).files
    assert problem in read_facts(found).problem


def test_folders_that_lie_too_deep_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_DEPTH", 2)
    write_weights(tmp_path / "a" / "b" / "near.safetensors")
    write_weights(tmp_path / "a" / "b" / "c" / "far.safetensors")
    found = scan(tmp_path)
    assert found_names(found) == ["near.safetensors"]
    assert [(r.path, r.problem) for r in found.refused] == [
        (tmp_path / "a" / "b" / "c", "is more than 2 folders deep, and was not scanned")
    ]


def test_an_index_that_leads_out_of_its_folder_brings_nothing_in(tmp_path: Path) -> None:
    """By a path or by a link: it is told when it is read, and what it names is no part of it."""
    secret = write_weights(tmp_path / "private" / "secret.safetensors")
    models = tmp_path / "models"
    models.mkdir()
    write_index(models / "path.safetensors.index.json", "../private/secret")
    (models / "linked.safetensors").symlink_to(secret)
    write_index(models / "link.safetensors.index.json", "linked")
    found = scan(models)
    assert [(file.path.name, len(file.members)) for file in found.files] == [
        ("link.safetensors.index.json", 1),
        ("path.safetensors.index.json", 1),
    ]
    assert all(read_facts(file).is_unsafe for file in found.files)


def test_a_revision_in_the_cache_of_the_hub_may_link_to_its_blobs(tmp_path: Path) -> None:
    """The one layout with links out of a folder that are no trap: snapshots of a repository beside its blobs."""
    repository = tmp_path / "models--somebody--something"
    revision = repository / "snapshots" / "0123abcd"
    revision.mkdir(parents=True)
    blob = write_weights(repository / "blobs" / "4567")
    (revision / "model.safetensors").symlink_to(blob)
    elsewhere = write_weights(tmp_path / "models--somebody--else" / "blobs" / "89ab")
    (revision / "stolen.safetensors").symlink_to(elsewhere)
    found = scan(revision)
    assert [(file.path.name, file.real_path) for file in found.files] == [("model.safetensors", blob)]
    assert [refused.path.name for refused in found.refused] == ["stolen.safetensors"]


def test_gguf_files_are_found_and_pickles_where_weights_are_expected(tmp_path: Path) -> None:
    for name in ("checkpoints/old.ckpt", "embeddings/bad.pt", "checkpoints/small.gguf", "other/data.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = scan(tmp_path)
    assert found.refused == ()
    names = ["old.ckpt", "small.gguf", "bad.pt"]
    assert found_names(found) == names, "a .bin where no weights are expected is no pickle"


def test_what_is_too_large_for_a_folder_of_models_is_not_searched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 10)
    for number in range(12):
        write_weights(tmp_path / "many" / f"{number}.safetensors")
    found = scan(tmp_path)
    assert found.files == ()
    assert [r.problem for r in found.refused] == ["contains more than 10 files and folders; not all were scanned"]


def test_a_configured_place_that_is_not_there_is_empty_and_an_added_one_is_missed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert scan_locations([ModelLocation(gone)]) == folders.FolderScan((), (), ())
    [refused] = scan(gone).refused
    assert refused.problem == "does not exist; `modelpool models remove` removes it from the registry"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told_of(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    write_weights(tmp_path / "a.safetensors")
    found = scan(tmp_path)
    assert found_names(found) == ["a.safetensors"]
    assert [r.problem for r in found.refused] == ["cannot be scanned: Permission denied"]


def test_a_name_that_is_no_text_is_told_of_as_far_as_it_can_be(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors")
    os.rename(os.fsencode(tmp_path / "a.safetensors"), os.fsencode(tmp_path) + b"/bad\xff.safetensors")
    found = scan(tmp_path)
    assert found.files == ()
    [refused] = found.refused
    assert refused.problem == "its name is not valid UTF-8"
    str(refused.path).encode("utf-8")
