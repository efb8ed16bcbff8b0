"""A Ray that is started for one pool: which processes it has, who starts its workers, and what still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from modelpool.actors.ray import agent_stand_in
from modelpool.actors.ray.fork_server import ForkServer, fork_command, python_command
from modelpool.actors.ray.ray_session import short_folder
from modelpool.actors.ray.small_ray import raylet_command

#: a module of the standard library that nothing else here imports
MODULE = "colorsys"
#: starts Ray; prints its processes, what an actor without a runtime environment is, and what one with such is
PROGRAM = f"""
import json, os, sys
import psutil
from modelpool.actors.ray import small_ray
from modelpool.actors.ray.ray_session import open_session
small_ray.ENVIRONMENT_AGENT_SECONDS = 0.5
session = open_session("local", "small", 1, worker_python=sys.argv[1:], exports=False)
import ray

def about():
    named = (os.environ.get(name) for name in ("ONLY_HERE", "MODELPOOL_FORK_COMMAND"))
    return *named, {MODULE!r} in sys.modules, os.getppid()

commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
plain = ray.get(ray.remote(about).remote())
other = ray.get(ray.remote(about).options(runtime_env={{"env_vars": {{"ONLY_HERE": "1"}}}}).remote())
print(json.dumps([session.workers_fork, commands, plain, other]))
session.close()
"""


@pytest.mark.ray
def test_a_ray_of_our_own_has_no_processes_that_a_pool_does_not_use_and_its_workers_are_forks() -> None:
    server = ForkServer.start([MODULE], short_folder())
    assert server is not None
    command = fork_command(server.socket)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True)
    workers_fork, commands, plain, other = json.loads(done.stdout.splitlines()[-1])
    assert workers_fork
    names = "dashboard/", "monitor.py"
    assert [line for line in commands if any(name in line.split(" --")[0] for name in names)] == []
    variable, forks_with, is_fork, parent = plain
    assert (variable, is_fork, parent) == (None, True, server._process.pid)
    assert python_command({"MODELPOOL_FORK_COMMAND": forks_with}) == command
    # a task of the user's program; Ray applies its environment as ever
    assert other[:3] == ["1", None, False]
    server.close()


def test_only_the_parts_of_a_raylets_command_that_are_as_expected_change(tmp_path: Path) -> None:
    ours = (sys.executable, "-I", "client.py")
    worker = f"--python_worker_command={sys.executable} /r/setup_worker.py /r/default_worker.py --a"
    agents = (
        "--dashboard_agent_command=python a.py",
        "--runtime_env_agent_command=python b.py --runtime-env-agent-port=0",
    )
    where = f"--session_dir={tmp_path}", "--node_id=abc"
    changed, workers_fork = raylet_command(["raylet", worker, *agents, *where], ours, exports=False)
    assert workers_fork
    assert changed[1] == f"--python_worker_command={' '.join(ours)} /r/default_worker.py --a"
    assert changed[2].endswith(f"agent_stand_in.py {tmp_path} abc 10.0")
    assert changed[3].endswith(f"agent_stand_in.py {tmp_path} abc 10.0 python b.py")
    assert raylet_command(["raylet", worker, *agents, *where], (), exports=True) == (
        ["raylet", worker, *agents, *where],
        False,
    )
    for unknown in (
        ["raylet", f"--python_worker_command={sys.executable} /r/default_worker.py", *where],
        ["raylet", *agents],
        ["raylet", agents[1], *where],  # a pool with workers that are no forks needs this agent from the start
        ["raylet", f"{agents[1]}2", *where],
    ):
        assert raylet_command(unknown, ours, exports=False) == (unknown, False)


def test_a_stand_in_announces_that_there_is_no_agent_and_ends_with_its_raylet(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys
stand_in = subprocess.Popen([sys.executable, "-I", "-S", {agent_stand_in.__file__!r}, {str(tmp_path)!r}, "n", "10"])
print(stand_in.pid, flush=True)
input()
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as raylet:
        assert raylet.stdout is not None
        stand_in = psutil.Process(int(raylet.stdout.readline()))
        ports = [tmp_path / f"{name}_n" for name in agent_stand_in.EXPORT_PORTS]
        while not all(port.exists() for port in ports):
            time.sleep(0.01)
        assert {port.read_text() for port in ports} == {"-1"}
        raylet.communicate("\n")
        stand_in.wait(30)


#: an agent, which listens as aiohttp does: prints whether another program could take its port before, and the answer
AGENT = """
import asyncio, socket, sys
port = int(sys.argv[1].partition("=")[2])
for address in ("127.0.0.1", ""):
    try:
        socket.socket().bind((address, port))
        print("taken")
    except OSError:
        print("kept")

async def main():
    async def answer(reader, writer):
        writer.write(b"here")
        writer.close()
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        print((await reader.read()).decode())

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="rules about the reuse of ports")
def test_no_other_program_takes_the_port_of_the_agent_before_it_listens(tmp_path: Path) -> None:
    stand_in = [sys.executable, "-I", "-S", agent_stand_in.__file__, str(tmp_path), "n", "0"]
    done = subprocess.run([*stand_in, sys.executable, "-c", AGENT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kept", "kept", "here"]
    assert (tmp_path / f"{agent_stand_in.ENVIRONMENT_PORT}_n").exists()


def test_a_process_that_is_no_fork_starts_python_itself() -> None:
    assert python_command({}) == (sys.executable,)
    assert "MODELPOOL_FORK_COMMAND" not in os.environ
