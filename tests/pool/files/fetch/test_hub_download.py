"""Files of a hub reach a folder of models complete, with the published hash, or not at all.

Proves, against a server that answers like the hub: redirects to another server keep the token at the hub; broken
connections continue where they broke; a wrong hash leaves nothing; damaged chunks of an earlier process are fetched
again; what is there is not fetched; each refusal names what to do; names cannot lead out of the folder.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from modelpool.pool.files.fetch.fetch_errors import CacheFull, FileGone, SourceFailed, WrongContent
from modelpool.pool.files.fetch.hub_download import DownloadPlan, download, plan_download
from modelpool.pool.files.fetch.hub_source import Hub, HubSource
from modelpool.pool.values.core.errors import OutputFailed, UserError
from tests.each_case import each_case
from tests.pool.files.fetch.hub_server import HubServer, Repository, serving_hub

TOKEN = "hf_secret"


def content(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


FILES = {"toy.safetensors": content(1, 3_000_000), "config.json": b'{"a": 1}', "empty.txt": b""}


def plan(state: HubServer, folder: Path, token: str = "", overwrite: bool = False) -> tuple[DownloadPlan, HubSource]:
    source = HubSource(Hub(state.url, token))
    files = source.revision("some/toy").files.values()
    return plan_download(files, folder, overwrite=overwrite), source


def fetch(state: HubServer, folder: Path, token: str = "", stops: Callable[[], bool] = lambda: False) -> bool:
    planned, source = plan(state, folder, token)
    return download(planned, source, lambda count: None, stops)


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_arrive_and_the_token_stays_at_the_hub(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES), token=TOKEN)) as state:
        assert fetch(state, tmp_path, TOKEN)
        assert read(tmp_path) == FILES
        assert state.storage_headers
        assert not any("Authorization" in headers for headers in state.storage_headers)
        sent_bytes = state.sent_bytes
        planned, _ = plan(state, tmp_path, TOKEN)
        assert planned.left_bytes == 0
        assert fetch(state, tmp_path, TOKEN)
        assert state.sent_bytes == sent_bytes, "what is there is not fetched again"


def test_connections_that_break_are_continued(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        broken = iter(range(6))
        state.break_after = lambda name, begin: 50_000 if next(broken, None) is not None else None
        assert fetch(state, tmp_path)
        assert next(broken, None) is None, "connections did break"
        assert read(tmp_path) == FILES
        assert state.sent_bytes == sum(map(len, FILES.values())), "no byte was sent twice"


def test_a_download_that_was_stopped_continues_with_the_missing_chunks(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        assert not fetch(state, tmp_path, stops=lambda: state.sent_bytes > 1_000_000)
        assert "toy.safetensors" not in read(tmp_path)
        planned, _ = plan(state, tmp_path)
        assert 0 < planned.left_bytes < len(FILES["toy.safetensors"])
        before = state.sent_bytes
        assert fetch(state, tmp_path)
        assert state.sent_bytes - before < len(FILES["toy.safetensors"])
        assert read(tmp_path) == FILES, "and no partial file is left"


def test_a_damaged_chunk_of_an_earlier_process_is_fetched_again(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        fetch(state, tmp_path, stops=lambda: state.sent_bytes > 1_000_000)
        (partial,) = tmp_path.glob("*.part")
        with partial.open("r+b") as opened:
            opened.write(b"damaged")
        assert fetch(state, tmp_path)
        assert read(tmp_path) == FILES


def test_other_bytes_than_published_are_never_written(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        state.hashes["toy.safetensors"] = "0" * 64
        with pytest.raises(WrongContent, match=r"toy\.safetensors: has other bytes than the hub published"):
            fetch(state, tmp_path)
        assert not [name for name in read(tmp_path) if name.startswith("toy")]


def test_a_small_file_is_compared_with_the_hash_of_git(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        planned, source = plan(state, tmp_path)
        state.repositories["some/toy"].files["config.json"] = b'{"a": 2}'  # the storage has other bytes of that size
        with pytest.raises(WrongContent, match=r"config\.json: has other bytes"):
            download(planned, source, lambda count: None)


class Refusal(NamedTuple):
    """What the hub does, and what the message has to contain."""

    repository: Repository | None
    token: str
    revision: str
    said: str


REFUSALS = {
    "no such repository": Refusal(
        None, "", "", "some/toy: the hub has no such repository for this user .* set HF_TOKEN"
    ),
    "a private one, wrong token": Refusal(Repository({}, token=TOKEN), "bad", "", "does not accept this token"),
    "no such revision": Refusal(Repository({}), "", "fp16", "some/toy: the hub has no revision 'fp16' of it"),
    "a name with spaces": Refusal(Repository({}), "", "a b", "the hub has no revision 'a b'"),
}


@each_case("case", REFUSALS)
def test_a_refusal_says_what_to_do(case: str) -> None:
    refusal = REFUSALS[case]
    repositories = {} if refusal.repository is None else {"some__toy": refusal.repository}
    with serving_hub(**repositories) as state, pytest.raises(SourceFailed, match=refusal.said) as caught:
        HubSource(Hub(state.url, refusal.token)).revision("some/toy", refusal.revision)
    assert not refusal.token or refusal.token not in str(caught.value)


def test_files_of_a_restricted_repository_are_refused_with_its_page(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES), token=TOKEN, is_gated=True)) as state:
        with pytest.raises(
            SourceFailed, match=r"access is restricted .*: ask for it on http.*/some/toy, and set HF_TOK"
        ):
            fetch(state, tmp_path)
        assert fetch(state, tmp_path, TOKEN)


def test_a_repository_that_was_renamed_is_followed(tmp_path: Path) -> None:
    with serving_hub(some__new=Repository(dict(FILES))) as state:
        state.new_names["some/toy"] = "some/new"
        found = HubSource(Hub(state.url)).revision("some/toy")
        assert found.repository == "some/new"
        assert fetch(state, tmp_path)
        assert read(tmp_path) == FILES


def test_a_file_that_the_hub_lists_and_does_not_have_is_named(tmp_path: Path) -> None:
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        state.gone.add("config.json")
        with pytest.raises(FileGone, match=r"some/toy: the hub lists config\.json, but does not have it any more"):
            fetch(state, tmp_path)


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SourceFailed, match=r":9/api/models/some/toy/.*: cannot be reached"):
        HubSource(Hub("http://127.0.0.1:9")).revision("some/toy")


def test_an_answer_that_is_no_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub(some__toy=Repository({})) as state:
        for answer, said in ((["a"], "found no JSON"), ({"id": "some/toy"}, "without 'sha'")):
            monkeypatch.setattr("tests.pool.files.fetch.hub_server._HubHandler._described", lambda *_, a=answer: a)
            with pytest.raises(SourceFailed, match=said):
                HubSource(Hub(state.url)).revision("some/toy")


def test_a_file_with_other_content_is_replaced_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"my own")
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        with pytest.raises(OutputFailed, match=r"config\.json: exists with other content .* --force"):
            plan(state, tmp_path)
        assert (tmp_path / "config.json").read_bytes() == b"my own"
        planned, source = plan(state, tmp_path, overwrite=True)
        assert download(planned, source, lambda count: None)
        assert read(tmp_path) == FILES


def test_a_folder_in_the_place_of_a_file_is_refused_even_if_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        for overwrite in (False, True):
            with pytest.raises(OutputFailed, match=r"config\.json: is a folder, expected a file or nothing"):
                plan(state, tmp_path, overwrite=overwrite)
        assert state.sent_bytes == 0


def test_a_full_disk_is_found_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with serving_hub(some__toy=Repository(dict(FILES))) as state:
        with pytest.raises(CacheFull, match=r"the disk has .* free, expected 2\.9 MiB for the files"):
            plan(state, tmp_path)
        assert state.sent_bytes == 0


def test_names_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("../evil.json", "/evil.json", "a/../../evil.json"):
        with serving_hub(some__toy=Repository({name: b"{}"})) as state, pytest.raises(UserError, match="leads out"):
            plan(state, tmp_path / "inside")
    assert not list(tmp_path.rglob("evil*"))


def test_no_other_text_of_an_answer_leads_out_of_the_folder_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a repository becomes a folder, and hashes become parts of names of files: an endpoint that is set
    with HF_ENDPOINT must not choose where files are written."""
    large = {"rfilename": "toy.safetensors", "size": 3, "lfs": {"size": 3, "sha256": "a" * 64}}
    good = {"id": "some/toy", "sha": "c" * 40, "siblings": [large]}
    wrong = [
        *({"id": name} for name in ("../../evil", "/etc/evil", "some/../..", "some/toy/more", "toy", ["some/toy"])),
        *({"sha": commit} for commit in ("../..", "a/b", "", 5)),
        {"siblings": [large | {"lfs": {"size": 3, "sha256": "/../../evil" + "a" * 53}}]},
        {"siblings": [{"rfilename": "a.json", "size": 3, "blobId": "../evil"}]},
        {"siblings": [{"rfilename": "a.json", "size": -3, "blobId": "a" * 40}]},
        {"siblings": ["toy.safetensors"]},
    ]
    answer = good
    monkeypatch.setattr("tests.pool.files.fetch.hub_server._HubHandler._described", lambda *_: answer)
    with serving_hub(some__toy=Repository({})) as state:
        found = HubSource(Hub(state.url)).revision("some/toy")
        assert (found.repository, list(found.files)) == ("some/toy", ["toy.safetensors"])
        for each in wrong:
            answer = good | each
            with pytest.raises(SourceFailed, match="expected the hub's list of files"):
                HubSource(Hub(state.url)).revision("some/toy")
