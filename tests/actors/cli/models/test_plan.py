"""`modelpool plan`: what it says of the shipped example, to people and to programs.

Proves: its figures are the figures of the tasks that a pool would cut for the same request; the limits that it names
hold when they are given back to it; errors in the command are told.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from modelpool.actors.cli.models.plan import ahead_bytes_of, as_plain, memory_for, memory_plan, plan_memory, tables_of
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices import capabilities
from modelpool.pool.devices.capabilities import default_device_kind
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.uploads import AHEAD_BYTES
from modelpool.pool.values.core.errors import MIB, DoesNotFit, UnknownName, UnusableField, UserError, parse_bytes
from modelpool.pool.values.specs.spec import JobId
from tests.architecture.source_tree import ROOT
from tests.pool.families.tiny_pairs import TINY, write_pair
from tests.pool.weights.quant.test_checkpoints import quantized

SHAPES = ROOT / "examples" / "shapes"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text(
        f'[models]\nfolders = ["{SHAPES / "models"}"]\nloras = ["{SHAPES / "loras"}"]\n[pool]\ndevice = "sim"\n'
    )
    return str(path)


def plan(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(plan_memory)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_figures_are_those_of_the_tasks_of_the_same_request(config: str) -> None:
    arguments = ("--size", "128x96", "--lora", "light:0.8", "--steps", "7", "--prompt", "a circle", "--vram", "64MiB")
    said = json.loads(plan("shapes", *arguments, "--config", config, "--json").stdout)
    request = GenerateRequest(
        model="shapes", prompt="a circle", loras=("light:0.8",), steps=7, width=128, height=96, seed=0
    )
    catalog = Catalog([SHAPES / "models"], [SHAPES / "loras"], "sim")
    _, cut = build_graph(request, JobId("j"), catalog)
    specs = {component.key: component for component in cut.components}
    stages = said["forecast"]["first"]
    assert len(stages) == len(cut.job.tasks) == 4
    for stage, task in zip(stages, cut.job.tasks, strict=True):
        (use,) = task.uses
        assert stage["stage"] == task.stage.value
        assert stage["components"] == [use.component]
        assert stage["activation_bytes"] == task.activation_bytes
        assert stage["scratch_bytes"] == use.scratch_bytes
        assert stage["weight_bytes"] == specs[use.component].weight_bytes
        assert stage["seconds"]["resident_run_seconds"] == task.run_seconds
    assert (said["width"], said["height"], said["steps"]) == (128, 96, 7)
    assert said["device_kind"] == "sim"


def test_the_limits_that_it_names_hold(config: str) -> None:
    def planned(vram: str):
        return memory_plan(
            "shapes", "", {"width": 256, "height": 256}, 2, None, PoolOptions(config=Path(config), vram=vram)
        )

    limits = planned("1GiB").forecast
    assert all(stage.division is None for stage in planned("1GiB").forecast.first)
    smallest = planned(str(limits.smallest_bytes))
    assert any(stage.division for stage in smallest.forecast.first)
    assert smallest.forecast.seconds > limits.seconds
    with pytest.raises(DoesNotFit, match=r"needs at least .* the budget is"):
        planned(str(limits.smallest_bytes - 1))
    assert all(stage.upload_bytes == 0 for stage in planned(str(limits.resident_bytes)).forecast.again)


def test_people_are_told_what_is_assumed_and_what_a_batch_would_take(config: str) -> None:
    said = plan("shapes", "--size", "256x256", "--vram", "16MiB", "--batch", "4", "--config", config).stdout
    assert "link 12 GB/s, assumed; compute speed is a rough estimate" in said
    assert re.search(r"^later images +weights", said, re.MULTILINE)
    assert re.search(r"^decode, tiles of \d+ ", said, re.MULTILINE)
    assert re.search(r"^4 images +one at a time: about ", said, re.MULTILINE)
    assert re.search(
        r"^as one batch +activations of sample .*; the pool runs one image at a time \(batch_limit is 1\)$",
        said,
        re.MULTILINE,
    )
    assert re.search(r"^minimum +\d", said, re.MULTILINE)
    assert re.search(r"^sample +shapes/diffusion_model@\w+: .* streams: ", said, re.MULTILINE)


@pytest.mark.parametrize(("limit", "so_many"), [(2, "up to 2"), (4, "all"), (9, "all")])
def test_what_is_said_of_a_batch_is_what_the_configuration_lets_a_pool_do(
    config: str, tmp_path: Path, limit: int, so_many: str
) -> None:
    """Found in a review: the pool was said not to run batches where it was configured to."""
    path = tmp_path / "batches.toml"
    path.write_text(f"{Path(config).read_text()}\n[scheduler]\nbatch_limit = {limit}\n")
    found = memory_plan("shapes", "", {}, 4, None, PoolOptions(config=path, vram="1GiB"))
    assert found.batch_limit == limit
    said = plan("shapes", "--vram", "1GiB", "--batch", "4", "--config", str(path)).stdout
    assert f"with batch_limit {limit} the pool batches {so_many} images if they fit" in said


def test_both_models_of_a_pair_are_planned_and_told_apart(tmp_path: Path) -> None:
    """Found in a review: what a batch takes was that of the second model, which may ask for less, and two rows were
    called the same."""
    (tmp_path / "pair").mkdir()
    write_pair(tmp_path / "pair", TINY["wan_t2v"])
    config = tmp_path / "pair.toml"
    config.write_text(f'[models]\nfolders = ["{tmp_path / "pair"}"]\n[pool]\ndevice = "sim"\n')

    def planned(cfg: int, low_cfg: int):
        fields = {"width": 64, "height": 64, "frames": 5, "steps": 8, "cfg": cfg, "low_noise": low_cfg}
        return memory_plan("tiny", "", fields, 2, None, PoolOptions(config=config, vram="64MiB"))

    first, second, neither = (planned(*strengths) for strengths in ((4, 1), (1, 4), (1, 1)))
    assert first.batch_bytes == second.batch_bytes
    assert first.batch_bytes["sample"] > neither.batch_bytes["sample"]
    assert [stage.sampled_by for stage in first.forecast.first] == ["", "high noise", "low noise", ""]
    assert [stage["sampled_by"] for stage in as_plain(first)["forecast"]["first"]][1:3] == ["high noise", "low noise"]
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in tables_of(first):
        console.print(part)
    assert re.search(r"^ *sample, high noise .*\n *sample, low noise ", console.export_text(), re.MULTILINE)


def test_a_gpu_keeps_room_for_copies_ahead(config: str) -> None:
    said = json.loads(plan("shapes", "--device", "cuda", "--vram", "1GiB", "--config", config, "--json").stdout)
    assert said["ahead_bytes"] == ahead_bytes_of("cuda", 1 << 30) == (1 << 30) // 32
    assert said["forecast"]["capacity_bytes"] == (1 << 30) - said["ahead_bytes"]


@pytest.mark.parametrize("more", [(), ("--reserve-vram", "100MiB"), ("--vram-policy", "high")], ids=str)
@pytest.mark.parametrize("device", ["sim", "cuda"])
def test_the_figure_of_a_refusal_is_enough(config: str, device: str, more: tuple[str, ...]) -> None:
    """Found in a review: on cuda the figure left out the copies ahead, and was refused when it was given."""
    arguments = ("--size", "256x256", "--device", device, *more, "--config", config)
    with pytest.raises(DoesNotFit) as refused:
        plan("shapes", "--vram", "1MiB", *arguments)
    named = re.search(r"needs at least (\S+ \S+) of device memory, the budget is 1\.0 MiB", str(refused.value))
    assert named is not None
    assert plan("shapes", "--vram", named[1], *arguments).exit_code == 0
    with pytest.raises(DoesNotFit):
        plan("shapes", "--vram", str(parse_bytes(named[1]) - (MIB // 5)), *arguments)


def test_without_a_device_it_is_for_what_a_pool_here_would_use(config: str, tmp_path: Path) -> None:
    """Found in a review: without a GPU cuda was assumed, with the 64 MiB of the preset for simulated ones."""
    path = tmp_path / "auto.toml"
    path.write_text(Path(config).read_text().replace('device = "sim"', 'vram = "64MiB"'))
    kinds = {DeviceKind.CUDA: "cuda", DeviceKind.XPU: "xpu", DeviceKind.MPS: "sim", DeviceKind.CPU: "sim"}
    for here, expected in kinds.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capabilities, "default_device_kind", lambda here=here: here)
            found = memory_plan(
                "shapes", "", {}, 4, None, PoolOptions(config=Path(config).parent / "auto.toml", vram="1GiB")
            )
        assert found.device_kind == expected
    if default_device_kind().computes_on_host:
        assert plan("shapes", "--batch", "4", "--config", str(path)).exit_code == 0


def test_gpus_that_share_a_run_are_planned_with_what_they_hold_for_each_other(config: str) -> None:
    """With memory for three quarters of the model, two GPUs with a fast link read nothing from the host in a step; with
    a slow one, or none, as much as one GPU, and the plan of one GPU is in the table, too."""
    arguments = ("shapes", "--gpus-per-output", "auto", "--config", config, "--vram", "8MiB")
    found = {}
    for link in ("300GB", "13GB", ""):
        said = json.loads(plan(*arguments, *(("--gpu-link", link) if link else ()), "--json").stdout)
        found[link] = {each["gpus"]: each for each in said["gangs"]}
        assert sorted(found[link]) == [1, 2]
        (sampling,) = [stage for stage in said["forecast"]["first"] if stage["stage"] == "sample"]
        steps = said["steps"]
        assert found[link][1]["host_bytes"] == sampling["streamed_bytes"] // steps > 0
        assert found[link][1]["resident_bytes"] >= sampling["resident_bytes"]
    fast, host = found["300GB"], found[""]
    assert fast[2]["host_bytes"] == 0
    assert fast[2]["peer_bytes"] > 0
    assert fast[2]["share_bytes"] + fast[2]["resident_bytes"] <= fast[1]["resident_bytes"] + 1
    assert fast[2]["step_seconds"] < host[2]["step_seconds"]
    assert found["13GB"][2] == host[2]
    assert host[2]["host_bytes"] == host[1]["host_bytes"]
    shown = plan(*arguments, "--gpu-link", "300GB").stdout
    assert re.search(r"GPUs that share a run, GPU link 300 GB/s", shown)
    assert "GPU link unknown (--gpu-link)" in plan(*arguments).stdout
    assert "GPUs that share a run" not in plan("shapes", "--config", config, "--vram", "8MiB").stdout
    with pytest.raises(UnusableField, match="--gpu-link: found 'fast'"):
        plan(*arguments, "--gpu-link", "fast")


def test_policy_and_reserve_count(config: str) -> None:
    """Found in a review: both were ignored."""
    arguments = ("shapes", "--vram", "1GiB", "--config", config, "--json")
    none, disabled = (json.loads(plan(*arguments, "--vram-policy", name).stdout) for name in ("none", "disabled"))
    assert (none["policy"], none["forecast"]["resident_bytes"]) == ("none", None)
    assert all(stage["resident_bytes"] == 0 for stage in none["forecast"]["first"])
    assert disabled["device_kind"] == "cpu"
    reserved = ("--reserve-vram", "256MiB")
    cuda = json.loads(plan(*arguments, *reserved, "--device", "cuda").stdout)
    assert cuda["forecast"]["capacity_bytes"] == (768 << 20) - ahead_bytes_of("cuda", 768 << 20)
    sim = json.loads(plan(*arguments, *reserved).stdout)
    assert sim["forecast"]["capacity_bytes"] == 1 << 30
    said = plan("shapes", "--vram", "1GiB", *reserved, "--device", "cuda", "--config", config).stdout
    assert "of which 256.0 MiB reserved for other programs and 24.0 MiB used for copies ahead" in said


@pytest.mark.parametrize("capacity_bytes", [0, 1, 31, 10**6 + 7, 8 << 30, 200 << 30])
def test_memory_for_a_capacity_is_the_least_that_leaves_it(capacity_bytes: int) -> None:
    memory_bytes = memory_for(capacity_bytes, "cuda")
    assert memory_bytes - ahead_bytes_of("cuda", memory_bytes) >= capacity_bytes
    if memory_bytes:
        assert memory_bytes - 1 - ahead_bytes_of("cuda", memory_bytes - 1) < capacity_bytes
    assert memory_bytes <= capacity_bytes + AHEAD_BYTES
    assert memory_for(capacity_bytes, "sim") == capacity_bytes


def test_what_is_wrong_is_told(config: str) -> None:
    with pytest.raises(DoesNotFit, match="needs at least"):
        plan("shapes", "--vram", "100KiB", "--config", config)
    with pytest.raises(UnusableField, match="--batch"):
        plan("shapes", "--batch", "0", "--config", config)
    with pytest.raises(UnknownName, match="shape"):
        plan("sheeps", "--vram", "1GiB", "--config", config)
    with pytest.raises(UserError, match="--vram"):
        plan("shapes", "--device", "cuda", "--config", config)
    with pytest.raises(UnusableField, match="--link: found 'fast'"):
        plan("shapes", "--link", "fast", "--config", config)


def test_kernels_of_quantized_weights_are_shown_with_their_costs(tmp_path: Path) -> None:
    packed = quantized(load_file(SHAPES / "models/shapes.safetensors"), "float8_e4m3fn", {})
    save_file(packed, tmp_path / "fp8.safetensors")
    path = tmp_path / "some.toml"
    path.write_text(f'[models]\nfolders = ["{tmp_path}"]\n[pool]\ndevice = "sim"\nproducts = "reference"\n')
    kernels = json.loads(plan("fp8", "--config", str(path), "--json").stdout)["kernels"]
    assert list(kernels) == ["diffusion_model"]
    used = {cost["kernel"]: cost["is_used"] for cost in kernels["diffusion_model"]}
    assert used == {"unpack": False, "native": False, "reference": True}
    native = kernels["diffusion_model"][1]
    assert native["why"].endswith(" has none")
    layers = sum(1 for key in packed if key.endswith(".comfy_quant") and packed[key[:-11] + "weight"].dim() == 2)
    assert all(cost["layers"] == layers for cost in kernels["diffusion_model"])
    said = plan("fp8", "--config", str(path)).stdout
    assert "reference (used)" in said


def test_the_calls_of_a_model_are_as_its_own_settings_say(tmp_path: Path) -> None:
    for own, device, expected in (
        ("", "cpu", "compiled blocks"),
        ("", "sim", "as usual"),
        ('[pool.models.shapes]\ncompile = "off"\n', "cpu", "as usual"),
        ("[pool.models.shapes]\ncuda_graphs = true\n", "cuda", "compiled blocks, CUDA graphs"),
    ):
        path = tmp_path / "some.toml"
        path.write_text(f'[models]\nfolders = ["{SHAPES}"]\n[pool]\ndevice = "{device}"\ncompile = "blocks"\n{own}')
        arguments = "shapes", "--vram", "1GiB", "--config", str(path)
        assert json.loads(plan(*arguments, "--json").stdout)["calls"] == expected
    assert re.search(rf"model calls +{expected}", plan(*arguments).stdout)


def test_plans_of_plain_weights_show_no_kernels(config: str) -> None:
    assert json.loads(plan("shapes", "--config", config, "--json").stdout)["kernels"] == {}


def test_people_are_told_the_batch_size_of_a_job_file_and_why(tmp_path: Path, config: str) -> None:
    """As measured for the size, in this memory, and as the configuration says."""
    text = Path(config).read_text()
    said = plan("shapes", "--vram", "64MiB", "--config", config).stdout
    assert re.search(r"^in a job file +8 images per forward pass: 2.5 times the images of single", said, re.MULTILINE)
    small = plan("shapes", "--vram", "16MiB", "--config", config).stdout
    assert re.search(r"^in a job file +\d images? per forward pass: 8 do not fit in 16.0 MiB", small, re.MULTILINE)
    path = tmp_path / "three.toml"
    path.write_text(
        text.replace("[pool]\n", "[pool]\nbatch = 3\n") if "[pool]" in text else f"{text}\n[pool]\nbatch = 3\n"
    )
    assert memory_plan("shapes", "a", {}, 1, None, PoolOptions(config=str(path), vram="1GiB")).job_file_batch == 3
