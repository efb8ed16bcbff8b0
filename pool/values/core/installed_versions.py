"""The installed versions of the packages that the pixels of an output depend on. Torch-free: imports none of them."""

from __future__ import annotations

import importlib.metadata

#: packages with code that computes pixels
IMAGE_PACKAGES = ("modelpool", "torch", "diffusers", "transformers")


def installed_versions() -> dict[str, str]:
    """Return the version of each of `IMAGE_PACKAGES`, without those that are not installed as a distribution."""
    found = {}
    for name in IMAGE_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
