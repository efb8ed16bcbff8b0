"""The hashes of a machine's files: computed once, as references name them, and again when a file changes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from modelpool.pool.catalog.registry import node_hashes
from modelpool.pool.catalog.registry.folder_scan import weights_file
from modelpool.pool.catalog.registry.node_hashes import (
    DATABASE_FILE,
    LOCK_FILE,
    HashingStopped,
    NodeHashes,
    file_state,
    members_of,
)
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.catalog.registry.registry_store import RegistryStore
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role

LATER_NS = 60_000_000_000


def later() -> int:
    return time.time_ns() + LATER_NS


def hashes(tmp_path: Path, is_settled: bool = True) -> NodeHashes:
    folder = tmp_path / "machine"
    folder.mkdir(exist_ok=True)
    registry = RegistryStore(tmp_path / "registry")
    return NodeHashes(folder, registry, later if is_settled else time.time_ns)


def written(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read completely."""
    found: list[str] = []
    plain = node_hashes.hash_file

    def hash_file(path, *more):
        found.append(Path(path).name)
        return plain(path, *more)

    monkeypatch.setattr(node_hashes, "hash_file", hash_file)
    return found


def test_every_kind_of_file_has_the_hash_that_a_reference_names(tmp_path: Path) -> None:
    """Single files, shards, folders, and separate files: as the registry hashes them for recipes."""
    single = written(tmp_path / "a.safetensors")
    shards = [written(tmp_path / "s" / f"m-0000{n}-of-00002.safetensors", b"shard %d" % n) for n in (1, 2)]
    index = tmp_path / "s" / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {str(n): path.name for n, path in enumerate(shards)}}))
    folder = tmp_path / "pipeline"
    written(folder / "model_index.json", b'{"_class_name": "X"}')
    written(folder / "unet" / "diffusion_pytorch_model.safetensors", b"unet")
    written(folder / "unet" / "config.json", b"{}")
    registry = Registry(RegistryStore(tmp_path / "other"))
    found = hashes(tmp_path)
    for path in (single, index, folder):
        expected = registry.hashes(weights_file(path)).sha256
        assert found.sha256(FilePart(str(path), Role.VAE)) == expected, path
        assert found.known(FilePart(str(path), Role.VAE)) == expected, path


def test_separate_files_and_configured_loras_have_the_hash_of_all_their_files(tmp_path: Path) -> None:
    unet, vae = written(tmp_path / "u.safetensors", b"unet"), written(tmp_path / "v.safetensors", b"vae")
    assembly = Assembly("two", diffusion_model=str(unet), vae=str(vae))
    part = FilePart(assembly.path, Role.VAE, assembly)
    found = hashes(tmp_path)
    before = found.sha256(part)
    assert set(members_of(part)) == {str(unet), str(vae)}
    vae.write_bytes(b"other")
    assert found.sha256(part) != before
    lora = written(tmp_path / "adapter_model.safetensors", b"lora")
    config = written(tmp_path / "adapter_config.json", b"{}")
    plain = hashlib.sha256(b"lora").hexdigest()
    assert found.sha256(FilePart(str(lora))) == hashlib.sha256(plain.encode() + b"{}").hexdigest()
    assert members_of(FilePart(str(lora))) == (str(lora), str(config))


def test_a_configuration_that_goes_is_an_error_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that verifies the files of a worker ended with another error, and outputs waited for it for ever."""
    lora = written(tmp_path / "adapter_model.safetensors", b"lora")
    written(tmp_path / "adapter_config.json", b"{}")

    def removed_meanwhile(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_bytes", removed_meanwhile)
    found = hashes(tmp_path)
    with pytest.raises(CorruptFile, match=r"adapter_model\.safetensors: its configuration cannot be read"):
        found.sha256(FilePart(str(lora)))
    with pytest.raises(CorruptFile):
        found.known(FilePart(str(lora)))


def test_a_file_is_read_once_for_all_processes_of_the_machine(tmp_path: Path, reads: list[str]) -> None:
    part = FilePart(str(written(tmp_path / "a.safetensors")))
    for _ in range(2):
        hashes(tmp_path).sha256(part)
    assert reads == ["a.safetensors"]


def test_every_change_of_a_file_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    """Other bytes of equal length, with the old time, in place and as another file."""
    path = written(tmp_path / "a.safetensors", b"weights")
    part, found = FilePart(str(path)), hashes(tmp_path)
    known = {found.sha256(part)}
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"in here")
    os.utime(path, ns=times)
    known.add(found.sha256(part))
    other = written(tmp_path / "b.safetensors", b"another")
    os.utime(other, ns=times)
    other.rename(path)
    known.add(hashes(tmp_path).sha256(part))
    assert len(known) == len(reads) == 3


def test_what_changed_a_moment_ago_is_not_remembered_on_the_disk(tmp_path: Path, reads: list[str]) -> None:
    part = FilePart(str(written(tmp_path / "a.safetensors")))
    for _ in range(2):
        hashes(tmp_path, is_settled=False).sha256(part)
    assert len(reads) == 2
    assert not (tmp_path / "machine" / DATABASE_FILE).exists()


def test_what_the_registry_knows_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    path = written(tmp_path / "a.safetensors")
    store = RegistryStore(tmp_path / "registry")
    expected = Registry(store, now_ns=later).hashes(weights_file(path)).sha256
    assert hashes(tmp_path).known(FilePart(str(path))) == expected
    assert not reads


def test_one_process_hashes_at_a_time_and_others_can_stop_waiting(tmp_path: Path, reads: list[str]) -> None:
    import fcntl

    part, found = FilePart(str(written(tmp_path / "a.safetensors"))), hashes(tmp_path)
    with (tmp_path / "machine" / LOCK_FILE).open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with pytest.raises(HashingStopped):
            found.sha256(part, lambda: True)
    assert not reads
    assert found.sha256(part) == hashlib.sha256(b"weights").hexdigest()


def test_without_usable_databases_files_are_hashed_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / DATABASE_FILE).mkdir()
    part = FilePart(str(written(tmp_path / "a.safetensors")))
    found = NodeHashes(folder, RegistryStore(tmp_path / "registry"), later)
    assert found.sha256(part) == hashlib.sha256(b"weights").hexdigest()
    assert "hashes of files are not remembered" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for ask in (hashes(tmp_path).sha256, hashes(tmp_path).known, members_of):
        with pytest.raises(CorruptFile, match=r"gone\.safetensors"):
            ask(FilePart(str(tmp_path / "gone.safetensors")))
    with pytest.raises(CorruptFile, match="gone"):
        file_state(tmp_path / "gone")
