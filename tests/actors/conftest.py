"""One Ray for all tests of a process that need one, and one fork server for all pools: starting them takes longer than
most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelpool.actors.ray import small_ray
from modelpool.actors.ray.fork_server import ENGINE_MODULES, SERVER_VARIABLE, ForkServer, fork_command
from modelpool.actors.ray.ray_session import RaySession, open_session, short_folder

#: the most workers that the pools of one test module have together
WORKERS = 4


@pytest.fixture(scope="session", autouse=True)
def _forks(request: pytest.FixtureRequest) -> Iterator[ForkServer | None]:
    """Pools that tests start use one fork server, except where a test removes the variable."""
    wanted = any(item.get_closest_marker("ray") for item in request.session.items)
    server = ForkServer.start(ENGINE_MODULES, short_folder()) if wanted else None
    if server is None:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVER_VARIABLE, str(server.socket))
        yield server
    server.close()


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory, _forks: ForkServer | None) -> Iterator[RaySession]:
    """A local Ray that pools of this process join by themselves. Its workers are forks, as in a Ray that is started for
    one pool: each that imports everything takes two seconds of a processor. Workers of a Ray that starts Python are
    tested in `tests/actors/ray/test_ray_session.py` and on clusters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setattr(small_ray, "ENVIRONMENT_AGENT_SECONDS", 0.0)  # actors with environments need it at once
        command = () if _forks is None else fork_command(_forks.socket)
        session = open_session(None, "modelpool", WORKERS, worker_python=command, exports=False)
        yield session
        session.close()
