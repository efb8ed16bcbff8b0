"""An actor that takes no connections is told from one that computes for long, and the command says what to do.

Found with a controller and a job service at their limit of open files: "the controller of the pool is gone" after 50 s,
and no end at all.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import threading
from contextlib import suppress

from modelpool.actors.ray.reachable import MOST_ATTEMPTS, ActorPlace, Reach, open_files, takes_connections

SECONDS = 0.2
HERE = ActorPlace("127.0.0.1", 1, os.getpid(), is_here=True)


def reach(place: ActorPlace | None = HERE, answers: bool = False) -> Reach:
    return Reach("the job service of the pool", lambda: place, lambda host, port: answers)


def test_a_server_that_accepts_nothing_takes_no_connections_and_one_that_has_ended_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel connects, as for a process without descriptors
        host, port = server.getsockname()
        assert not takes_connections(host, port, SECONDS)

        def greet() -> None:
            for _ in range(3):  # the first has given up
                connection, _ = server.accept()
                with suppress(OSError), connection:
                    connection.sendall(b"\0")

        thread = threading.Thread(target=greet)
        thread.start()
        assert takes_connections(host, port, 20.0)
        assert takes_connections(host, port, 20.0)
        thread.join()
    assert takes_connections(host, port, SECONDS)


def test_only_silence_of_several_attempts_in_a_row_is_a_problem_and_only_before_the_first_answer() -> None:
    waits = reach()
    problems = [waits.problem() for _ in range(MOST_ATTEMPTS)]
    assert problems[:-1] == [""] * (MOST_ATTEMPTS - 1)
    assert problems[-1].startswith("the job service of the pool runs (process ")
    assert [reach(answers=True).problem() for _ in range(MOST_ATTEMPTS)] == [""] * MOST_ATTEMPTS
    assert [reach(None).problem() for _ in range(MOST_ATTEMPTS)] == [""] * MOST_ATTEMPTS
    waits.answered()
    assert waits.problem() == "", "it computes for a long time"


def test_threads_that_wait_at_a_time_count_as_one_attempt() -> None:
    """Found in a review: three threads that looked at once were three attempts in a row, after 5 s instead of 15."""
    looked, go_on = threading.Event(), threading.Event()

    def silent(host: str, port: int) -> bool:
        looked.set()
        return not go_on.wait(20.0)

    waits = Reach("the controller of the pool", lambda: HERE, silent)
    thread = threading.Thread(target=waits.problem)
    thread.start()
    assert looked.wait(20.0)
    assert [waits.problem() for _ in range(MOST_ATTEMPTS)] == [""] * MOST_ATTEMPTS, "another thread looks"
    go_on.set()
    thread.join()
    rest = [waits.problem() for _ in range(MOST_ATTEMPTS - 1)]
    assert [bool(problem) for problem in rest] == [False] * (MOST_ATTEMPTS - 2) + [True]


def test_an_actor_that_takes_connections_is_not_said_to_take_none() -> None:
    """Ray calls an actor unavailable, too, when only the connection to it broke."""
    told = reach(answers=True).unavailable()
    assert "takes no connections" not in told
    assert told.startswith("the connection to the job service of the pool broke, though it runs and takes connections")


def test_the_limit_of_open_files_is_named_with_what_to_do() -> None:
    files, limit = open_files(os.getpid()) or (0, 0)
    assert 0 < files <= limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"of {limit} files open: it is stopped" in reach().unavailable()
    elsewhere = ActorPlace("192.0.2.1", 1, 1, is_here=False)
    assert "LimitNOFILE" in reach(elsewhere).unavailable()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as full:
        assert full.stdin is not None
        assert full.stdout is not None
        try:
            full.stdin.write(b"\n")
            full.stdout.read(1)  # it has opened its libraries, which needs a second file
            resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (1, limit))
            told = reach(ActorPlace("127.0.0.1", 1, full.pid, is_here=True)).unavailable()
        finally:
            full.kill()
    assert "reached its limit of 1 open files" in told
    assert "ulimit -n 65536" in told


def test_an_actor_is_not_looked_for_without_limit() -> None:
    """Ray's control service is asked without a timeout. Found by killing a pool with SIGKILL: `modelpool serve --pool`
    waited until Ray aborted it, and never joined the next pool."""
    never = threading.Event()

    def place() -> ActorPlace | None:
        never.wait()
        return HERE

    lost = Reach("the controller of the pool", place, lambda host, port: True, place_seconds=SECONDS)
    assert lost.unavailable() == "the controller of the pool cannot be reached, though it has not ended"
    assert lost.problem() == ""
    never.set()
