"""Opens the registry of files of weights that a pool started here would use, for the commands about files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.cli.terminal.options import PoolOptions

if TYPE_CHECKING:
    from modelpool.actors.config.config import ModelsSection
    from modelpool.pool.catalog.registry.registry import Registry


def model_settings(config: Path | None, allow_pickle: bool = False) -> ModelsSection:
    """Return the section [models] of the configuration. Raises UserError."""
    from modelpool.actors.cli.terminal.open_pool import settings_for

    return settings_for(PoolOptions(config=config, allow_pickle=allow_pickle)).models


def opened_registry(config: Path | None, allow_pickle: bool = False) -> Registry:
    """Open the registry that a pool started here would use. Raises UserError."""
    from modelpool.pool.catalog.registry.registry import open_registry
    from modelpool.pool.catalog.registry.remote_models import open_remote

    models = model_settings(config, allow_pickle)
    return open_registry(
        models.folders,
        models.loras,
        models.registry,
        allow_pickle=models.allow_pickle,
        assemblies=models.assemblies,
        remote=open_remote(models.sources, models.cache_settings),
    )
