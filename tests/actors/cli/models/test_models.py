"""`modelpool models`: files are added, listed, hashed, named and forgotten, as text and as JSON, without a pool."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.actors.cli.terminal.open_pool import settings_for
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.pool.catalog.registry.registry_store import RegistryStore, open_store
from tests.actors.cli.conftest import Command
from tests.actors.cli.test_help import loaded_by
from tests.architecture.source_tree import ROOT
from tests.pool.catalog.registry.weights import LORA, VAE, write_weights

SHAPES = ROOT / "examples" / "shapes"
#: of the example's files, as `sha256sum` gives them
LIGHT_SHA256 = "dc64de0699"


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry for each test, and no wait for files that have just been made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state_home"))
    for module in ("registry", "changes"):  # as if files had been there for long
        monkeypatch.setattr(f"modelpool.pool.catalog.registry.{module}.SETTLED_NS", -(10**12))


@pytest.fixture
def comfy(tmp_path: Path) -> Path:
    """A folder of models as ComfyUI has it, with things that are not used."""
    base = tmp_path / "ComfyUI" / "models"
    for folder, name in (("checkpoints/sd15", "shapes"), ("checkpoints/tuned", "shapes")):
        (base / folder).mkdir(parents=True)
        shutil.copy(SHAPES / "models" / f"{name}.safetensors", base / folder)
    tuned = base / "checkpoints" / "tuned" / "shapes.safetensors"
    tuned.write_bytes(tuned.read_bytes()[:-1] + b"\x01")
    (base / "loras").mkdir()
    shutil.copy(SHAPES / "loras" / "light.safetensors", base / "loras")
    write_weights(base / "vae" / "soft.safetensors", VAE)
    (base / "checkpoints" / "torn.safetensors").write_bytes(tuned.read_bytes()[:100_000])
    (base / "loras" / "late.safetensors.part").write_bytes(b"x")
    outside = write_weights(tmp_path / "elsewhere" / "mine.safetensors", LORA)
    (base / "loras" / "mine.safetensors").symlink_to(outside)
    return base


def test_a_folder_is_added_hashed_listed_and_removed(command: Command, comfy: Path) -> None:
    added = command("models", "add", "ComfyUI/../ComfyUI/models")
    assert added.code == 0
    assert added.out == ""
    assert f"{comfy} is added: 4 files, 1 unfinished download\n" in added.err
    assert re.search(r"^unusable: .*torn\.safetensors: truncated", added.err, re.MULTILINE)
    assert re.search(r"^unusable: .*mine\.safetensors: a link out of the folder", added.err, re.MULTILINE)
    assert re.search(r"^hashed light: DC64DE0699 \(594\.5 KiB in ", added.err, re.MULTILINE)
    listed = command("models")
    assert re.search(
        r"^sd15/shapes +checkpoint +Stable Diffusion 1, 64x64 +9\.6 MiB +\w{10} +/", listed.out, re.MULTILINE
    )
    assert re.search(r"^light +LoRA +113 modules, rank 8 +594\.5 KiB +DC64DE0699 +/", listed.out, re.MULTILINE)
    assert re.search(r"^soft +VAE +- ", listed.out, re.MULTILINE)
    assert "truncated: the file has 100000 bytes" in listed.out
    assert "1 unfinished download skipped" in listed.out
    assert listed.out == command("models", "list").out
    again = command("models", "add", str(comfy / "loras"))
    assert f"{comfy / 'loras'} was already added, as part of {comfy}: 1 file" in again.err
    removed = command("models", "remove", str(comfy))
    assert removed.err == f"{comfy} is removed; its files are not deleted\n"
    assert (comfy / "loras" / "light.safetensors").is_file()
    assert command("models", "remove", str(comfy)).code == 2


def test_everything_is_told_to_programs(command: Command, comfy: Path) -> None:
    place, *hashed = command("models", "add", str(comfy), "--json").objects
    assert (place["kind"], place["is_new"], place["files"]) == ("place", True, 4)
    assert {one["name"] for one in hashed} == {"sd15/shapes", "tuned/shapes", "light", "soft"}
    alias = command("models", "alias", "glow", "light", "--json").objects
    assert alias == [
        {"kind": "alias", "name": "glow", "path": str(comfy / "loras" / "light.safetensors"), "sha256": ""}
    ]
    found = command("models", "--json").objects
    [light] = [one for one in found if one["kind"] == "lora"]
    assert (light["aliases"], light["sha256"][:10], light["autov2"]) == (["glow"], LIGHT_SHA256, "DC64DE0699")
    assert re.fullmatch(r"[0-9A-F]{12}", light["autov3"])
    assert light["autov1"] is None, "the file ends before the bytes that AutoV1 is made of"
    models = {one["name"]: one for one in found if one["kind"] == "model"}
    assert models.keys() == {"sd15/shapes", "tuned/shapes", "torn"}
    assert re.fullmatch(r"[0-9A-F]{8}", models["sd15/shapes"]["autov1"])
    assert "truncated" in models["torn"]["problem"]
    assert [
        (one["kind"], Path(one["path"]).name) for one in found if one["kind"] in ("vae", "refused", "unfinished")
    ] == [
        ("vae", "soft.safetensors"),
        ("refused", "mine.safetensors"),
        ("unfinished", "late.safetensors.part"),
    ]
    gone = command("models", "remove", "GLOW", "--json").objects
    assert gone == [{"removed": "alias", "name": "GLOW", "path": str(comfy / "loras" / "light.safetensors")}]


def test_a_scan_hashes_what_is_new_and_ends_with_1_where_something_is_wrong(command: Command, comfy: Path) -> None:
    command("models", "add", "--no-hash", str(comfy))
    assert all(one.get("sha256") is None for one in command("models", "--json").objects)
    scanned = command("models", "scan")
    assert scanned.code == 1
    assert len(re.findall(r"^hashed ", scanned.err, re.MULTILINE)) == 4
    assert scanned.err.endswith("4 files, 2 unusable, 1 unfinished download\n")
    (comfy / "checkpoints" / "torn.safetensors").unlink()
    (comfy / "loras" / "mine.safetensors").unlink()
    again = command("models", "scan")
    assert (again.code, again.err) == (0, "4 files, 0 unusable, 1 unfinished download\n")


def test_an_alias_is_made_changed_and_told(command: Command, comfy: Path) -> None:
    command("models", "add", "--no-hash", str(comfy))
    first = comfy / "checkpoints" / "sd15" / "shapes.safetensors"
    second = comfy / "checkpoints" / "tuned" / "shapes.safetensors"
    assert command("models", "alias", "mine", "sd15/shapes").err == f"mine is {first}\n"
    assert command("models", "alias", "mine", str(second)).err == f"mine is {second} (was {first})\n"
    assert re.search(r"^tuned/shapes, mine +checkpoint", command("models").out, re.MULTILINE)
    refused = command("models", "alias", "other", "shapes")
    assert refused.code == 2
    assert "file 'shapes' can mean 2 files: 'sd15/shapes' (" in refused.err
    assert command("models", "remove", "mine").err == f"mine is removed; it was an alias of {second}\n"


def test_what_cannot_be_added_is_one_line_and_nothing_is_registered(command: Command, tmp_path: Path) -> None:
    (tmp_path / "page.safetensors").write_bytes(b"<!DOCTYPE html>")
    for name, complaint in (("page.safetensors", "a web page"), ("gone", "no such file or folder")):
        ended = command("models", "add", name)
        assert ended.code == 2
        [line] = ended.err.splitlines()
        assert complaint in line
    assert open_store().locations() == ()


def test_options_before_a_subcommand_are_told_where_they_belong(command: Command) -> None:
    ended = command("models", "--json", "scan")
    assert ended.code == 2
    assert "place --json after scan" in ended.err


def test_a_configuration_may_keep_its_registry_elsewhere(command: Command, comfy: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[models]\nregistry = "kept here"\n')
    command("models", "add", "--no-hash", str(comfy), "--config", "own.toml")
    assert RegistryStore(tmp_path / "kept here").locations() == (comfy,)
    assert command("models", "--json", "--config", "own.toml").objects
    assert open_store().locations() == ()


def test_commands_write_to_the_folders_of_the_users_state_and_caches_alone(
    command: Command, comfy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the home otherwise, nor to the working folder."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "MODELPOOL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = set(tmp_path.rglob("*"))
    for arguments in (["models", "add", str(comfy / "loras")], ["models"], ["status"], ["down"]):
        command(*arguments)
    command("inspect", str(comfy / "loras" / "light.safetensors"))
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path not in before and path.is_file()}
    folders = (Path("home/.local/state/modelpool"), Path("home/.cache/modelpool"))
    assert [path for path in written if not any(path.is_relative_to(one) for one in folders)] == []
    assert folders[0] / "models.sqlite3" in written


def test_added_models_go_before_the_example_and_its_small_budget(command: Command, comfy: Path) -> None:
    assert settings_for(PoolOptions()).pool.vram == "64MiB"
    command("models", "add", "--no-hash", str(comfy))
    settings = settings_for(PoolOptions())
    assert (settings.models.folders, settings.pool.vram) == ((), None)


def test_a_listing_loads_neither_ray_nor_torch() -> None:
    assert not loaded_by("models", "list", "--json") & {"ray", "torch", "diffusers", "transformers"}


@pytest.mark.parametrize("name", ["list", "add", "scan", "alias", "remove"])
def test_every_subcommand_has_help(command: Command, name: str) -> None:
    ended = command("models", name, "-h")
    assert ended.code == 0
    assert f"Usage: modelpool models {name}" in ended.out
    assert "See _" not in ended.out, "the sentence itself, and not where it stands"


def test_pickles_are_listed_scanned_and_named_where_they_are_allowed(command: Command, tmp_path: Path) -> None:
    """As they are added: a file that `add` takes must not be lost to the other commands."""
    old = tmp_path / "checkpoints" / "old.ckpt"
    old.parent.mkdir()
    torch.save({"first_stage_model.decoder.conv_in.weight": torch.zeros(4, 4)}, old)
    assert command("models", "add", str(old.parent), "--allow-pickle").code == 0
    for given in (("list",), ()):
        assert [row["path"] for row in command("models", *given, "--allow-pickle", "--json").objects] == [str(old)]
        [refused] = command("models", *given, "--json").objects
        assert "allow_pickle for files" in refused["problem"]
    assert command("models", "scan", "--allow-pickle").code == 0
    assert command("models", "scan").code == 1
    assert command("models", "alias", "mine", "old").code == 2
    assert command("models", "alias", "mine", "old", "--allow-pickle").code == 0
    assert "place --allow-pickle after list" in command("models", "--allow-pickle", "list").err


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """The example's model in separate files, added."""
    base = tmp_path / "apart"
    tensors = load_file(SHAPES / "models" / "shapes.safetensors")
    for name, prefix in (
        ("unet/shapes_unet", "model.diffusion_model."),
        ("vae/shapes_vae", "first_stage_model."),
        ("clip/shapes_clip", "cond_stage_model.transformer."),
    ):
        (base / name).parent.mkdir(parents=True)
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        save_file(own, base / f"{name}.safetensors")
    return base


