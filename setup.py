"""Build configuration besides pyproject.toml: pure Python, or with the scheduler core compiled by mypyc.

    MODELPOOL_COMPILE=1 pip install .

compiles the core: the same sources and the same decisions in less time. Constructors of dataclasses are added to what
is compiled (`with_constructors`). Every module is installed as Python too, for machines whose Python or system the
compiled ones do not support. An editable install is pure Python; nothing is ever compiled into the source folder.
"""

from __future__ import annotations

import ast
import os
import shutil
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext

#: Folders whose modules are compiled: the decisions of the core, and the values that it reads and creates. Values that
#: travel between processes derive from `pool.values.specs.wire_value.WireValue`: a compiled frozen dataclass cannot be
#: unpickled otherwise.
COMPILED_FOLDERS = (
    "pool/values/specs",
    "pool/weights/plan",
    "scheduler/model",
    "scheduler/decisions/costs",
    "scheduler/decisions/queue",
    "scheduler/decisions/placement",
    "scheduler/core",
)
#: modules of those folders that stay Python: frozen dataclasses that are pickled without deriving from `WireValue`, and
#: parts of the configuration, whose types pydantic reads at run time: a compiled class knows `int | None` as `type`
NOT_COMPILED = (
    "scheduler/model/config.py",
    "scheduler/model/gpu_kinds.py",
    "scheduler/model/node_groups.py",
    "scheduler/model/oom_escalation.py",
    "scheduler/model/story_lines.py",
    "scheduler/model/user_share.py",
    "scheduler/core/history.py",
    "scheduler/core/snapshot.py",
)
#: compiled classes from which classes that stay Python derive, which mypyc refuses otherwise, by their module
BASES_OF_PYTHON = {"pool/values/specs/wire_value.py": "WireValue"}
#: the library that the compiled modules share: inside a package, because packages are what is shipped to other nodes
LIBRARY = "modelpool.scheduler.compiled"
COMPILER = "mypy>=2"
#: modules whose types are checked for that: the scheduler and its imports from the pool. Not torch, which takes minutes
TYPES = """
[mypy]
python_version = 3.11
explicit_package_bases = true
namespace_packages = true
follow_imports = skip

[mypy-modelpool.scheduler.*,modelpool.pool.values.specs.*,modelpool.pool.weights.plan.*,modelpool.pool.values.core.errors]
follow_imports = normal
"""


class WithCompiledCore(Distribution):
    """A distribution whose wheel is specific to a Python version and platform, unless it is editable."""

    def has_ext_modules(self) -> bool:
        return not {"editable_wheel", "develop"}.intersection(self.commands)


