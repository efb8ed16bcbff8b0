"""Fixtures for tests on clusters of several nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.ray.local_cluster import SHAPES, new_folder


@pytest.fixture
def weights() -> Iterator[Path]:
    """A copy of the example's models, which nodes may lack."""
    folder = new_folder()
    shutil.copytree(SHAPES / "models", folder / "models")
    yield folder / "models"
    shutil.rmtree(folder)
