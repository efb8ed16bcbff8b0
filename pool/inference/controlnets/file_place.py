"""Properties of a ControlNet that follow from the location of its file: its name, and the configuration next to it.

Knows no tensors. Equal files may have other names and other configurations next to them, so these properties belong to
the requested file and are never taken from a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.values.core.errors import CorruptFile

#: weights of a diffusers folder, and the configuration next to them
_FOLDER_WEIGHTS, _FOLDER_CONFIG = "diffusion_pytorch_model", "config.json"
#: folder names in the cache of a model hub
_REVISIONS, _REPOSITORY = "snapshots", "models--"
#: settings that are read from a configuration: those that shapes do not determine
CONFIG_SETTINGS = frozenset({"force_zeros_for_pooled_projection"})


def settings_beside(path: Path, config: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Return the settings, by name, in which the configuration in the diffusers folder of the file at `path` differs
    from `config`, the arguments that follow from shapes. It is read only if the class has such settings, and only those
    count. Raises CorruptFile for invalid JSON or a setting that is not a boolean."""
    names, place = sorted(CONFIG_SETTINGS & config.keys()), path.parent / _FOLDER_CONFIG
    if not names or not path.name.startswith(_FOLDER_WEIGHTS) or not place.is_file():
        return ()
    try:
        settings = read_object(read_text_file(place, "the configuration of a ControlNet"))
    except BadJson as error:
        raise CorruptFile(f"{place}: {error}") from None
    for name in names:
        if not isinstance(settings.get(name, False), bool):
            raise CorruptFile(f"{place}: {name}: found {str(settings[name])[:80]!r}, expected true or false")
    return tuple((name, settings[name]) for name in names if name in settings and settings[name] != config[name])


def is_named(path: Path, word: str) -> bool:
    """Whether the name of the file, or of its folder if the file name is generic, contains `word`."""
    return word in _own_name(path).lower()


def _own_name(path: Path) -> str:
    """Return the name of a ControlNet: that of its file, or of its folder; in the cache of a hub, whose folders are
    named by revision, the repository (`models--OWNER--NAME/snapshots/REVISION`)."""
    if not path.name.startswith(_FOLDER_WEIGHTS):
        return path.name
    folder = path.parent
    is_revision = folder.parent.name == _REVISIONS and folder.parent.parent.name.startswith(_REPOSITORY)
    return folder.parent.parent.name if is_revision else folder.name
