"""Has Ray start fewer processes where it is started for one pool, and workers directly as forks.

`ray.init` starts an autoscaler, a dashboard, a log monitor and two agents, which take 3 s of CPU time on the cores that
the pool needs for its own start, and 400 MB of memory. A pool on one machine uses none of them. No option of `ray.init`
leaves them out: all private names of Ray that this needs are here. Where Ray has other names, it starts as usual.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from modelpool.actors.ray import agent_stand_in

#: time after which the agent for runtime environments starts, which only a program's own tasks and actors may need if
#: workers are forks without one
ENVIRONMENT_AGENT_SECONDS = 10.0
_RAYLET = "raylet"
_WORKER_OPTION = "--python_worker_command="
_EXPORT_AGENT_OPTION, _ENVIRONMENT_AGENT_OPTION = "--dashboard_agent_command=", "--runtime_env_agent_command="


class SmallRay:
    """The changes that `fewer_processes` has made.

    workers_fork  whether workers are started by the command that was passed for them
    """

    def __init__(self) -> None:
        self.workers_fork = False


@contextlib.contextmanager
def fewer_processes(worker_python: Sequence[str] = (), exports: bool = False) -> Iterator[SmallRay]:
    """Have a `ray.init` that starts a Ray omit the processes that a pool does not use, and start workers that have no
    runtime environment by `worker_python` and their script; by Python if that is empty. `exports` keeps the agent that
    exports metrics. Imports ray.
    """
    import ray._private.node as node
    import ray._private.parameter as parameter
    import ray._private.services as services

    found = SmallRay()
    if sys.platform == "win32":  # another way to quote commands
        yield found
        return
    start: Callable[..., Any] = services.start_ray_process
    params: Callable[..., Any] = parameter.RayParams

    def start_process(command: list[str], process_type: str, *rest: Any, **options: Any) -> Any:
        if process_type == _RAYLET:
            command, found.workers_fork = raylet_command(command, worker_python, exports)
        return start(command, process_type, *rest, **options)

    def ray_params(**given: Any) -> Any:
        try:
            return params(**given, no_monitor=True, include_log_monitor=False)
        except TypeError:  # of another version
            return params(**given)

    with contextlib.ExitStack() as patches:
        for owner, name, changed in (
            (services, "start_ray_process", start_process),
            (parameter, "RayParams", ray_params),
            (node.Node, "start_api_server", _start_nothing),
        ):
            if hasattr(owner, name):
                patches.callback(partial(setattr, owner, name, getattr(owner, name)))
                setattr(owner, name, changed)
        yield found


def raylet_command(command: Sequence[str], worker_python: Sequence[str], exports: bool) -> tuple[list[str], bool]:
    """Return the command that starts a raylet with stand-ins for its agents, and with workers that
    `worker_python` starts; and whether it starts them. Parts that are not as expected stay.
    """
    values = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
    folder, node = values.get("--session_dir", ""), values.get("--node_id", "")
    changed, workers_fork = list(command), False
    for number, part in enumerate(command):
        if part.startswith(_WORKER_OPTION) and worker_python:
            words = shlex.split(part.removeprefix(_WORKER_OPTION))
            # Python, the script that applies runtime environments, options of Python, the script of workers
            if len(words) > 2 and words[0] == sys.executable and words[2].endswith("default_worker.py"):
                changed[number] = f"{_WORKER_OPTION}{subprocess.list2cmdline([*worker_python, *words[2:]])}"
                workers_fork = True
    for number, part in enumerate(command if folder and node else ()):
        if part.startswith(_EXPORT_AGENT_OPTION) and not exports:
            changed[number] = f"{_EXPORT_AGENT_OPTION}{_stand_in(folder, node)}"
        elif part.startswith(_ENVIRONMENT_AGENT_OPTION) and workers_fork:  # else the pool itself has to wait for it
            agent = shlex.split(part.removeprefix(_ENVIRONMENT_AGENT_OPTION))
            option = agent_stand_in.ENVIRONMENT_PORT_OPTION
            if f"{option}0" in agent:
                agent.remove(f"{option}0")
                changed[number] = f"{_ENVIRONMENT_AGENT_OPTION}{_stand_in(folder, node, agent)}"
    return changed, workers_fork


def _stand_in(folder: str, node: str, command: Sequence[str] = ()) -> str:
    script = str(Path(agent_stand_in.__file__))
    python = [sys.executable, "-I", "-S", script, folder, node, str(ENVIRONMENT_AGENT_SECONDS)]
    return subprocess.list2cmdline([*python, *command])


def _start_nothing(node: Any, **options: Any) -> None:
    """Start no dashboard."""
