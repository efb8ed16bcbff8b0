"""Who may import whom. modelpool.py -> actors -> {scheduler, pool}; scheduler -> torch-free pool; pool -> torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.architecture.source_tree import (
    PACKAGES,
    PRODUCT_FOLDERS,
    ROOT,
    STANDARD_LIBRARY,
    TORCH_FREE,
    Module,
    product_modules,
)
from tests.architecture.source_tree import test_modules as all_test_modules

#: what would make a decision depend on when or where it is made
OUTSIDE_WORLD = {
    "time", "datetime", "random", "secrets", "uuid", "threading", "asyncio", "multiprocessing", "concurrent", "signal",
    "socket", "subprocess", "logging", "tempfile", "shutil",
}  # fmt: skip


def offenders(modules: list[Module], forbidden: set[str]) -> list[str]:
    """The modules that import any package of `forbidden`."""
    return [f"{m.place} imports {', '.join(sorted(bad))}" for m in modules if (bad := m.imported_packages & forbidden)]


def test_only_actors_and_scripts_import_ray() -> None:
    allowed = ("actors", "scripts")
    beside = ("benchmarks/priced_controller.py", "benchmarks/ray_systems.py", "benchmarks/task_price.py")
    modules = [m for m in product_modules() if m.place.split("/")[0] not in allowed and m.place not in beside]
    assert offenders(modules, {"ray"}) == []


def test_only_the_tests_of_actors_import_ray() -> None:
    modules = [m for m in all_test_modules() if not m.place.startswith(("tests/actors/", "tests/gpu/"))]
    assert offenders(modules, {"ray"}) == []


def test_pool_knows_nothing_above_it() -> None:
    above = {
        "ray",
        "scheduler",
        "actors",
        "modelpool",
        "scripts",
        "examples",
        "benchmarks",
        "typer",
        "rich",
        "pydantic",
    }
    assert offenders(product_modules("pool"), above) == []


def test_the_scheduler_is_standard_library_and_sizes() -> None:
    """Beside itself and the standard library: pool's names, sizes, byte arithmetic and errors."""
    sizes = ("spec", "sent", "residency", "ahead", "outlook", "division", "errors")
    allowed = ("scheduler", *(f"pool.{name}" for name in sizes))
    for module in product_modules("scheduler"):
        for name in module.imports - {"pool"}:
            known = name.split(".")[0] in STANDARD_LIBRARY or any(
                name == a or name.startswith(a + ".") for a in allowed
            )
            assert known, f"{module.place} imports {name}"


@pytest.mark.parametrize("folder", ["scheduler", *TORCH_FREE])
def test_decisions_see_no_clock_no_chance_no_thread_no_environment(folder: str) -> None:
    if folder == "scheduler":
        modules = product_modules("scheduler")
    else:
        modules = [m for m in product_modules("pool") if m.name == folder]
    assert modules, f"{folder}: no such module"
    # made-up arrivals are drawn from a seed, and some peers place by chance; the core never sees how
    drawn = [m for m in modules if m.name.startswith(("scheduler.workloads.", "benchmarks.lab."))]
    assert offenders(drawn, OUTSIDE_WORLD - {"random"}) == []
    assert offenders([m for m in modules if m not in drawn], OUTSIDE_WORLD) == []
    for module in modules:
        reads = [n for n in ast.walk(module.tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not reads, f"{module.place}:{reads[0].lineno} reads the environment"


def test_torch_stays_where_the_gpu_is() -> None:
    """Not in the scheduler, the torch-free modules, the command line or what is left on disk."""
    modules = [
        m
        for m in product_modules()
        if m.place.startswith(("scheduler/", "actors/cli/", "actors/outputs/")) or m.name in (*TORCH_FREE, "modelpool")
    ]
    assert offenders(modules, {"torch", "diffusers", "transformers", "safetensors"}) == []


def test_settings_and_terminals_stay_at_the_edge() -> None:
    inner = [m for m in product_modules("pool", "scheduler", "actors") if not m.place.startswith("actors/cli/")]
    assert offenders(inner, {"typer", "rich"}) == []


def test_the_command_line_and_outputs_are_leaves() -> None:
    """Nothing in actors builds on the command line; outputs build on recipes and pool only."""
    for module in product_modules("actors"):
        if not module.place.startswith("actors/cli/"):
            assert not any(name.startswith("actors.cli") for name in module.imports), module.place
    for module in product_modules("actors/outputs"):
        ours = {name for name in module.imports if name.split(".")[0] == "actors"}
        strangers = {n for n in ours if not n.startswith(("actors.outputs", "modelpool.actors.graph.recipe"))} - {
            "actors"
        }
        assert not strangers, f"{module.place} imports {strangers}"


def test_the_face_has_no_other_body() -> None:
    face = Module(ROOT / "modelpool.py")
    assert {name.split(".")[0] for name in face.imports} & set(PRODUCT_FOLDERS) <= {"actors", "pool"}


@pytest.mark.parametrize("name", ["modelpool.scheduler.simulator.cluster", *TORCH_FREE])
def test_a_fresh_interpreter_finds_neither_torch_nor_ray(name: str) -> None:
    code = (
        f"import sys, {name}\n"
        "heavy = {'torch', 'ray', 'diffusers', 'transformers', 'pydantic', 'actors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_module_has_a_name_of_the_standard_library() -> None:
    names = {m.place: m.path.stem if m.path.stem != "__init__" else m.path.parent.name for m in product_modules()}
    assert {place for place, name in names.items() if name in STANDARD_LIBRARY} == set()
    assert not set(PACKAGES) & STANDARD_LIBRARY
