"""The journal of a fetch: what it records is what is read, wherever its last writer was killed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.files.fetch.fetch_progress import (
    FetchProgress,
    as_bitmap,
    from_bitmap,
    journal_start,
    new_progress,
    read_journal,
)

SIZES = st.integers(0, 3 << 30)
STEPS = st.lists(st.tuples(st.sampled_from(["claim", "drop", "done", "begin"]), st.integers(0, 50)), max_size=40)


@given(SIZES)
def test_chunks_cover_each_byte_once(size_bytes: int) -> None:
    progress = new_progress(size_bytes)
    ends = [0] + [progress.range_of(chunk)[1] for chunk in range(progress.chunks)]
    assert [progress.range_of(chunk)[0] for chunk in range(progress.chunks)] == ends[:-1]
    assert ends[-1] == size_bytes
    assert progress.is_complete == (size_bytes == 0)


@given(STEPS, st.data())
def test_a_journal_cut_anywhere_records_a_prefix(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    size_bytes = 51 * (1 << 18)
    lines = [word if word == "begin" else f"{word} {number}" for word, number in steps]
    text = journal_start(new_progress(size_bytes)) + "".join(f"{line}\n" for line in lines)
    cut = data.draw(st.integers(0, len(text)))
    found = read_journal(text[:cut], size_bytes)
    whole_lines = text[:cut].count("\n")
    if not whole_lines:
        assert found is None
        return
    done: set[int] = set()
    claimed: set[int] = set()
    for word, number in steps[: whole_lines - 1]:
        if word == "begin":
            claimed = set()
        elif word == "claim":
            claimed.add(number)
        else:
            claimed.discard(number)
            if word == "done":
                done.add(number)
    assert found is not None
    assert (found.done, found.claimed) == (done, claimed)


@given(SIZES, SIZES, st.text(max_size=60))
def test_another_file_or_no_journal_is_refused(size_bytes: int, other_bytes: int, text: str) -> None:
    start = journal_start(new_progress(size_bytes))
    assert (read_journal(start, other_bytes) is not None) == (size_bytes == other_bytes)
    assert read_journal(text + "\n", size_bytes) is None


def test_lines_that_no_fetch_writes_are_refused() -> None:
    start = journal_start(new_progress(1 << 20))
    for line in ("done", "done -1", "done 9999", "fetched 1", "done 1 2", "claim x"):
        assert read_journal(f"{start}{line}\n", 1 << 20) is None, line


@given(st.sets(st.integers(0, 300)), st.integers(301, 400))
def test_bitmaps_round_trip(chunks: set[int], count: int) -> None:
    assert from_bitmap(as_bitmap(chunks, count), count) == chunks


@given(st.integers(0, 20 << 20), st.sets(st.integers(0, 80)), st.data())
def test_covered_bytes_are_those_of_complete_chunks(size_bytes: int, done: set[int], data: st.DataObject) -> None:
    fresh = new_progress(size_bytes)
    complete = frozenset(chunk for chunk in done if chunk < fresh.chunks)
    progress = FetchProgress(size_bytes, fresh.chunk_bytes, complete)
    begin = data.draw(st.integers(0, size_bytes))
    end = data.draw(st.integers(begin, size_bytes))
    touched = {byte // fresh.chunk_bytes for byte in {begin, end - 1} | set(range(begin, end, fresh.chunk_bytes))}
    if begin < end:
        assert progress.covers(begin, end) == (touched <= complete)
    assert not progress.covers(begin, size_bytes + 1)
    assert progress.done_bytes == sum(end - begin for begin, end in map(progress.range_of, complete))
