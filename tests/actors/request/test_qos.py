"""Priority, user and deadline on their way from a driver to the scheduler's words; and that they change no image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelpool.actors.cli.run.job_file import read_job_file
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.request.qos import deadline_warning, parse_seconds, user_of_this_process
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import UserId
from modelpool.scheduler.model.user_share import EVERYBODY, UserShare
from tests.each_case import each_case


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("1.5", 1.5),
        ("45s", 45.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("1 d", 86400.0),
        (" 1H ", 3600.0),
    ],
)
def test_times_from_now(said: object, seconds: float) -> None:
    assert parse_seconds(said) == seconds
    assert GenerateRequest(model="m", prompt="p", deadline=said).deadline == seconds


@pytest.mark.parametrize(
    "said", [0, -1, "0s", "soon", "", "10 minutes", "1m30", True, float("inf"), float("nan"), 1e12]
)
def test_what_is_no_time_is_refused_by_the_fields_name(said: object) -> None:
    with pytest.raises(UserError, match=r"deadline: found .*, expected a time from now"):
        GenerateRequest(model="m", prompt="p", deadline=said)


@pytest.mark.parametrize(
    "field",
    [
        {"priority": 1001},
        {"priority": "high"},
        {"priority": True},
        {"priority": 1.5},
        {"steps": True},
        {"seed": True},
        {"user": "*"},
        {"user": " ann"},
        {"user": "a\nb"},
        {"user": "x" * 101},
    ],
)
def test_other_terms_that_cannot_be(field: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        GenerateRequest(model="m", prompt="p", **field)  # type: ignore[arg-type]


def test_terms_in_a_job_file_do_not_change_its_seeds(tmp_path: Path) -> None:
    """Somebody adds a deadline to a file with a batch that was stopped: the same images are missing as before."""
    plain, hurried = tmp_path / "plain.jsonl", tmp_path / "hurried.jsonl"
    lines = [{"model": "m", "prompt": f"p{number}"} for number in range(3)]
    plain.write_text("\n".join(json.dumps(line) for line in lines))
    more = {"priority": 2, "user": "ann", "deadline": "10m"}
    hurried.write_text("\n".join(json.dumps({**line, **more}) for line in lines))
    before, after = (read_job_file(path, {}).lines for path in (plain, hurried))
    assert [line.request.seed for line in before] == [line.request.seed for line in after]
    assert {line.request.deadline for line in after} == {600.0}


def test_a_line_of_a_job_file_says_its_own_terms_and_the_command_says_the_others(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("model,prompt,priority,user,deadline\nm,a,5,bob,2h\nm,b,,,\n")
    mine, others = (line.request for line in read_job_file(path, {"priority": 1, "deadline": "30s"}).lines)
    assert (mine.priority, mine.user, mine.deadline) == (5, "bob", 7200.0)
    assert (others.priority, others.user, others.deadline) == (1, None, 30.0)


def test_somebody_runs_this() -> None:
    assert user_of_this_process() == user_of_this_process().strip()


def test_warnings_say_how_many_and_how_long() -> None:
    assert "an image cannot" in deadline_warning([3.0])
    assert "2 images cannot" in deadline_warning([3.0, 4.5])
    assert "4.5 s" in deadline_warning([3.0, 4.5])


# ---- users in a configuration ----------------------------------------------------------------------------------------


def test_users_of_a_file_become_shares(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(
        '[users.ann]\nweight = 2\nrunning_limit = 4\n[users."*"]\nrunning_limit = 8\n[scheduler]\nwindow = 7\n'
    )
    config = PoolConfig.load(path)
    assert config.scheduler.window == 7
    assert config.scheduler.shares == (
        UserShare(user=UserId("ann"), weight=2.0, running_limit=4),
        UserShare(user=EVERYBODY, running_limit=8),
    )
    assert PoolConfig.model_validate_json(config.model_dump_json()) == config, "a daemon gets something else"
    again = tmp_path / "again.toml"
    users = config.describe().split('[users."ann"]')[1]
    again.write_text('[users."ann"]' + users)
    assert PoolConfig.load(again).scheduler.shares == config.scheduler.shares


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[users.ann]\nwieght = 2", r"\[users.ann\] unknown field .*'wieght'.*did you mean 'weight'"),
        ("[users.ann]\nweight = 0", r"\[users.ann\] weight: found 0"),
        ("[users.ann]\nweight = true", r"\[users.ann\] weight: found True"),
        ("[users.ann]\nrunning_limit = 0", r"\[users.ann\] running_limit: found 0"),
        ("[users]\nann = 3", r"\[users\] ann: found 3, expected a table"),
        ("users = 3", r"users: found 3, expected tables"),
        ("[scheduler]\nshares = []", r"\[scheduler\] shares: .*\[users.ann\]"),
    ],
)
def test_what_is_wrong_with_users_is_told_with_file_and_key(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"pool\.toml: {told}"):
        PoolConfig.load(path)


@each_case("field", ["priority", "steps", "seed", "width"])
@each_case("said", [True, "high", 2.5, "1e1", [8], "9" * 5000])
def test_whole_numbers_are_whole(field: str, said: object) -> None:
    """Found in a review: True was taken for 1, and complaints spoke of parsing."""
    with pytest.raises(UserError, match=rf"{field}: found .*, expected a (whole number|multiple of 8) from"):
        GenerateRequest(model="m", prompt="p", **{field: said})  # type: ignore[arg-type]


def test_whole_numbers_may_be_written_in_words_of_a_file() -> None:
    request = GenerateRequest(model="m", prompt="p", priority="-2", steps=" 8 ", width=64.0)  # type: ignore[arg-type]
    assert (request.priority, request.steps, request.width) == (-2, 8, 64)
