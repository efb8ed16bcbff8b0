"""One Ray for all tests of a process that need one, and one fork server for all pools: starting them takes longer than
most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelpool.actors.ray.fork_server import ENGINE_MODULES, SERVER_VARIABLE, ForkServer
from modelpool.actors.ray.ray_session import RaySession, open_session, short_folder

#: the most workers that the pools of one test module have together
WORKERS = 4


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory) -> Iterator[RaySession]:
    """A local Ray that pools of this process join by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        session = open_session(None, "modelpool", WORKERS)
        yield session
        session.close()


@pytest.fixture(scope="session", autouse=True)
def _forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pools that tests start use one fork server, except where a test removes the variable."""
    wanted = any(item.get_closest_marker("ray") for item in request.session.items)
    server = ForkServer.start(ENGINE_MODULES, short_folder()) if wanted else None
    if server is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVER_VARIABLE, str(server.socket))
        yield
    server.close()
