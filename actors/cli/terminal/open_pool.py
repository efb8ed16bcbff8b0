"""Opens a pool for a command: starts one from options and configuration, or joins a running one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.cli.terminal.options import PoolOptions

if TYPE_CHECKING:
    from modelpool.actors.client.client import ModelPool
    from modelpool.actors.client.start_checks import NameCheck
    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.config.output_address import OutputAddress
    from modelpool.actors.control.status_values import PoolStatus

#: used if no configuration is named or found and this folder exists; LoRAs next to it
MODELS_FOLDER = Path("models")
LORAS_FOLDER = Path("loras")
OUTPUT_FOLDER = Path("outputs")


def settings_for(options: PoolOptions) -> PoolConfig:
    """Return the configuration of a pool to start, with options applied. Raises UserError.

    Without --config: the file named by MODELPOOL_CONFIG; modelpool.toml in the working folder; the folders ./models
    and ./loras; models added to the registry; the example model.
    """
    from modelpool.actors.config.config import CONFIG_NAME, CONFIG_VARIABLE, PoolConfig

    named = options.config is not None or bool(os.environ.get(CONFIG_VARIABLE)) or Path(CONFIG_NAME).is_file()
    if named:
        config = PoolConfig.find(options.config)
    elif MODELS_FOLDER.is_dir():
        loras = [LORAS_FOLDER] if LORAS_FOLDER.is_dir() else []
        config = PoolConfig().override(models=[MODELS_FOLDER], loras=loras, output=OUTPUT_FOLDER)
    else:  # the models of the example, but outputs in the working folder
        config = PoolConfig.find().override(output=OUTPUT_FOLDER)
    device = options.device.value if options.device is not None else None
    policy = options.vram_policy.value if options.vram_policy is not None else None
    return config.override(
        workers=options.gpus,
        device=device,
        vram=options.vram,
        vram_policy=policy,
        reserve_vram=options.reserve_vram,
        allow_pickle=options.allow_pickle or None,
    )


def output_for(options: PoolOptions, passed: OutputAddress | None) -> OutputAddress:
    """Return the address of outputs: as passed, else as configured, else ./outputs."""
    if passed is not None:
        return passed
    configured = None if options.pool is not None else settings_for(options).output.folder
    if configured is None:
        return OUTPUT_FOLDER
    if isinstance(configured, str):
        return configured
    here = Path.cwd()
    return configured.relative_to(here) if configured.is_relative_to(here) else configured


def checked_output(options: PoolOptions, out: str | None) -> OutputAddress:
    """Return the address of outputs, which can be written to; `out` is the text of --out. Raises UserError, and
    OutputFailed."""
    from modelpool.actors.config.output_address import output_address
    from modelpool.actors.outputs.output_check import check_outputs

    address = output_for(options, None if out is None else output_address(out, "--out"))
    check_outputs(address)
    return address


def name_check(options: PoolOptions) -> NameCheck:
    """Return the check of names for the pool that `open_pool` returns, which needs neither Ray nor torch. The files of
    checked names are read into the page cache meanwhile. Raises UserError for a configured folder that does not exist.
    """
    from modelpool.actors.client.early_reading import EarlyReading
    from modelpool.actors.client.start_checks import NameCheck, check_device, check_folders, check_named_models

    if options.pool is not None:  # which has its own models
        return NameCheck.of_running_pool()
    settings = settings_for(options)
    check_folders(settings)
    check_device(settings)
    check_named_models(settings)
    return NameCheck.of(settings, EarlyReading().add, _say_slow)


def _say_slow() -> None:
    from modelpool.actors.cli.terminal.screen import say, user_console

    say(user_console(), "checking as the pool would, before it starts (loads torch)", "dim")


def simulates(options: PoolOptions) -> bool:
    """Whether it is certain that the pool that `open_pool` starts has simulated GPUs. Raises UserError."""
    from modelpool.actors.client.start_checks import simulates_gpus

    return options.pool is None and simulates_gpus(settings_for(options))


def ask_status(name: str) -> PoolStatus | None:
    """Return the status of a pool that a process of this machine runs, from that process; None if it cannot say.
    Raises UserError if its controller does not answer.
    """
    from modelpool.actors.cli.terminal.status_socket import asked_status
    from modelpool.actors.ray.run_file import running_pool

    pool = running_pool(name) if ":" not in name else None
    return None if pool is None or not pool.status_socket else asked_status(pool.status_socket)


def open_pool(options: PoolOptions) -> ModelPool:
    """Start a pool that ends with the returned object, or connect to a running one. Raises UserError."""
    if options.pool is not None:
        from modelpool.actors.client.client import ModelPool

        return ModelPool.connect(options.pool)
    from modelpool.actors.client.start_checks import check_device, check_folders, check_named_models
    from modelpool.actors.ray.forks import Forks

    settings = settings_for(options)
    check_folders(settings)
    check_device(settings)
    check_named_models(settings)
    forks = Forks.start(settings.cluster.address)  # imports torch and diffusers while this process imports the client
    try:
        from modelpool.actors.client.client import ModelPool
    except BaseException:
        forks.close()
        raise
    return ModelPool.start_configured(settings, forks)
