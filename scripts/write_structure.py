"""Writes the list of modules in STRUCTURE.md: one line a module, the first sentence of its own docstring.

python scripts/write_structure.py           after adding, renaming or re-describing a module
python scripts/write_structure.py --check   exit code 1 when the page is out of date (a test runs this)
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "STRUCTURE.md"
PACKAGES = ("pool", "scheduler", "actors")
BEGIN, END = "<!-- modules: written by scripts/write_structure.py -->", "<!-- end of modules -->"


def main() -> int:
    """Bring the page up to date, or say that it is not."""
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n{modules_section()}\n{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def modules_section() -> str:
    """The list, folder by folder."""
    lines: list[str] = []
    folders = sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
    for folder in sorted(folders, key=lambda f: (PACKAGES.index(f.relative_to(ROOT).parts[0]), f)):
        place = folder.relative_to(ROOT).as_posix()
        lines += ["", f"### {place}/", "", first_sentence(folder / "__init__.py"), ""]
        lines += [
            f"- `{place}/{path.name}`: {first_sentence(path)}"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
    return "\n".join(lines).strip()


def first_sentence(path: Path) -> str:
    """What a module says of itself first."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


if __name__ == "__main__":
    sys.exit(main())
