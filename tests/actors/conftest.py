"""One Ray for all tests of a process that need one: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelpool.actors.ray.ray_session import RaySession, open_session

#: the most workers that the pools of one test module have together
WORKERS = 4


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory) -> Iterator[RaySession]:
    """A local Ray that pools of this process join by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("state")))
        session = open_session(None, "modelpool", WORKERS)
        yield session
        session.close()
