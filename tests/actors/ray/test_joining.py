"""Which Ray a program joins, what it ships there, and what it reports if it cannot. Without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest
from ray._private import ray_constants

from modelpool.actors.ray import ray_session
from modelpool.actors.ray.code_folder import JOB_VARIABLE, code_for_other_machines, job_environment, with_user_modules
from modelpool.actors.ray.ray_session import (
    chosen_address,
    is_on_this_machine,
    is_ours,
    join_problem,
    open_session,
    write_note,
)
from modelpool.pool.values.core.errors import UserError

THERE = {"RAY_ADDRESS": "head:6379"}


def test_the_configured_address_goes_before_ray_address_and_that_before_a_local_ray() -> None:
    cases = [
        (None, {}, "local"),
        (None, {"RAY_ADDRESS": ""}, "local"),
        (None, THERE, "head:6379"),
        ("auto", THERE, "head:6379"),
        ("auto", {}, "auto"),
        ("local", THERE, "local"),
        ("other:6379", THERE, "other:6379"),
        (None, {"RAY_ADDRESS": "auto"}, "auto"),
    ]
    for configured, variables, expected in cases:
        assert chosen_address(configured, variables) == expected


def test_addresses_of_ray_client_and_of_the_dashboard_are_refused_with_the_one_to_use() -> None:
    with pytest.raises(UserError, match=r"address 'ray://head:10001': Ray Client .* so head:6379\), or submit it"):
        chosen_address("ray://head:10001", {})
    with pytest.raises(UserError, match=r"RAY_ADDRESS 'http.* dashboard.* so 127.0.0.1:6379\).*unset RAY_ADDRESS"):
        chosen_address(None, {"RAY_ADDRESS": "http://127.0.0.1:8265"})
    assert chosen_address("local", {"RAY_ADDRESS": "ray://head:10001"}) == "local"


def test_only_a_ray_of_this_machine_and_of_a_program_without_an_environment_has_forks(monkeypatch) -> None:
    monkeypatch.setattr(ray_session, "_connected", lambda: None)
    for name in ("RAY_ADDRESS", JOB_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    cases = {None: True, "local": True, "127.0.0.1:1": True, "auto": False, "10.0.0.4:6379": False}
    assert {address: is_on_this_machine(address) for address in cases} == cases
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"runtime_env": {"env_vars": {"A": "1"}}}))
    assert not is_on_this_machine("local")


def test_a_control_service_that_ends_while_a_program_joins_is_given_up_soon(monkeypatch) -> None:
    """By default, Ray tries 20 times, for 41 s each: a command hangs for 14 minutes."""
    attempts = []

    def connect(**arguments: object) -> None:
        attempts.append(ray_constants.NUM_REDIS_GET_RETRIES)
        raise ConnectionError("the control service has ended")

    monkeypatch.setattr(ray_session, "_connected", lambda: None)
    monkeypatch.setattr(ray_session, "_prepare_environment", lambda token_folder: None)
    monkeypatch.setattr(ray_session, "_init", connect)
    before = ray_constants.NUM_REDIS_GET_RETRIES
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"could not join the Ray cluster at '{address}': the control service has"):
            open_session(address, "modelpool")
    assert attempts == [2]
    assert before == ray_constants.NUM_REDIS_GET_RETRIES


def test_other_versions_are_reported_completely() -> None:
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
        "This process on node here was started with:\n    Ray: 2.59.1\n    Python: 3.12.1\n"
    )
    assert join_problem("head:6379", text) == (
        "the Ray cluster at head:6379 runs Ray 2.60.0 on Python 3.11.9; this program runs Ray 2.59.1 on Python "
        "3.12.1. Both must be equal: pip install ray==2.60.0, or submit the program with `ray job submit`, which runs "
        "it in the cluster's environment"
    )
    assert "use a Python environment of that version" in join_problem("x:1", text.replace("2.59.1", "2.60.0"))


def test_other_problems_are_reported_with_all_of_rays_lines() -> None:
    assert (
        join_problem("x:1", "first line\n  second line")
        == "could not join the Ray cluster at 'x:1': first line second line"
    )
    assert "RAY_AUTH_TOKEN_PATH" in join_problem("x:1", "InvalidAuthToken: wrong token")


def test_only_a_ray_of_a_living_process_of_ours_gets_our_token(tmp_path, monkeypatch) -> None:
    """Found in a trial: a cluster without authentication gave up every driver that had a token."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not is_ours("127.0.0.1:6379")
    note = write_note("127.0.0.1:6379")
    assert is_ours("127.0.0.1:6379")
    assert is_ours("localhost:6379")
    assert not is_ours("127.0.0.1:6380")
    for text in ("", "{}", '{"pid": "x", "started_at": 0}', note.read_text().replace("started_at", "since")):
        note.write_text(text)
        assert not is_ours("127.0.0.1:6379")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    note.write_text(json.dumps({"pid": ended.pid, "started_at": psutil.Process().create_time()}))
    assert not is_ours("127.0.0.1:6379")


