"""Checks before a pool is started: folders that do not exist, and names that mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from modelpool.actors.client import start_checks
from modelpool.actors.client.client import ModelPool
from modelpool.actors.client.early_reading import EarlyReading
from modelpool.actors.client.start_checks import NameCheck, check_device, check_folders, simulates_gpus
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.outputs.output_check import check_outputs
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.files.formats.page_cache import in_memory
from modelpool.pool.values.core.errors import OutputFailed, UnknownName, UserError
from tests.architecture.source_tree import ROOT
from tests.pool.models.loading.test_diffusers_folders import both

LAPTOP = ROOT / "configs" / "laptop.toml"
#: imported by what starts a pool, and slow
SLOW = ("ray", "torch", "diffusers", "transformers", "numpy")


def request(**fields: object) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": "a", **fields})


def test_names_are_checked_as_the_catalog_checks_them() -> None:
    """By its own look-up: the same errors, with near names."""
    names = NameCheck.of(PoolConfig.load(LAPTOP))
    assert names.model_names() == ("shapes",)
    names.check(request(loras=["light:0.8", "outline"]))
    with pytest.raises(UnknownName, match="unknown model 'shapse'; did you mean 'shapes'"):
        names.check(request(model="shapse"))
    with pytest.raises(UnknownName, match="unknown LoRA 'lihgt'; did you mean 'light'"):
        names.check(request(loras=["lihgt"]))
    with pytest.raises(UnknownName, match="'light' is a LoRA, expected a model"):
        names.check(request(model="light"))


def test_fields_that_a_model_does_not_support_are_found_without_a_pool() -> None:
    """With the words of the pool, which was started for them."""
    names = NameCheck.of(PoolConfig.load(LAPTOP))
    wrong: dict[str, tuple[dict[str, object], str]] = {
        "frames": ({"frames": 9}, "frames: found 9, not supported by model 'shapes', which generates images"),
        "seconds": ({"seconds": 3}, "seconds: found 3.0, not supported by model 'shapes'"),
        "format": ({"format": "mp4"}, "format: found 'mp4', expected png or webp"),
        "lyrics": ({"lyrics": "la"}, "lyrics: found 'la', not supported by model 'shapes'"),
    }
    found = {}
    for name, (fields, _) in wrong.items():
        with pytest.raises(UserError) as problem:
            names.check_supported(request(**fields))
        found[name] = str(problem.value)
    assert {name: text[: len(wrong[name][1])] for name, text in found.items()} == {n: w[1] for n, w in wrong.items()}
    with pytest.raises(UserError, match=r"^frames: .* not videos; also format: found 'mp4'|^format: .*; also "):
        names.check_supported(request(frames=9, format="mp4", lyrics="la"))
    names.check_supported(request(width=64, height=72, loras=["light"]))
    names.check_supported(request(image=ROOT / "docs/contact_sheet.png", strength=0.5))  # a pool reads them first


def test_a_memory_limit_in_which_no_layer_fits_is_found_without_a_pool() -> None:
    """A pool was started for it."""
    for vram, problem in (("24KiB", "vram: found '24.0 KiB', expected more"), ("64MiB", None), (None, None)):
        config = PoolConfig.load(LAPTOP).override(vram=vram) if vram else PoolConfig.load(LAPTOP)
        with pytest.raises(UserError, match=problem) if problem else nullcontext():
            NameCheck.of(config).check_supported(request())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a file system of Linux")
def test_a_folder_in_which_nothing_can_be_created_is_reported_before_a_pool_starts(tmp_path: Path) -> None:
    """Permissions alone do not tell: /proc lets root write, a full disk everyone."""
    with pytest.raises(OutputFailed, match="/proc/images: cannot be written"):
        check_outputs(Path("/proc/images"))
    check_outputs(tmp_path / "new" / "images")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"address": "10.0.0.1:6379"}, {"address": "auto"}])
def test_what_other_machines_have_is_not_checked(change: dict[str, str], tmp_path: Path) -> None:
    config = PoolConfig.load(LAPTOP).override(models=[tmp_path / "of the nodes"], **change)
    check_folders(config)
    names = NameCheck.of(config)
    names.check(request(model="anything"))
    assert names.model_names() is None


@pytest.mark.parametrize("key", ["folders", "loras"])
def test_a_configured_folder_that_does_not_exist_is_an_error(key: str, tmp_path: Path) -> None:
    """It was an empty folder before, and the model in it unknown."""
    path = tmp_path / "pool.toml"
    path.write_text(f'[models]\n{key} = ["modles"]\n')
    with pytest.raises(UserError, match=rf"\[models\] {key}: found '{tmp_path}/modles', expected a folder that exists"):
        ModelPool.start(path, address="local")


def test_devices_that_this_machine_lacks_are_errors_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the words of the plan, which needs Ray for them."""
    config = PoolConfig.load(LAPTOP)
    monkeypatch.setattr(start_checks, "GPU_FILES", (str(tmp_path / "gpu"),))
    for device, workers, there, problem in (
        ("cuda", "all", False, "device: found 'cuda', expected sim or cpu on a machine without GPUs"),
        ("cuda", 1, True, None),
        ("mps", 2, False, "workers: found 2, expected 1: Ray cannot assign a separate"),
        ("mps", 1, False, None),
        ("cpu", 9, False, None),
        ("sim", 9, False, None),
        ("auto", 9, False, None),
    ):
        (tmp_path / "gpu").touch() if there else (tmp_path / "gpu").unlink(missing_ok=True)
        wanted = config.override(device=device, workers=workers)
        with pytest.raises(UserError, match=problem) if problem else nullcontext():
            check_device(wanted)
        if problem:
            with pytest.raises(UserError, match=problem):
                plan_pool(wanted, gpu_count=0, can_grow=False)
            check_device(wanted.override(address="10.0.0.1:6379"))