def test_separate_files_are_made_one_model(command: Command, apart: Path) -> None:
    assert command("models", "add", str(apart)).code == 0
    short = command("models", "assemble", "whole", "--diffusion-model", "shapes_unet", "--vae", "shapes_vae")
    assert short.code == 2
    assert "the text encoder clip_l is missing: Stable Diffusion 1 reads clip_l" in short.err
    assert f"that would fit: {apart / 'clip' / 'shapes_clip.safetensors'}" in short.err
    assert not (apart / "whole.model.json").exists()
    files = ("--diffusion-model", "shapes_unet", "--vae", "shapes_vae", "--text-encoder", "shapes_clip")
    made = command("models", "assemble", "whole", *files)
    assert (made.code, made.err) == (0, f"whole is Stable Diffusion 1, from 3 files: {apart / 'whole.model.json'}\n")
    taken = command("models", "assemble", "whole", *files)
    assert taken.code == 2
    assert "already exists" in taken.err
    assert command("models", "assemble", "whole", *files, "--force").code == 0
    listed = command("models")
    assert re.search(r"^whole +checkpoint +Stable Diffusion 1, 512x512 +9\.6 MiB +\w{10} +/", listed.out, re.MULTILINE)
    said = command("inspect", str(apart / "whole.model.json"), "--json").objects[0]
    assert (said["kind"], said["family"], len(said["components"])) == ("checkpoint", "sd1", 3)
    assert command("plan", "whole").code == 0


