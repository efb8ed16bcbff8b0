"""Models of a source: described by their outlines as the complete files are, and rendered to equal pixels."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry.outline import describing_ranges
from modelpool.pool.catalog.registry.remote_models import LISTED_SECONDS, RemoteModels
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.fetch_errors import SourceFailed
from modelpool.pool.files.fetch.node_files import NodeFiles
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.core.stage_params import (
    EncodeParams,
    GuidanceParams,
    OutputShape,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.specs.spec import Role
from tests.architecture.source_tree import ROOT
from tests.pool.files.fetch.range_server import RangeServer, serving
from tests.pool.files.formats.gguf_files import write_gguf
from tests.pool.models.loading.test_diffusers_folders import both
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, open_engine
from tests.pool.separate import Painter, write_atomically

SHAPES = ROOT / "examples" / "shapes"


def sums(folder: Path) -> None:
    """Publish the hashes of all files of a folder, as `sha256sum` does."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with a single file, a diffusers folder, a LoRA, and a file with numbers that describe it."""
    folder = tmp_path_factory.mktemp("source") / "models"
    folder.mkdir()
    file, _ = both(folder / "sd1")
    os.rename(file, folder / "sd1" / "paint.safetensors")
    os.rename(folder / "sd1" / "folder", folder / "painted")
    velocity = write_atomically(folder / "velocity.safetensors", "tiny_sd2")
    tensors = load_file(velocity)
    key = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    if key in tensors:
        tensors[key] = torch.linspace(-1, 1, tensors[key].numel()).to(tensors[key].dtype)
    save_file(tensors, velocity)
    (folder / "loras").mkdir()
    write_tiny_lora(folder / "loras" / "bright.safetensors")
    sums(folder)
    return folder


@pytest.fixture
def server(models: Path) -> Iterator[RangeServer]:
    with serving(models) as running:
        yield running


def remote_catalog(url: str, cache: Path, nodes: NodeFiles | None = None) -> Catalog:
    nodes = nodes or NodeFiles(CacheSettings(cache))
    return Catalog((), (), "cpu", cache.parent / "registry", remote=RemoteModels([url], nodes))


def test_a_source_is_described_as_the_complete_files_are(tmp_path: Path, models: Path, server: RangeServer) -> None:
    remote = remote_catalog(server.url, tmp_path / "cache")
    local = Catalog([models], [models / "loras"], "cpu", tmp_path / "other")
    assert [replace(m, path="") for m in remote.models()] == [replace(m, path="") for m in local.models()]
    assert [(r.name, r.modules, r.problem) for r in remote.loras()] == [
        (r.name, r.modules, r.problem) for r in local.loras()
    ]
    sizes = {path.relative_to(models).as_posix(): path.stat().st_size for path in models.rglob("*.safetensors")}
    for name in ("paint", "painted", "velocity"):
        there, here = remote.find_model(name), local.find_model(name)
        assert (there.name, there.sha256) == (here.name, here.sha256)
        assert remote.model_defaults(there) == local.model_defaults(here)
        specs, wanted = remote.components(there), local.components(here)
        size = sum(file.size_bytes for file in there.files)
        assert {(bool(spec.fetch_key), spec.fetch_bytes) for spec in specs.values()} == {(True, size)}
        assert {role: replace(spec, key="", fetch_key="", fetch_bytes=0) for role, spec in specs.items()} == {  # type: ignore[arg-type]
            role: replace(spec, key="")
            for role, spec in wanted.items()  # type: ignore[arg-type]
        }
        text = "a (red:1.3) circle, " * 10
        assert remote.text_tokens(there, text) == local.text_tokens(here, text)
        work = SampleParams(
            there, (), OutputShape(64, 64), SamplingSchedule(2, "euler", "normal"), GuidanceParams(4.0), 1
        )
        assert remote.execution_modes(there, work) == local.execution_modes(here, replace(work, model=here))
    for name, size in sizes.items():
        if "loras" not in name and size > 4 << 20:
            assert server.sent_bytes(name) < size / 2, f"{name} was described from its outline"
    there_use = remote.use(remote.find_model("paint"), Role.DIFFUSION_MODEL, (remote.find_lora("bright", 0.5),))
    here_use = local.use(local.find_model("paint"), Role.DIFFUSION_MODEL, (local.find_lora("bright", 0.5),))
    assert replace(there_use, component="") == replace(here_use, component="")  # type: ignore[arg-type]


