"""Which package may import which: modelpool -> actors -> {scheduler, pool}; scheduler -> torch-free pool."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.architecture.source_tree import (
    PACKAGES,
    PRODUCT_FOLDERS,
    ROOT,
    STANDARD_LIBRARY,
    TORCH_FREE,
    Module,
    product_modules,
    syntax,
)
from tests.architecture.source_tree import (
    test_modules as all_test_modules,
)

#: what would make a decision depend on when or where it is made
OUTSIDE_WORLD = {
    "time", "datetime", "random", "secrets", "uuid", "threading", "asyncio", "multiprocessing", "concurrent", "signal",
    "socket", "subprocess", "logging", "tempfile", "shutil",
}  # fmt: skip
#: the modules that define particular families
DEFINITIONS = ROOT / "pool/families/definitions"
#: benchmarks that compare with Ray's own libraries
RAY_BENCHMARKS = ("benchmarks/priced_controller.py", "benchmarks/ray_systems.py", "benchmarks/task_price.py")
#: imports each module of the list in a fresh interpreter forked from a light parent; prints {module: heavy packages}
HEAVY_IMPORTS = """
import importlib, json, os, sys
found = {}
for name in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        importlib.import_module(name)
        heavy = {"torch", "ray", "diffusers", "transformers", "pydantic", "modelpool.actors"} & set(sys.modules)
        os.write(write, json.dumps(sorted(heavy)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found[name] = answer.read() or "did not import"
    os.wait()
print(json.dumps({name: heavy for name, heavy in found.items() if heavy != "[]"}))
"""
#: what a driver imports; and what it does not need until it is called, by the start of the name: libraries of the GPU
#: and of the cluster, the controller with the scheduler's decisions, and what reads weights and builds graphs
DRIVER = "modelpool.actors.client.client"
NOT_IN_DRIVERS = (
    "torch", "diffusers", "transformers", "safetensors", "ray", "typer", "rich", "psutil", "http.client",
    "modelpool.scheduler.core", "modelpool.scheduler.decisions", "modelpool.scheduler.autoscaling",
    "modelpool.scheduler.simulator", "modelpool.actors.control.controller", "modelpool.actors.control.status",
    "modelpool.actors.graph.all_features", "modelpool.actors.graph.build_graph", "modelpool.actors.worker.gpu_worker",
    "modelpool.actors.ray", "modelpool.actors.http", "modelpool.actors.cli", "modelpool.pool.families.definitions",
    "modelpool.pool.families.detection", "modelpool.pool.models.loading", "modelpool.pool.models.components",
    "modelpool.pool.catalog", "modelpool.pool.engine", "modelpool.pool.weights.patcher", "modelpool.pool.weights.vram",
)  # fmt: skip
DRIVER_MODULES = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def offenders(modules: list[Module], forbidden: set[str]) -> list[str]:
    """The modules that import any package of `forbidden`."""
    return [f"{m.place} imports {', '.join(sorted(bad))}" for m in modules if (bad := m.imported_packages & forbidden)]


def family_imports(modules: Iterable[Module]) -> list[str]:
    """The imports of the modules of particular families by modules outside of `pool/families`."""
    definitions = {f"modelpool.pool.families.definitions.{path.stem}" for path in DEFINITIONS.glob("[!_]*.py")}
    return [
        f"{module.place} imports {name}"
        for module in modules
        if not module.place.startswith("pool/families/")
        for name in sorted(module.imports & definitions)
    ]


def test_no_module_outside_the_families_imports_a_particular_family() -> None:
    """Facts of a family are fields of its value, and shared mechanisms are in `pool/families/parts`."""
    assert family_imports(product_modules(*PACKAGES)) == []


def test_an_import_of_a_particular_family_is_found() -> None:
    (own,) = (module for module in all_test_modules() if module.place == "tests/pool/families/definitions/test_sana.py")
    assert family_imports([own]) == [f"{own.place} imports modelpool.pool.families.definitions.sana"]


def test_imports_inside_of_all_statements_are_found(tmp_path: Path) -> None:
    lines = ["try:", " import a.b", "except E:", " import c", "else:", " from d import e", "finally:", " import f"]
    lines += ["match x:", " case 1:", "  import g", "if p: import h", "elif q: import i", "else: import j"]
    lines += ["with y:", " for z in q:", "  while 1:", "   async def k():", "    class L:", "     import m; import n"]
    path = tmp_path / "planted.py"
    path.write_text("\n".join(lines))
    assert Module(path).imports == {"a.b", "d.e", *"cdfghijmn"}


def test_every_import_of_this_repository_names_something_in_it() -> None:
    """Found: six files of tests imported a module by its former name, `from folder import module`."""
    modules = [*product_modules(), *all_test_modules()]
    assert not sorted(f"{module.place}: {name}" for module in modules for name in _missing(module.imports))


def test_an_import_of_a_module_that_is_not_there_is_found() -> None:
    there = {"modelpool.ModelPool", "modelpool.actors", "modelpool.pool.values.core.errors.UserError", "torch.x"}
    missing = {"modelpool.actors.control.gone", "modelpool.gone", "tests.gone.module", "tests.tiers.module.name"}
    assert _missing(there | missing) == missing


def _missing(names: Iterable[str]) -> set[str]:
    """Names of this repository without a module. Names in a module are left to the types."""
    return {name for name in names if name.split(".")[0] in ("modelpool", "tests") and not _is_there(name)}


@cache
def _is_there(name: str) -> bool:
    if name.startswith(tuple(f"modelpool.{package}." for package in PACKAGES)):
        name = name.removeprefix("modelpool.")
    if name in (f"modelpool.{package}" for package in PACKAGES):
        return True
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file():
        return True
    return path.name in _names_of_package(path.parent)


@cache
def _names_of_package(folder: Path) -> frozenset[str]:
    """Names that a package has besides its modules: what it imports and defines, and the texts of lazy ones."""
    file = folder / "__init__.py"
    found: set[str] = set()
    for node in ast.walk(syntax(file)) if file.is_file() else ():
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def test_only_actors_and_scripts_import_ray() -> None:
    allowed = ("actors", "scripts")
    modules = [m for m in product_modules() if m.place.split("/")[0] not in allowed and m.place not in RAY_BENCHMARKS]
    # a folder of actors is called ray too; only the library is meant
    assert offenders(modules, {"ray"}) == []


def test_only_the_tests_of_actors_import_ray() -> None:
    modules = [m for m in all_test_modules() if not m.place.startswith(("tests/actors/", "tests/gpu/"))]
    assert offenders(modules, {"ray"}) == []


def test_the_pool_imports_nothing_above_it() -> None:
    above = {"ray", "scheduler", "actors", "scripts", "examples", "benchmarks", "typer", "rich", "pydantic"}
    assert offenders(product_modules("pool"), above) == []


def test_the_scheduler_imports_the_standard_library_and_torch_free_pool() -> None:
    allowed = (
        "modelpool.scheduler",
        "modelpool.pool.values.specs",
        "modelpool.pool.weights.plan",
        "modelpool.pool.values.core.errors",
    )
    problems = [
        f"{module.place} imports {name}"
        for module in product_modules("scheduler")
        for name in sorted(module.imports - {"modelpool", "modelpool.pool", "modelpool.pool.values.core"})
        if name.split(".")[0] not in STANDARD_LIBRARY
        and not any(name == a or name.startswith(a + ".") for a in allowed)
    ]
    assert problems == []


def test_decisions_use_no_clock_no_chance_no_thread_and_no_environment() -> None:
    """The scheduler and the torch-free modules of pool. Synthetic arrivals and nodes are drawn from a seed."""
    torch_free = [m for m in product_modules("pool") if m.name in TORCH_FREE]
    assert {m.name for m in torch_free} == set(TORCH_FREE)
    modules = [*product_modules("scheduler"), *torch_free]
    drawn = (
        "modelpool.scheduler.simulator.workloads.",
        "modelpool.scheduler.simulator.policy",
        "modelpool.scheduler.simulator.scaled_run",
    )
    problems = offenders([m for m in modules if m.name.startswith(drawn)], OUTSIDE_WORLD - {"random"})
    problems += offenders([m for m in modules if not m.name.startswith(drawn)], OUTSIDE_WORLD)
    problems += [
        f"{module.place}:{node.lineno} reads the environment"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert problems == []


def test_torch_stays_where_the_gpu_is() -> None:
    """Not in the scheduler, the torch-free modules, the command line or the output files."""
    light = ("scheduler/", "actors/cli/", "actors/outputs/", "modelpool/")
    modules = [m for m in product_modules() if m.place.startswith(light) or m.name in TORCH_FREE]
    assert offenders(modules, {"torch", "diffusers", "transformers", "safetensors"}) == []


def test_settings_and_terminals_stay_at_the_edge() -> None:
    inner = [m for m in product_modules("pool", "scheduler", "actors") if not m.place.startswith("actors/cli/")]
    assert offenders(inner, {"typer", "rich"}) == []


def test_modelpool_itself_imports_actors_and_pool_only() -> None:
    for module in product_modules():
        if module.place.startswith("modelpool/"):
            assert module.imported_packages & set(PRODUCT_FOLDERS) <= {"actors", "pool"}, module.place


def test_torch_free_modules_load_neither_torch_nor_ray() -> None:
    names = ["modelpool.scheduler.simulator.cluster", *TORCH_FREE]
    done = subprocess.run(
        [sys.executable, "-c", HEAVY_IMPORTS, json.dumps(names)],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert json.loads(done.stdout) == {}


def not_for_drivers(imported: Iterable[str]) -> list[str]:
    """The modules that a driver must not import, in front of what it uses them for."""
    return [name for name in imported if any(f"{name}.".startswith(f"{start}.") for start in NOT_IN_DRIVERS)]


def imported_by(*names: str) -> list[str]:
    """All modules that a fresh interpreter has after it imported these."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER_MODULES, *names],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_a_driver_imports_neither_the_controller_nor_libraries_of_the_gpu() -> None:
    """Half of the modules, and of the CPU time of the import, were the controller's and the families'."""
    assert not_for_drivers(imported_by(DRIVER, "modelpool.actors.client.jobs", "modelpool")) == []


def test_an_import_that_drivers_do_not_need_is_found() -> None:
    imported = imported_by(DRIVER, "modelpool.scheduler.core.state", "modelpool.pool.models.loading.file_parts")
    found = not_for_drivers(imported)
    assert {"modelpool.scheduler.core.state", "modelpool.pool.models.loading.file_parts"} < set(found)


def test_no_top_level_module_has_a_name_of_the_standard_library() -> None:
    assert not {*PACKAGES, *PRODUCT_FOLDERS, "modelpool"} & STANDARD_LIBRARY