def test_a_ray_that_an_earlier_version_has_started_is_joined_with_its_token(tmp_path, monkeypatch) -> None:
    """Its note and its token are where that version has written them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in (*ray_session.TOKEN_VARIABLES, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", ray_session.LOOPBACK_VARIABLE):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    note = write_note("127.0.0.1:6379")
    former = tmp_path / "runtime" / "modelpool"
    former.mkdir(parents=True)
    note.rename(former / note.name)
    assert is_ours("127.0.0.1:6379")
    monkeypatch.delitem(sys.modules, "ray")  # as before its import
    ray_session._prepare_environment(ray_session._token_folder("127.0.0.1:6379"))
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(former / ray_session.TOKEN_NAME)


def test_the_users_packages_stay_before_ours_and_nothing_is_listed_twice() -> None:
    code = {"py_modules": ["/here/modelpool"]}
    cases = [
        ({}, ["/here/modelpool"]),
        ({"py_modules": []}, ["/here/modelpool"]),
        (
            {"py_modules": ["gcs://a.zip", "gcs://b.zip"], "pip": ["x"]},
            ["gcs://a.zip", "gcs://b.zip", "/here/modelpool"],
        ),
        ({"py_modules": ["/here/modelpool", "gcs://a.zip"]}, ["/here/modelpool", "gcs://a.zip"]),
    ]
    for environment, expected in cases:
        assert with_user_modules(code, environment) == {"py_modules": expected}


def test_ray_accepts_what_a_job_and_we_bring() -> None:
    """The rule is Ray's: it refuses the same field twice, unless the driver's replaces the job's."""
    from ray.runtime_env.runtime_env import _merge_runtime_env

    job = {"py_modules": ["gcs://a.zip"], "working_dir": "gcs://w.zip", "env_vars": {"A": "1"}}
    ours = with_user_modules(code_for_other_machines(), job)
    assert _merge_runtime_env(job, code_for_other_machines()) is None
    merged = _merge_runtime_env(job, ours, override=True)
    assert merged == {**job, "py_modules": ["gcs://a.zip", *code_for_other_machines()["py_modules"]]}


def test_the_environment_of_a_submitted_job_is_read() -> None:
    wanted = {"py_modules": ["gcs://a.zip"]}
    assert job_environment({JOB_VARIABLE: json.dumps({"runtime_env": wanted, "metadata": {}})}) == wanted
    for variables in ({}, {JOB_VARIABLE: "{}"}, {JOB_VARIABLE: '{"runtime_env": null}'}):
        assert job_environment(variables) == {}
    for text in ("{", "[]", '{"runtime_env": 3}'):
        with pytest.raises(UserError, match=JOB_VARIABLE):
            job_environment({JOB_VARIABLE: text})
