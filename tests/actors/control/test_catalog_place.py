"""The node of the catalog: one that has the files, wherever the controller is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool import PoolConfig
from modelpool.actors.config.config import ModelsSection
from modelpool.actors.control.catalog_place import added_paths, existing, nodes_for_catalog, paths_of
from modelpool.pool.catalog.registry.registry_store import RegistryStore
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import NodeId

HEAD, DRIVER, A, B = (NodeId(name) for name in ("head", "driver", "a", "b"))
NAMES = {HEAD: "the-head", DRIVER: "laptop", A: "gpu-a", B: "gpu-b"}
MODELS, LORAS, NOWHERE = Path("/models"), Path("/loras"), Path("/nowhere")
PATHS = (MODELS, LORAS, NOWHERE)


def chosen(found: Mapping[NodeId, set[Path]]) -> tuple[NodeId, ...]:
    return nodes_for_catalog(PATHS, found, (HEAD, DRIVER), NAMES)


def test_the_controllers_node_is_first_then_the_drivers_then_any_that_has_the_files() -> None:
    both = {MODELS, LORAS}
    assert chosen({HEAD: both, DRIVER: both, A: both}) == (HEAD, DRIVER, A)
    assert chosen({HEAD: set(), DRIVER: both, B: both, A: both}) == (DRIVER, A, B)
    assert chosen({HEAD: {MODELS}, DRIVER: {LORAS}, B: both}) == (B,)


def test_missing_files_are_reported_with_the_nodes_that_were_asked() -> None:
    with pytest.raises(
        UserError, match=r"/models, /loras, /nowhere: found on none of the 2 nodes \(laptop, the-head\)"
    ):
        chosen({HEAD: set(), DRIVER: set()})
    with pytest.raises(UserError, match=r"no node has all files: /models is on gpu-a; /loras is on laptop"):
        chosen({HEAD: set(), DRIVER: {LORAS}, A: {MODELS}})


@given(st.dictionaries(st.sampled_from([HEAD, DRIVER, A, B]), st.sets(st.sampled_from(PATHS)), min_size=1))
def test_every_chosen_node_has_every_file_that_any_node_has(found: dict[NodeId, set[Path]]) -> None:
    somewhere = set().union(*found.values())
    complete = {node for node, paths in found.items() if paths >= somewhere}
    if somewhere and complete:
        assert set(chosen(found)) == complete
    else:
        with pytest.raises(UserError):
            chosen(found)


def test_added_models_are_those_of_the_registry(tmp_path: Path) -> None:
    models = ModelsSection(registry=tmp_path / "registry")
    assert added_paths(models) == ()
    RegistryStore(tmp_path / "registry").add_location(tmp_path / "a.safetensors")
    assert added_paths(models) == (tmp_path / "a.safetensors",)


def test_empty_folders_do_not_count(tmp_path: Path) -> None:
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "full" / "a.safetensors"
    full.mkdir()
    empty.mkdir()
    file.touch()
    assert existing([full, empty, file, tmp_path / "missing"]) == {full, file}


def test_folders_and_separate_files_are_needed(tmp_path: Path) -> None:
    (tmp_path / "modelpool.toml").write_text(
        '[models]\nfolders = ["m"]\nloras = ["l"]\n'
        '[models.flux]\ndiffusion_model = "f/dit.gguf"\nvae = "f/vae.safetensors"\n'
    )
    paths = paths_of(PoolConfig.load(tmp_path / "modelpool.toml").models)
    assert [str(path.relative_to(tmp_path)) for path in paths] == ["m", "l", "f/dit.gguf", "f/vae.safetensors"]
