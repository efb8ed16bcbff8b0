"""`StoreAccess`: what a process needs of another one's settings to reach the same object stores: variables, and
fsspec's configuration.

It may contain passwords: it is passed to processes directly, and is printed nowhere.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: beginnings of the names of variables that the libraries of stores read
_PREFIXES = ("AWS_", "S3_", "FSSPEC_", "GOOGLE_", "GCLOUD_", "GCS_", "GCSFS_", "CLOUDSDK_", "AZURE_", "HF_", "OSS_")
_NAMES = frozenset({"BOTO_CONFIG", "STORAGE_EMULATOR_HOST", "HUGGING_FACE_HUB_TOKEN"})
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"})


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How a process reaches object stores.

    variables  of its environment
    settings   fsspec's configuration: the default options of each scheme
    """

    variables: Mapping[str, str] = field(repr=False)
    settings: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @classmethod
    def of_this_process(cls) -> StoreAccess:
        """Return the settings of this process, as far as they can be passed on."""
        variables = {name: value for name, value in os.environ.items() if _is_of_stores(name)}
        config = sys.modules.get("fsspec.config")
        settings = {} if config is None else {scheme: dict(options) for scheme, options in config.conf.items()}
        return cls(variables, {scheme: options for scheme, options in settings.items() if _can_travel(options)})

    def apply(self, instead_of: StoreAccess | None = None) -> None:
        """Have this process reach them in the same way, from the next file system on that it opens: fsspec keeps those
        that it has opened, with the credentials of that time, and forgets them if anything changes. What was applied
        before, `instead_of` this, is removed: a token belongs to its key."""
        earlier = StoreAccess({}, {}) if instead_of is None else instead_of
        changed = any(os.environ.get(name) != value for name, value in self.variables.items())
        for name in earlier.variables.keys() - self.variables.keys():
            changed = os.environ.pop(name, None) is not None or changed
        os.environ.update(self.variables)
        if self.settings or earlier.settings:
            conf = importlib.import_module("fsspec.config").conf
            for scheme in self.settings.keys() | earlier.settings.keys():
                before, options = conf.get(scheme, {}), self.settings.get(scheme, {})
                gone = earlier.settings.get(scheme, {}).keys() - options.keys()
                conf[scheme] = {name: value for name, value in before.items() if name not in gone} | dict(options)
                changed = changed or conf[scheme] != before
        if changed and (registry := sys.modules.get("fsspec.registry")) is not None:
            for library in tuple(registry.registry.values()):  # other threads may open the first file system of a kind
                library.clear_instance_cache()


def _is_of_stores(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES or name.upper() in _PROXIES


def _can_travel(options: Mapping[str, Any]) -> bool:
    try:
        pickle.dumps(options)
    except Exception:  # an option may be any object
        return False
    return True
