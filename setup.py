"""Build configuration besides pyproject.toml: pure Python, or with the scheduler core compiled by mypyc.

    MODELPOOL_COMPILE=1 pip install .

compiles the core: the same sources and the same decisions in less time. Every module is installed as Python too, for
machines whose Python or system the compiled ones do not support. An editable install is pure Python; nothing is ever
compiled into the source folder.
"""

from __future__ import annotations

import os
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
#: modules of those folders that stay Python: frozen dataclasses that are pickled without deriving from `WireValue`
NOT_COMPILED = (
    "scheduler/model/config.py",
    "scheduler/model/gpu_kinds.py",
    "scheduler/model/oom_escalation.py",
    "scheduler/model/story_lines.py",
    "scheduler/model/user_share.py",
    "scheduler/core/history.py",
    "scheduler/core/snapshot.py",
)
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

        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "mypy.ini"
        settings.write_text(TYPES, encoding="utf-8")
        options = ["--config-file", str(settings), "--cache-dir", str(folder / "mypy")]
        c_folder = str(folder / "c")
        modules = [
            path.as_posix()
            for compiled in COMPILED_FOLDERS
            for path in sorted(Path("modelpool", compiled).glob("*.py"))
            if path.name != "__init__.py" and path.relative_to("modelpool").as_posix() not in NOT_COMPILED
        ]
        if not modules:
            raise FileNotFoundError("modelpool/scheduler: no modules to compile; expected the links of a checkout")
        # without debug symbols of the C code, which nobody steps through: half of the time of the compiler
        found = mypycify(
            [*options, *modules],
            target_dir=c_folder,
            group_name=LIBRARY,
            opt_level=self.opt_level,
            debug_level="0",
        )
        return list(found)


if __name__ == "__main__":
    if os.environ.get("MODELPOOL_COMPILE") == "1":
        # pip first asks for the requirements of the build, and then starts it again with them
        missing = [COMPILER] if find_spec("mypyc") is None else []
        setup(distclass=WithCompiledCore, cmdclass={"build_ext": BuildCore}, setup_requires=missing)
    else:
        setup()