class FetchingPainter(Painter):
    """Brings the files of a run first, as a worker does."""

    nodes: NodeFiles

    def image(self, name: str, loras: dict[str, float] | None = None, seed: int = 7) -> np.ndarray:  # type: ignore[override]
        refs = [self.catalog.find_model(name), *(self.catalog.find_lora(lora, 1.0) for lora in loras or {})]
        for ref in refs:
            assert ref.files
            brought = self.nodes.bring(ref.files)
            assert brought is not None
            assert Path(ref.path).is_relative_to(brought.folder)
        return super().image(name, loras, seed)


def test_fetched_models_make_the_images_of_the_complete_files(
    tmp_path: Path, models: Path, server: RangeServer
) -> None:
    engine = open_engine("sim", PLENTY_BYTES)
    other = open_engine("sim", PLENTY_BYTES)
    try:
        local = Painter(other, Catalog([models], [models / "loras"], "cpu", tmp_path / "other"))
        remote = FetchingPainter(engine, remote_catalog(server.url, tmp_path / "controller" / "cache"))
        remote.nodes = NodeFiles(CacheSettings(tmp_path / "controller" / "cache"))
        for name, loras in (("paint", {}), ("painted", {}), ("paint", {"bright": 0.8})):
            assert np.array_equal(remote.image(name, loras), local.image(name, loras)), (name, loras)
        assert server.sent_bytes("sd1/paint.safetensors") < 1.5 * (models / "sd1" / "paint.safetensors").stat().st_size
    finally:
        engine.close()
        other.close()


def test_the_path_of_a_model_is_the_same_on_every_node(tmp_path: Path, server: RangeServer) -> None:
    catalogs = [remote_catalog(server.url, tmp_path / "cache") for _ in range(2)]
    first, second = (catalog.find_model("painted") for catalog in catalogs)
    assert first.path == second.path
    assert first.files == second.files
    assert {Path(file.path).name for file in first.files} >= {"model_index.json", "config.json"}
    assert not Path(first.path).exists(), "nothing was fetched to describe it"