def test_a_model_is_not_assembled_under_the_name_of_an_alias(command: Command, apart: Path) -> None:
    """An alias goes before the names of files, so that its file would be used in the place of the new model."""
    assert command("models", "add", str(apart)).code == 0
    assert command("models", "alias", "mine", "shapes_vae").code == 0
    parts = ("--diffusion-model", "shapes_unet", "--vae", "shapes_vae", "--text-encoder", "shapes_clip")
    refused = command("models", "assemble", "Mine", *parts)
    assert refused.code == 2
    assert f"'mine' is already an alias of {apart / 'vae' / 'shapes_vae.safetensors'}" in refused.err
    assert "`modelpool models remove mine`" in refused.err
    assert not (apart / "Mine.model.json").exists()
    assert command("models", "remove", "mine").code == 0
    assert command("models", "assemble", "Mine", *parts).code == 0


def test_only_what_may_be_a_lora_is_listed_as_known_ones(command: Command, apart: Path) -> None:
    """A model of separate files lies in no folder that says what it is, and is a model all the same."""
    assert command("models", "add", str(apart)).code == 0
    parts = ("--diffusion-model", "shapes_unet", "--vae", "shapes_vae", "--text-encoder", "shapes_clip")
    assert command("models", "assemble", "whole", *parts).code == 0
    unknown = command("plan", "whole", "--lora", "nothing:1")
    assert unknown.code == 2
    assert "unknown LoRA 'nothing'" in unknown.err
    assert "whole" not in unknown.err.split("unknown LoRA 'nothing'")[1]


