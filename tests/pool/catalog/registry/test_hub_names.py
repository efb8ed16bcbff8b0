"""Names of the Hugging Face hub mean the files that the hub's cache on this machine has; nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub.constants
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry.hub_names import HubName, hub_name
from modelpool.pool.values.core.errors import AmbiguousName, UnknownName
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.adapter_config import config_beside
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora

FIRST, SECOND = "1" * 40, "2" * 40


def cache(folder: Path, repository: str, commit: str, files: Mapping[str, bytes], refs: tuple[str, ...]) -> None:
    """Write files of one commit as the hub's cache keeps them: links into a folder of contents."""
    place = folder / f"models--{repository.replace('/', '--')}"
    for name, content in files.items():
        blob = place / "blobs" / hashlib.sha256(content).hexdigest()
        link = place / "snapshots" / commit / name
        for parent in (blob.parent, link.parent, place / "refs"):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    for ref in refs:
        (place / "refs" / ref).write_text(commit)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, hub = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("hub")
    model, other = (write_tiny_checkpoint(made / f"{n}.safetensors", n).read_bytes() for n in (1, 2))
    lora = write_tiny_lora(made / "lora.safetensors", 3).read_bytes()
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}).encode()
    cache(hub, "someone/toy", FIRST, {"toy.safetensors": model}, ())
    cache(hub, "someone/toy", SECOND, {"toy.safetensors": other}, ("main",))
    cache(
        hub, "someone/light-lora", FIRST, {"adapter_model.safetensors": lora, "adapter_config.json": config}, ("main",)
    )
    cache(
        hub, "someone/two", FIRST, {"a.safetensors": lora, "sub/b.safetensors": lora, "c.safetensors": lora}, ("main",)
    )
    return hub


@pytest.fixture
def catalog(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Catalog([tmp_path], [tmp_path], "cpu", tmp_path / "registry")


def test_a_model_and_a_lora_have_their_names_on_the_hub(catalog: Catalog) -> None:
    model, lora = catalog.find_model("someone/toy"), catalog.find_lora("someone/light-lora", 0.5)
    assert model.name == f"someone/toy/toy.safetensors@{SECOND}"
    assert lora.name == f"someone/light-lora/adapter_model.safetensors@{FIRST}"
    assert catalog.find_lora(lora.name, 0.5) == lora
    assert catalog.find_model(model.name) == model
    assert catalog.touches(model, Role.DIFFUSION_MODEL, lora)
    assert config_beside(Path(lora.path)) is not None, "the configuration of PEFT is found where the file is read"


def test_a_revision_is_a_commit_of_the_repository(catalog: Catalog) -> None:
    newest, first = catalog.find_model("someone/toy"), catalog.find_model(f"someone/toy@{FIRST}")
    assert newest.sha256 == catalog.find_model("someone/toy@main").sha256 != first.sha256


def test_the_name_in_a_recipe_means_the_same_weights_after_the_branch_has_moved(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the request named the commit or a branch: what `verify`, `repair` and `--like` look up is the commit."""
    copy = tmp_path / "hub"
    shutil.copytree(hub, copy, symlinks=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(copy))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    catalog = Catalog([], [], "cpu", tmp_path / "registry")
    pinned, newest = catalog.find_model(f"someone/toy@{FIRST}"), catalog.find_model("someone/toy")
    assert pinned.name == f"someone/toy/toy.safetensors@{FIRST}"
    (copy / "models--someone--toy" / "refs" / "main").write_text(FIRST)
    later = Catalog([], [], "cpu", tmp_path / "registry")
    assert later.find_model("someone/toy").sha256 == pinned.sha256
    assert [later.find_model(each.name).sha256 for each in (pinned, newest)] == [pinned.sha256, newest.sha256]


def test_a_repository_with_several_files_needs_the_name_of_one(catalog: Catalog) -> None:
    with pytest.raises(AmbiguousName, match=r"name one of them: someone/two/a\.safetensors, someone/two/c"):
        catalog.find_lora("someone/two", 1.0)
    assert catalog.find_lora("someone/two/sub/b.safetensors", 1.0).name == f"someone/two/sub/b.safetensors@{FIRST}"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("someone/missing", "modelpool models get someone/missing"),
        ("someone/toy@fp16", "modelpool models get someone/toy@fp16"),
        ("someone/toy/x.safetensors", "hf download someone/toy x.safetensors"),
    ],
)
def test_what_is_not_cached_names_the_command_that_downloads_it(catalog: Catalog, name: str, command: str) -> None:
    with pytest.raises(UnknownName, match=command):
        catalog.find_model(name)


def test_names_and_paths_of_the_hub() -> None:
    assert HubName.parse("a/b/c/d.safetensors@v1") == HubName("a/b", "c/d.safetensors", "v1")
    assert [HubName.parse(text) for text in ("light", "/weights/a", "../a", "a/b/../../c")] == [None] * 4
    snapshot = Path(f"/hub/models--org--name/snapshots/{FIRST}")
    assert [hub_name(path) for path in (snapshot, snapshot / "a" / "b.gguf", Path("/models/a"))] == [
        f"org/name@{FIRST}", f"org/name/a/b.gguf@{FIRST}", None,
    ]  # fmt: skip