def test_a_file_without_a_published_hash_is_fetched_once_to_hash_it(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    path = write_atomically(folder / "paint.safetensors", "tiny_sd1")
    with serving(folder) as server:
        for _ in range(2):
            model = remote_catalog(server.url, tmp_path / "cache").find_model("paint")
            assert model.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
            assert path.stat().st_size < server.sent_bytes() < 2 * path.stat().st_size


def test_a_file_that_is_replaced_at_the_source_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    write_atomically(folder / "paint.safetensors", "tiny_sd1")
    sums(folder)
    now = [0.0]
    with serving(folder) as server:
        nodes = NodeFiles(CacheSettings(tmp_path / "cache"))
        remote = RemoteModels([server.url], nodes, clock=lambda: now[0])
        catalog = Catalog((), (), "cpu", tmp_path / "registry", remote=remote)
        before = catalog.find_model("paint")
        write_atomically(folder / "paint.safetensors", "tiny_sd1", seed=1)
        (folder / "SHA256SUMS").unlink()
        sums(folder)
        write_atomically(folder / "more.safetensors", "tiny_sd2")
        assert catalog.find_model("paint") == before
        now[0] += LISTED_SECONDS + 1
        after = catalog.find_model("paint")
        assert after.sha256 == hashlib.sha256((folder / "paint.safetensors").read_bytes()).hexdigest()
        assert after.path != before.path
        with pytest.raises(SourceFailed, match=r"paint\.safetensors: was replaced since it was listed"):
            nodes.bring(before.files)
        (folder / "paint.safetensors").unlink()
        now[0] += LISTED_SECONDS + 1
        with pytest.raises(UnknownName):
            catalog.find_model("paint")


def test_a_source_that_cannot_be_reached_is_told_at_the_start_and_survived_later(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    write_atomically(folder / "paint.safetensors", "tiny_sd1")
    sums(folder)
    now = [0.0]
    with serving(folder) as server:
        url = server.url
        remote = RemoteModels([url], NodeFiles(CacheSettings(tmp_path / "cache")), clock=lambda: now[0])
        catalog = Catalog((), (), "cpu", tmp_path / "registry", remote=remote)
        model = catalog.find_model("paint")
    now[0] += LISTED_SECONDS + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelpool.pool.files.fetch.http_source.FIRST_PAUSE_SECONDS", 0.0)
        with pytest.warns(RuntimeWarning, match="using the list of an earlier time"):
            assert catalog.find_model("paint") == model
        # another process, with the list that is in the cache
        again = RemoteModels([url], NodeFiles(CacheSettings(tmp_path / "cache")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Catalog((), (), "cpu", tmp_path / "registry", remote=again).find_model("paint") == model
        never = RemoteModels([url], NodeFiles(CacheSettings(tmp_path / "empty")))
        with pytest.raises(SourceFailed, match=r"cannot be reached, after 6 tries"):
            Catalog((), (), "cpu", tmp_path / "registry", remote=never).models()


def test_the_outline_of_a_gguf_file_has_its_header(tmp_path: Path) -> None:
    """GGUF headers have no length, and vocabularies make them long."""
    folder = tmp_path / "source"
    folder.mkdir()
    words = [f"word {i} of a long vocabulary" for i in range(40_000)]
    tensors = {"token_embd.weight": torch.ones(1024, 512, dtype=torch.float16)}
    write_gguf(folder / "encoder.gguf", tensors, architecture="t5", entries={"tokenizer.ggml.tokens": words})
    from modelpool.pool.files.formats.weights_file import read_single_header

    with serving(folder) as server:
        remote = RemoteModels([server.url], NodeFiles(CacheSettings(tmp_path / "cache")))
        outline = remote.folders()[0] / "encoder.gguf"
        found, whole = read_single_header(str(outline)), read_single_header(str(folder / "encoder.gguf"))
        assert (found.tensors, found.metadata, found.file_bytes) == (whole.tensors, whole.metadata, whole.file_bytes)
        begin = min(entry.begin for entry in whole.tensors.values())
        assert begin > 1 << 20
        assert outline.read_bytes()[:begin] == (folder / "encoder.gguf").read_bytes()[:begin]
        assert server.sent_bytes() < whole.file_bytes + begin


def test_an_outline_has_what_describes_a_model(tmp_path: Path) -> None:
    """Markers, factors, ranges of noise and tokenizers; of adapters nothing: they are fetched."""
    tensors = {
        "a.weight": torch.zeros(1024, 1024),
        "a.scale_weight": torch.tensor(2.0),
        "a.comfy_quant": torch.arange(80, dtype=torch.uint8),
        "edm_mean": torch.ones(1, 64, 1, 1),
        "spiece_model": torch.zeros(5000, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    from modelpool.pool.files.formats.weights_file import read_single_header

    header = read_single_header(str(tmp_path / "a.safetensors"))
    ranges = describing_ranges(header)
    for name, entry in header.tensors.items():
        inside = any(begin <= entry.begin and entry.end <= end for begin, end in ranges)
        assert inside == (name != "a.weight"), name
    lora = write_tiny_lora(tmp_path / "b.safetensors")
    assert describing_ranges(read_single_header(str(lora))) == ()


def test_encoding_uses_files_that_are_no_part_of_identity() -> None:
    """A model of a source is the same work as its local copy."""
    from modelpool.pool.values.core.refs import ModelRef
    from modelpool.pool.values.core.remote_file import RemoteFile
    from modelpool.pool.values.core.stage_params import task_id

    local = ModelRef("a", "/models/a", "ab" * 32)
    remote = replace(local, path="/cache/views/1/a", files=(RemoteFile("a", "s3://b/a", 5, "", "ab" * 32),))
    assert task_id(EncodeParams(local, (), "x"), ()) == task_id(EncodeParams(remote, (), "x"), ())
