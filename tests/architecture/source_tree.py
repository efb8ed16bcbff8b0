"""The files of this repository, as the tests of its shape see them."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pool", "scheduler", "actors")
PRODUCT_FOLDERS = (*PACKAGES, "scripts", "examples", "benchmarks")
TEXT_FOLDERS = (*PRODUCT_FOLDERS, "configs", "docs", "tests", ".ci")
TEXT_SUFFIXES = {".py", ".toml", ".md", ".txt", ".sh", ".jsonl", ".csv", ".cfg", ".ini", ".yaml", ".yml", ""}
#: modules of pool that a process without torch may import
TORCH_FREE = (
    "modelpool.pool.values.specs.name_types",
    "modelpool.pool.values.specs.wire_value",
    "modelpool.pool.values.specs.resident",
    "modelpool.pool.values.specs.moves",
    "modelpool.pool.values.specs.spec",
    "modelpool.pool.weights.plan.eviction_plan",
    "modelpool.pool.weights.plan.peer_shares",
    "modelpool.pool.weights.plan.preload_plan",
    "modelpool.pool.values.specs.eviction_hints",
    "modelpool.pool.values.specs.execution_modes",
    "modelpool.pool.weights.plan.plan_time",
    "modelpool.pool.values.core.decision",
    "modelpool.pool.engine.load_devices",
    "modelpool.pool.devices.kind_names",
    "modelpool.pool.devices.vram_policy",
    "modelpool.pool.weights.plan.oom_ladder",
    "modelpool.pool.weights.plan.residency_reasons",
    "modelpool.pool.weights.plan.partial_loads",
    "modelpool.pool.values.core.errors",
    "modelpool.pool.values.core.argument_checks",
    "modelpool.pool.values.core.stage_params",
    "modelpool.pool.inference.sampling.sampler_names",
)


#: where a statement has others: blocks, and the handlers and cases that have blocks
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Module:
    """One Python file of the product."""

    path: Path

    @property
    def place(self) -> str:
        """Its path from the root, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        """Its dotted name: "modelpool.pool.values.core.errors" for pool/values/core/errors.py."""
        name = ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        return f"modelpool.{name}" if name.split(".")[0] in PACKAGES else name

    @property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return _parsed(self.path)

    @property
    def imports(self) -> frozenset[str]:
        """Dotted names of all that it imports anywhere in it, `from a import b` as both "a" and "a.b"."""
        return _imported(self.path)

    @property
    def imported_packages(self) -> set[str]:
        """The packages that it imports: "pool" for modelpool.pool.values.core, "torch" for torch.nn."""
        return {name.removeprefix("modelpool.").split(".")[0] for name in self.imports}


@cache
def _parsed(path: Path) -> ast.Module:
    return syntax(path)


def syntax(path: Path) -> ast.Module:
    """Return the syntax of a file, which nothing keeps: trees of all modules keep the garbage collector busy."""
    # none of a tree is garbage: collections meanwhile took twice as long as the parser
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        if was_enabled:
            gc.enable()


@cache
def _imported(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in _statements(syntax(path).body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; say the whole name"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements of a module, also those inside of others, without their expressions."""
    return _statements(tree.body)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, also those inside of others, without their expressions: most of a tree are expressions."""
    for node in body:
        yield node
        for inner in _BODIES:
            yield from _statements(getattr(node, inner, ()))


def product_modules(*folders: str) -> list[Module]:
    """Every module under `folders`; by default all of the product and the modules of modelpool itself."""
    paths = [path for folder in folders or PRODUCT_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    if not folders:
        paths.extend(sorted((ROOT / "modelpool").glob("*.py")))
    return [Module(path) for path in paths]


def test_modules() -> list[Module]:
    """Every module of the tests."""
    return [Module(path) for path in sorted((ROOT / "tests").rglob("*.py"))]


def text_files() -> Iterator[Path]:
    """Every text file that belongs to the repository, the licence left out (it is not ours to word)."""
    roots = [path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE"]
    nested = [path for folder in TEXT_FOLDERS if (ROOT / folder).is_dir() for path in (ROOT / folder).rglob("*")]
    nested.extend((ROOT / "modelpool").glob("*.py"))
    for path in sorted([*roots, *nested]):
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
            yield path


STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
