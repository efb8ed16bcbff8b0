"""Which configuration a command uses, and what its options change."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.actors.cli.terminal.open_pool import open_pool, output_for, settings_for
from modelpool.actors.cli.terminal.options import DeviceOption, PoolOptions
from modelpool.actors.config.config import CONFIG_NAME, CONFIG_VARIABLE, PoolConfig
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import UserError
from tests.architecture.source_tree import ROOT


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with nothing in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return tmp_path


def config(path: Path, folder: str) -> Path:
    path.write_text(f'[models]\nfolders = ["{folder}"]\n[output]\nfolder = "images"\n')
    return path


def test_a_checkout_serves_its_example_where_nothing_else_is_there() -> None:
    settings = settings_for(PoolOptions())
    assert settings.models.folders == (ROOT / "examples" / "shapes" / "models",)


def test_folders_here_go_before_the_example(empty_folder: Path) -> None:
    (empty_folder / "models").mkdir()
    settings = settings_for(PoolOptions())
    assert settings.models.folders == (empty_folder / "models",)
    assert settings.models.loras == (), "a folder that does not exist is none of the user's"
    (empty_folder / "loras").mkdir()
    assert settings_for(PoolOptions()).models.loras == (empty_folder / "loras",)
    assert settings.pool.vram is None, "the example's small budget is not for one's own models"


def test_a_configuration_here_a_named_one_and_the_option_go_before_folders(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "models").mkdir()
    config(empty_folder / CONFIG_NAME, "/here")
    assert settings_for(PoolOptions()).models.folders == (Path("/here"),)
    monkeypatch.setenv(CONFIG_VARIABLE, str(config(empty_folder / "named.toml", "/named")))
    assert settings_for(PoolOptions()).models.folders == (Path("/named"),)
    given = config(empty_folder / "given.toml", "/given")
    assert settings_for(PoolOptions(config=given)).models.folders == (Path("/given"),)


def test_options_change_single_settings() -> None:
    settings = settings_for(PoolOptions(gpus=3, device=DeviceOption.SIM, vram="48MiB"))
    assert (settings.pool.workers, settings.pool.device, settings.pool.budget_bytes) == (3, "sim", 48 << 20)
    settings = settings_for(PoolOptions(vram_policy=VramPolicy.LOW, reserve_vram="1GiB"))
    assert (settings.pool.policy, settings.pool.reserve_bytes) == (VramPolicy.LOW, 1 << 30)
    with pytest.raises(UserError, match="vram: found 'much', expected a size"):
        settings_for(PoolOptions(vram="much"))
    with pytest.raises(UserError, match="--reserve-vram cannot be combined with --pool"):
        PoolOptions(pool="running", reserve_vram="1GiB")


def test_pickles_are_allowed_by_the_configuration_or_by_the_option(empty_folder: Path) -> None:
    assert not settings_for(PoolOptions()).models.allow_pickle
    assert settings_for(PoolOptions(allow_pickle=True)).models.allow_pickle
    (empty_folder / CONFIG_NAME).write_text("[models]\nallow_pickle = true\n")
    assert settings_for(PoolOptions()).models.allow_pickle, "an option that is not given takes nothing back"
    with pytest.raises(UserError, match="--allow-pickle cannot be combined with --pool"):
        PoolOptions(pool="running", allow_pickle=True)


def test_images_go_where_they_are_told_else_as_configured_else_to_outputs(empty_folder: Path) -> None:
    given = config(empty_folder / "given.toml", "/given")
    assert output_for(PoolOptions(config=given), Path("mine")) == Path("mine")
    assert output_for(PoolOptions(config=given), None) == Path("images")
    assert output_for(PoolOptions(pool="running"), None) == Path("outputs")
    assert output_for(PoolOptions(), None) == Path("outputs"), "the example's images go where the command was run"
    (empty_folder / "models").mkdir()
    assert output_for(PoolOptions(), None) == Path("outputs")


def test_the_imports_start_first_and_end_with_a_pool_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take longer than anything else in a start, so they run next to the imports of the command."""
    order: list[str] = []

    class Recorded:
        def close(self) -> None:
            order.append("closed")

    def start(address: str | None) -> Recorded:
        order.append("imports")
        return Recorded()

    def start_pool(config: PoolConfig, forks: object) -> None:
        order.append("pool" if isinstance(forks, Recorded) else "pool without them")
        raise UserError("as far as this test goes")

    monkeypatch.setattr("modelpool.actors.ray.forks.Forks.start", start)
    monkeypatch.setattr("modelpool.actors.client.opening.start_pool", start_pool)
    with pytest.raises(UserError, match="as far as"):
        open_pool(PoolOptions())
    assert order == ["imports", "pool", "closed"]