def test_a_folder_here_that_is_named_without_its_path_is_pointed_at(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare names are names of the registry."""
    monkeypatch.chdir(tmp_path)
    source = str(SHAPES / "models" / "shapes.safetensors")
    assert command("convert", source, "--to", "diffusers", "-o", "fold").code == 0
    unknown = command("plan", "fold")
    assert unknown.code == 2
    assert "unknown model 'fold'" in unknown.err
    assert "There is a folder of that name here: ./fold" in unknown.err
    assert command("plan", "./fold").code == 0


def test_a_model_is_assembled_where_all_files_lie(command: Command, apart: Path, tmp_path: Path) -> None:
    files = [f"{apart}/{name}.safetensors" for name in ("unet/shapes_unet", "vae/shapes_vae", "clip/shapes_clip")]
    given = ("--diffusion-model", files[0], "--vae", files[1], "--text-encoder", files[2])
    nowhere = command("models", "assemble", "whole", *given)
    assert nowhere.code == 2
    assert f"expected a folder that does (--folder {apart})" in nowhere.err
    outside = command("models", "assemble", "whole", *given, "--folder", str(apart / "unet"))
    assert outside.code == 2
    assert "is not in" in outside.err
    made = command("models", "assemble", "whole", *given, "--folder", str(apart))
    assert made.code == 0
    assert f"this folder is not part of any pool yet; run: modelpool models add {apart}" in made.err
    odd = command("models", "assemble", "../whole", *given, "--folder", str(apart))
    assert odd.code == 2
    assert not (tmp_path / "whole.model.json").exists()


def test_a_folder_of_diffusers_is_a_model(command: Command, tmp_path: Path) -> None:
    source, folder = SHAPES / "models" / "shapes.safetensors", tmp_path / "fold"
    assert command("convert", str(source), "--to", "diffusers", "--out", str(folder)).code == 0
    assert command("models", "add", str(tmp_path / "fold")).code == 0
    listed = command("models")
    assert re.search(r"^fold +checkpoint +Stable Diffusion 1, 64x64 +\d", listed.out, re.MULTILINE)
    said = command("inspect", str(tmp_path / "fold"), "--json").objects[0]
    assert (said["runs"], said["problem"]) == (True, "")
    assert "as Stable Diffusion 1, 64x64 pixels" in command("inspect", str(tmp_path / "fold")).out
