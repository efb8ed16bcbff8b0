"""What is known of a ControlNet from where its file lies: from its name, and from the configuration in its folder.

Knows no tensors. Equal files may lie under other names and beside other configurations, so what is found here belongs
to the file that was asked for, and is never taken from a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.formats.regular_file import read_text_file
from modelpool.pool.formats.strict_json import BadJson, read_object

#: what the weights of a folder of diffusers are called, and what lies beside them there
_FOLDER_WEIGHTS, _FOLDER_CONFIG = "diffusion_pytorch_model", "config.json"
#: what a cache of a hub calls its folders
_REVISIONS, _REPOSITORY = "snapshots", "models--"
#: what of a configuration beside a file counts: what no shape tells
SAID_ALONE = frozenset({"force_zeros_for_pooled_projection"})


def said_beside(path: Path, config: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """What the configuration in the folder of diffusers that the file at `path` lies in says otherwise than `config`,
    the arguments that shapes tell, by name. It is read only where the class takes what it alone can tell, and nothing
    else of it counts. Raises CorruptFile for one that is no JSON or says no yes or no."""
    names, place = sorted(SAID_ALONE & config.keys()), path.parent / _FOLDER_CONFIG
    if not names or not path.name.startswith(_FOLDER_WEIGHTS) or not place.is_file():
        return ()
    try:
        said = read_object(read_text_file(place, "the configuration of a ControlNet"))
    except BadJson as error:
        raise CorruptFile(f"{place}: {error}") from None
    for name in names:
        if not isinstance(said.get(name, False), bool):
            raise CorruptFile(f"{place}: {name}: found {str(said[name])[:80]!r}, expected true or false")
    return tuple((name, said[name]) for name in names if name in said and said[name] != config[name])


def is_named(path: Path, word: str) -> bool:
    """Whether the name of the file, or of its folder where all files are called alike, has `word` in it."""
    return word in _own_name(path).lower()


def _own_name(path: Path) -> str:
    """What a ControlNet is called: its file, or its folder; in a cache of a hub, where folders go by their revision,
    the repository (`models--OWNER--NAME/snapshots/REVISION`)."""
    if not path.name.startswith(_FOLDER_WEIGHTS):
        return path.name
    folder = path.parent
    is_revision = folder.parent.name == _REVISIONS and folder.parent.parent.name.startswith(_REPOSITORY)
    return folder.parent.parent.name if is_revision else folder.name
