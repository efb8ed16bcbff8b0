"""`--plot [FILE]`: text that fits the terminal, and files; plots show what was planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from modelpool.actors.cli.simulate.plan_cluster import MOST_PLOTTED, plotted_counts
from modelpool.actors.cli.terminal.plots import Limit, Plot, PlotLine, text_plot, with_plot_value
from tests.actors.cli.conftest import Command
from tests.each_case import each_case

SHAPES = Path(__file__).parents[4] / "examples" / "shapes"
BATCH = ("plan-cluster", "batch:jobs=40", "--gpus", "L40S,4090", "--deadline", "2m", "--price", "L40S=0.9,4090=0.4")


def plot(*lines: PlotLine, **more: object) -> Plot:
    values = {"title": "a title", "x_label": "GPUs", "x_words": "{:g}".format, "y_words": "{:.3g} s".format, **more}
    return Plot(lines=lines, **values)  # type: ignore[arg-type]


def points(*ys: float) -> tuple[tuple[float, float], ...]:
    return tuple((float(place), y) for place, y in enumerate(ys, 1))


@each_case("columns", [60, 80, 100, 20, 300])
def test_a_text_plot_fits_has_all_parts_and_is_ascii(columns: int) -> None:
    drawn = plot(
        PlotLine("H100", points(90.0, 50.0, 31.0), 2.0),
        PlotLine("RTX4090 of a long name that goes on and on and on", points(200.0, 110.0, 70.0, 55.0, 41.0), 4.0),
        y_limits=(Limit("goal", 60.0),),
        x_limits=(Limit("limit", 3.0),),
    )
    text = text_plot(drawn, columns)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= max(columns, 32)
    for part in ("a title", "200 s", "100 s", "0 s", "o H100", "x RTX4090", "O", "X", "- -", ":"):
        assert part in text, part
    if columns >= 60:
        assert "GPUs" in text
        assert "o H100 (O: 2)" in text
        assert "- goal 60 s" in text


def test_points_are_where_their_values_are() -> None:
    rows = text_plot(plot(PlotLine("a", points(100.0, 0.0), 2.0)), 60).splitlines()[1:15]
    assert rows[0].startswith("100 s |o")
    assert rows[-1].startswith("  0 s |")
    assert rows[-1].endswith(".O")
    assert len(rows[-1]) == 59, "the last column"


def test_odd_plots_are_drawn_or_empty() -> None:
    assert text_plot(plot(), 80) == ""
    assert text_plot(plot(PlotLine("a", ())), 80) == ""
    for ys in ((0.0,), (0.0, 0.0), (1e-9, 1e9), (5.0,)):
        assert "a" in text_plot(plot(PlotLine("a", points(*ys))), 80)
    far = text_plot(plot(PlotLine("a", points(1.0, 2.0)), y_limits=(Limit("goal", 1e6),)), 80)
    assert "- - -" not in far, "a limit far above would press the points to the ground"
    assert "- goal 1e+06 s" in far
    assert "\x1b" not in text_plot(plot(PlotLine("\x1b[31m", points(1.0))), 80)


def test_the_word_behind_plot_is_a_file_only_if_it_ends_like_one() -> None:
    cases = {
        ("--plot",): ["--plot=-"],
        ("--plot", "shapes"): ["--plot=-", "shapes"],
        ("--plot", "model.safetensors"): ["--plot=-", "model.safetensors"],
        ("shapes", "--plot", "--json"): ["shapes", "--plot=-", "--json"],
        ("--plot", "a.SVG", "shapes"): ["--plot", "a.SVG", "shapes"],
        ("--plot", "a.jpg"): ["--plot", "a.jpg"],
        ("--plot=a.png",): ["--plot=a.png"],
        ("--plot", "-"): ["--plot", "-"],
        ("--", "--plot"): ["--", "--plot"],
    }
    assert {words: with_plot_value(words) for words in cases} == cases


def test_numbers_around_the_answer_are_plotted_and_few_of_them() -> None:
    assert plotted_counts(1, 256, {1, 2}) == ()
    assert plotted_counts(3, 256, {1, 2, 3, 4}) == (5, 6)
    assert plotted_counts(3, 4, {3}) == (1, 2, 4)
    for answer in (None, 7, 100, 256):
        found = plotted_counts(answer, 256, {answer})
        assert 0 < len(found) <= MOST_PLOTTED
        assert answer not in found
        assert all(1 <= count <= 256 for count in found)


def test_plan_cluster_plots_time_and_cost_as_text_and_files(command: Command) -> None:
    plain = command(*BATCH)
    shown = command(*BATCH, "--plot")
    assert (shown.code, plain.code) == (0, 0), shown.err
    assert shown.out.startswith(plain.out), "a plot changes nothing else"
    added = shown.out.removeprefix(plain.out)
    assert [title for title in ("time until all jobs have ended", "\ncost\n") if title in added] != []
    assert "\ncost\n" in added
    assert re.search(r"- goal 2:00", added)
    assert max(map(len, added.splitlines())) <= 80
    for name in ("p.svg", "p.png"):
        assert f"wrote {name}" in command(*BATCH, "--plot", name).out
    assert ElementTree.parse("p.svg").getroot().tag.endswith("svg")
    with Image.open("p.png") as image:
        assert image.width > 600
    unpriced = command(*BATCH[:-2], "--plot").out
    assert "time until" in unpriced
    assert "\ncost\n" not in unpriced, "no price, no cost"
    latency = command(*BATCH[:4], "--latency", "2m", "--plot").out
    assert "time of 99% of the jobs" in latency


def test_json_stays_json_next_to_a_plot_in_a_file(command: Command) -> None:
    ended = command(*BATCH, "--plot", "p.svg", "--json")
    assert (ended.code, len(ended.objects)) == (0, 1)
    assert "wrote p.svg" in ended.err
    mixed = command(*BATCH, "--plot", "--json")
    assert (mixed.code, mixed.out) == (2, "")
    assert "a file with --json" in mixed.err


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text(f'[models]\nfolders = ["{SHAPES / "models"}"]\n[pool]\ndevice = "sim"\n')
    return str(path)


def test_plan_plots_seconds_against_memory_that_the_plan_itself_confirms(command: Command, config: str) -> None:
    arguments = ("plan", "shapes", "--size", "512x512", "--config", config)
    ended = command(*arguments, "--plot", "p.svg", "--json")
    assert ended.code == 0, ended.err
    (found,) = ended.objects
    curve = found["curve"]
    assert [memory for memory, _ in curve] == sorted({memory for memory, _ in curve})
    assert curve[0][0] <= found["vram_bytes"] or curve[0][0] == found["forecast"]["smallest_bytes"]
    for memory, seconds in (curve[0], curve[len(curve) // 2], curve[-1]):
        (again,) = command(*arguments, "--vram", f"{memory}B", "--json").objects
        assert again["forecast"]["seconds"] == seconds
    assert curve[0][1] > curve[-1][1], "a small GPU is slower"
    assert ElementTree.parse("p.svg").getroot().tag.endswith("svg")
    text = command(*arguments, "--plot").out
    assert "expected seconds of 1 image" in text
    assert "fully resident from" in text
    assert "GPU memory" in text
    assert json.loads(command(*arguments, "--json").out)["curve"] == []


@each_case(
    ("words", "said"),
    [
        (("--plot", "p.jpg"), "ends in .png"),
        (("--plot", "missing/p.svg"), "existing folder"),
        (("--plot=x",), "ends in"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_before_anything_is_simulated(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    for arguments in (BATCH, ("plan", "shapes")):
        ended = command(*arguments, *words)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