def test_a_pool_without_gpus_is_known_to_simulate_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, gpu = PoolConfig.load(LAPTOP), tmp_path / "gpu"
    monkeypatch.setattr(start_checks, "GPU_FILES", (str(gpu),))
    found = {}
    for device in ("sim", "auto", "cpu", "cuda"):
        for has_gpu in (False, True):
            gpu.touch() if has_gpu else gpu.unlink(missing_ok=True)
            found[device, has_gpu] = simulates_gpus(config.override(device=device))
    assert {case for case, simulates in found.items() if simulates} == {("sim", False), ("sim", True), ("auto", False)}
    gpu.unlink()
    assert not simulates_gpus(config.override(device="auto", address="10.0.0.1:6379")), "its nodes may have some"


def test_an_output_folder_that_cannot_be_created_is_reported_before_a_pool_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed, match="Not a directory"):
        ModelPool.start(LAPTOP, output=tmp_path / "file" / "images")


def test_wrong_names_are_reported_without_importing_what_starts_a_pool(tmp_path: Path) -> None:
    """The command itself, in a fresh interpreter."""
    program = (
        "import sys; from modelpool.actors.cli.main import run\n"
        f"code = run(['generate', 'a', '--model', 'shapse', '--out', 'p', '--config', {str(LAPTOP)!r}])\n"
        f"print(code, [name for name in {SLOW!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100
    )
    assert ended.stdout == "2 []\n"
    assert "did you mean 'shapes'" in ended.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a call of Linux")
def test_files_of_checked_names_are_read_while_the_pool_starts(tmp_path: Path) -> None:
    """And not those that do not fit into memory, nor one that is gone meanwhile."""
    found: list[Path] = []
    names = NameCheck.of(PoolConfig.load(LAPTOP), found.extend)
    for _ in range(2):
        names.check(request(loras=["light:0.8"]))
    assert [path.name for path in found] == ["shapes.safetensors", "light.safetensors"]

    files = [tmp_path / name for name in ("gone", "large", "model")]
    for path, size_bytes in zip(files[1:], (3 << 20, 2 << 20), strict=True):
        path.write_bytes(bytes(size_bytes))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(str(files[2]), [(0, 2 << 20)]):
        pytest.skip("this file system has no page cache")
    EarlyReading(most_bytes=2 << 20).add(files).join()
    until = time.monotonic() + 30
    while not in_memory(str(files[2]), [(0, 2 << 20)]):  # the system reads on
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not in_memory(str(files[1]), [(0, 3 << 20)])


def test_the_family_of_a_folder_is_that_which_the_pool_lists(tmp_path: Path) -> None:
    """It was "diffusers folder, StableDiffusionPipeline": nodes that need to know the family were refused."""
    _, folder = both(tmp_path)
    names = NameCheck.of(PoolConfig().override(models=[folder]))
    assert names.family_of("folder") == "Stable Diffusion 1"
