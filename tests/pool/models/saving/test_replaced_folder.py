"""What would be lost with a folder of diffusers: nothing of what saving writes there, and everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import Saved, save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.replaced_folder import lost_files
from modelpool.pool.values.core.errors import FilesWouldBeLost
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "toy.safetensors")


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What saving writes, in shards."""
    folder = tmp_path_factory.mktemp("saved") / "folder"
    save_diffusers(open_checkpoint(source), folder, shard_bytes=100_000)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(saved, tmp_path / "folder")


#: files that a user may have put into such a folder, and other programs
OF_USERS = (
    "notes.txt", "README.md", "other.safetensors", "unet/notes.txt", "unet/other.safetensors", "unet/model.safetensors",
    "text_encoder/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.non_ema.safetensors",
    "vae/diffusion_pytorch_model.bin", "unet/deeper/config.json", "other/config.json", "scheduler/model.safetensors",
    "safety_checker/model.safetensors", "tokenizer/.hidden", "config.json", "unet/model_index.json",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_USERS)
def test_a_users_file_is_not_lost(source: Path, folder: Path, name: str) -> None:
    """With leave to write over the folder, too: it is named, and all stays as it was."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"mine")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FilesWouldBeLost, match=rf"folder: contains other files, which would be lost: {name}; expected"):
        save_diffusers(open_checkpoint(source), folder, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_saving_writes_is_replaced(source: Path, folder: Path) -> None:
    """In shards, with what showing a folder leaves in it."""
    assert len(list((folder / "unet").glob("*.safetensors"))) > 1
    (folder / "unet" / ".DS_Store").write_bytes(b"")
    (folder / "empty").mkdir()
    assert list(lost_files(folder)) == []
    save_diffusers(open_checkpoint(source), folder, overwrite=True)
    assert {path.name for path in (folder / "unet").iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}
    assert open_checkpoint(folder).family.name == "sd1"


@pytest.mark.parametrize(
    ("save", "place"),
    [
        (save_diffusers, "."),
        (save_diffusers, "../folder"),
        (save_diffusers, "new"),
        (save_checkpoint, "unet/diffusion_pytorch_model.safetensors"),
    ],
)
def test_nothing_is_written_over_or_into_the_folder_that_is_saved(
    folder: Path, save: Callable[..., Saved], place: str
) -> None:
    """What a tokenizer or a scheduler says beside the fields that are read would be gone, and a component that is
    written over."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FilesWouldBeLost, match="the folder of the saved model; expected another path"):
        save(open_checkpoint(folder), folder / place, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_links_are_not_followed_and_not_lost(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "deep").symlink_to(tmp_path / "elsewhere")
    (folder / "unet" / "config.json").rename(tmp_path / "elsewhere" / "config.json")
    (folder / "unet" / "config.json").symlink_to(tmp_path / "elsewhere" / "config.json")
    assert list(lost_files(folder)) == ["deep", "unet/config.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"unet": "all"}', '{"unet": [null, null]}', '{"unet": [1, 2]}'])
def test_without_an_index_that_says_so_nothing_is_a_pipelines(folder: Path, text: str) -> None:
    (folder / "model_index.json").write_text(text)
    lost = list(lost_files(folder))
    assert "unet/config.json" in lost
    assert ("model_index.json" in lost) == (text in ("", "[]", "{"))
