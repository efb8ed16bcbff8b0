"""Values in the configurations of diffusers folders, which are untrusted. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from modelpool.pool.files.formats.strict_json import brief, finite_number
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

FolderConfig: TypeAlias = Mapping[str, Any]


def number_in(folder: str, config: FolderConfig, key: str, default: float) -> float:
    """Return the number `key` in the configuration of `folder`; `default` if it is missing. Raises
    UnknownArchitecture."""
    value = config.get(key)
    if value is None:
        return default
    number = finite_number(value)
    if number is None:
        raise wrong_value(folder, key, value, "a number")
    return number


def latent_statistics(folder: str, config: FolderConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel of a latent in the configuration of a VAE; two empty tuples if they are
    missing. Raises UnknownArchitecture."""
    means, deviations = (_numbers(folder, config, key, channels) for key in ("latents_mean", "latents_std"))
    if bool(means) != bool(deviations) or any(number <= 0 for number in deviations):
        expected = "both, deviations above 0, or neither"
        raise wrong_value(folder, "latents_mean and latents_std", (means, deviations), expected)
    return means, deviations


def _numbers(folder: str, config: FolderConfig, key: str, count: int) -> tuple[float, ...]:
    """Return the numbers of a list, one for each channel of a latent; empty if it is missing."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != count:
        raise wrong_value(folder, key, value, f"a number for each of {counted(count, 'channel')}")
    return tuple(number_in(folder, {key: each}, key, 0.0) for each in value)


def wrong_value(folder: str, key: str, found: object, expected: str) -> UnknownArchitecture:
    """Return the error for a value of `key` in the configuration of `folder`."""
    return UnknownArchitecture(
        f"configuration of {folder}: {key.lstrip('_')}: found {brief(found)}, expected {expected}"
    )