class BuildCore(build_ext):
    """Translates the modules to C, and compiles that to libraries, both under the build folder."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("opt-level=", None, "optimisation level of the C compiler: 0 to 3"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.opt_level = "3"

    def finalize_options(self) -> None:
        if not (self.editable_mode or self.inplace):
            self.set_undefined_options("build", ("build_temp", "build_temp"))
            self.distribution.ext_modules = self._modules(Path(self.build_temp))
        super().finalize_options()

    def _modules(self, folder: Path) -> list[object]:
        from mypyc.build import mypycify  # needed only when compiling

        root = folder.resolve()
        root.mkdir(parents=True, exist_ok=True)
        settings, c_folder, sources = root / "mypy.ini", root / "c", root / "source"
        settings.write_text(TYPES, encoding="utf-8")
        options = ["--config-file", str(settings), "--cache-dir", str(root / "mypy")]
        modules = compiled_modules()
        if not modules:
            raise FileNotFoundError("modelpool/scheduler: no modules to compile; expected the links of a checkout")
        shutil.rmtree(sources, ignore_errors=True)
        shutil.copytree("modelpool", sources / "modelpool", ignore=shutil.ignore_patterns("__pycache__"))
        for module in modules:
            source = (sources / module).read_text(encoding="utf-8")
            source = with_constructors(source)
            base = BASES_OF_PYTHON.get(Path(module).relative_to("modelpool").as_posix())
            (sources / module).write_text(with_python_subclasses(source, base) if base else source, encoding="utf-8")
        # without debug symbols of the C code, which nobody steps through: half of the time of the compiler
        with chdir(sources):  # tracebacks name the files relative to it
            found = mypycify(
                [*options, *modules],
                target_dir=str(c_folder),
                group_name=LIBRARY,
                opt_level=self.opt_level,
                debug_level="0",
            )
        for extension in found:
            extension.sources = [os.path.relpath(path) for path in extension.sources]
        return list(found)


def compiled_modules() -> list[str]:
    """Return the paths of the modules to compile, relative to the folder of this file."""
    return [
        path.as_posix()
        for compiled in COMPILED_FOLDERS
        for path in sorted(Path("modelpool", compiled).glob("*.py"))
        if path.name != "__init__.py" and path.relative_to("modelpool").as_posix() not in NOT_COMPILED
    ]


def with_constructors(source: str) -> str:
    """Return the source of a module in which each dataclass that is not frozen has an `__init__`: the one that
    `dataclasses` generates at run time is never compiled.

    It takes the place of the docstring, so that lines keep their numbers. Raises ValueError for a class without one.
    """
    lines, parts = source.encode().splitlines(keepends=True), dict[tuple[int, int], tuple[int, bytes]]()
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]

    def put(first: ast.AST, last: ast.AST, text: str, after: bool = False) -> None:
        """Replace the text from the begin, or the end, of `first` to the end of `last`."""
        line, column = (first.end_lineno, first.end_col_offset) if after else (first.lineno, first.col_offset)
        begin, end = starts[line - 1] + column, starts[last.end_lineno - 1] + last.end_col_offset
        parts[begin, end] = last.end_lineno - line, text.encode()

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and (decorator := _unfrozen_dataclass(node)) is not None:
            if ast.get_docstring(node) is None:
                raise ValueError(f"class {node.name}: found no docstring, in place of which its __init__ is compiled")
            fields = [_Field(each) for each in node.body if isinstance(each, ast.AnnAssign) and not _is_shared(each)]
            options = [*map(ast.unparse, decorator.keywords), "init=False"] if isinstance(decorator, ast.Call) else []
            put(decorator, decorator, f"dataclass({', '.join(options or ['init=False'])})")
            put(node.body[0], node.body[0], _constructor(node, fields))
            for each in fields:
                if each.node.value is not None:
                    put(each.node.annotation, each.node, each.rest, after=True)
    text = b"".join(lines)
    for (begin, end), (lost_lines, new) in sorted(parts.items(), reverse=True):
        text = text[:begin] + new + b"\n" * lost_lines + text[end:]
    return text.decode()


def with_python_subclasses(source: str, name: str) -> str:
    """Return the source of a module in which classes that stay Python may derive from its class `name`.

    Three lines without code above the class are replaced, so that lines keep their numbers. Raises ValueError without.
    """
    lines = source.splitlines(keepends=True)
    place = next((at for at, line in enumerate(lines) if line.startswith((f"class {name}:", f"class {name}("))), 0)
    above = [line.strip() for line in lines[max(place - 3, 0) : place]]
    if len(above) < 3 or any(line and not line.startswith("#") for line in above):
        raise ValueError(f"class {name}: found {above} above it, expected three lines that are blank or comments")
    # read by mypyc alone: mypy_extensions is not there at run time
    lines[place - 3 : place] = [
        "from typing import TYPE_CHECKING\n",
        "if TYPE_CHECKING: from mypy_extensions import mypyc_attr\n",
        "@mypyc_attr(allow_interpreted_subclasses=True)\n",
    ]
    return "".join(lines)


def _unfrozen_dataclass(node: ast.ClassDef) -> ast.expr | None:
    """Return the decorator of a dataclass that is not frozen and has no `__init__` of its own."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        options = decorator.keywords if isinstance(decorator, ast.Call) else []
        if ast.unparse(called) == "dataclass" and not {option.arg for option in options} & {"frozen", "init"}:
            return decorator
    return None


def _is_shared(node: ast.AnnAssign) -> bool:
    return ast.unparse(node.annotation).startswith("ClassVar")


class _Field:
    """A field of a dataclass: how its `__init__` gets the value."""

    def __init__(self, node: ast.AnnAssign) -> None:
        self.node, self.name = node, ast.unparse(node.target)
        final = isinstance(node.annotation, ast.Subscript) and ast.unparse(node.annotation.value) == "Final"
        kind = ast.unparse(node.annotation.slice if final else node.annotation)
        options: dict[str, str] = {}
        default = None if node.value is None else ast.unparse(node.value)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "field":
            options = {option.arg: ast.unparse(option.value) for option in node.value.keywords}
            default = options.pop("default", None)
        factory, is_given = options.pop("default_factory", None), options.pop("init", "True") == "True"
        #: what its line keeps after the annotation
        self.rest = f" = field({', '.join(f'{name}={value}' for name, value in options.items())})" if options else ""
        self.parameter = f"{self.name}: {kind}" + ("" if default is None else f" = {default}") if is_given else ""
        self.value = self.name if is_given else default
        if factory is not None:
            self.parameter = f"{self.name}: {kind} | None = None" if is_given else ""
            made = f"{factory}()" if factory.isidentifier() else f"({factory})()"  # such as a lambda
            self.value = f"{made} if {self.name} is None else {self.name}" if is_given else made


def _constructor(node: ast.ClassDef, fields: list[_Field]) -> str:
    """Return the `__init__` of a dataclass in one line."""
    parameters = ["self", *[each.parameter for each in fields if each.parameter]]
    steps = [f"self.{each.name} = {each.value}" for each in fields if each.value is not None]
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
        steps.append("self.__post_init__()")
    return f"def __init__({', '.join(parameters)}) -> None: {'; '.join(steps) or 'pass'}"


if __name__ == "__main__":
    if os.environ.get("MODELPOOL_COMPILE") == "1":
        # pip first asks for the requirements of the build, and then starts it again with them
        missing = [COMPILER] if find_spec("mypyc") is None else []
        setup(distclass=WithCompiledCore, cmdclass={"build_ext": BuildCore}, setup_requires=missing)
    else:
        setup()
