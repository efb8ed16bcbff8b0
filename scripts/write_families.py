"""Writes docs/families.md, and its summary in README.md, from what recognition knows and what the tests run.

python scripts/write_families.py           after joining a family, or adding one to a test
python scripts/write_families.py --check   exit code 1 when a page is out of date (a test runs this)

The tests of tests/pool/families are read, not run: a family counts as compared with a pipeline of diffusers when a test
there has it in a table beside code that names the pipeline. Whether the tests pass is for the tests to say.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from modelpool.pool.detection.latent_formats import LATENT_FORMATS  # noqa: E402
from modelpool.pool.detection.layouts.signature import Signature  # noqa: E402
from modelpool.pool.detection.signatures import SIGNATURES  # noqa: E402
from modelpool.pool.detection.text_encoders import MEMBERS  # noqa: E402
from modelpool.pool.families import family as unets  # noqa: E402 - the script may be run from anywhere
from modelpool.pool.families.expert_pairs import PAIRS  # noqa: E402
from modelpool.pool.families.family import Family  # noqa: E402
from modelpool.pool.families.supported import running_families, why_not  # noqa: E402
from modelpool.pool.families.text_readings import readings_of  # noqa: E402
from modelpool.pool.loading.vision_fit import vision_encoder_of  # noqa: E402

PAGE, README, TESTS = ROOT / "docs" / "families.md", ROOT / "README.md", ROOT / "tests" / "pool" / "families"
BEGIN, END = "<!-- families: written by scripts/write_families.py -->", "<!-- end of families -->"
#: tables whose keys are families, or names that begin with one
_COMPARED, _MERGED = ("PIPELINES", "CASES"), "LORAS"
#: families that are a compared one but in name
_ALIKE = "ALIKE"
#: why families are not compared
_REASONS = "NOT_COMPARED"


@dataclass(slots=True)
class Proof:
    """What the tests do with each family, by name.

    pipelines  of diffusers that it is compared with
    merged     those whose LoRAs draw what merged files draw
    reasons    why others are not compared, where the tests say it
    """

    pipelines: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    merged: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Bring both pages up to date, or say that one is not."""
    proof = read_tests()
    pages = {PAGE: page(proof), README: _between(README.read_text(encoding="utf-8"), summary(proof))}
    if "--check" in sys.argv[1:]:
        return int(any(not path.is_file() or path.read_text(encoding="utf-8") != new for path, new in pages.items()))
    for path, new in pages.items():
        path.write_text(new, encoding="utf-8")
    return 0


def page(proof: Proof) -> str:
    """The whole list."""
    running, rows = running_families(), _unique(SIGNATURES)
    there = [row for row in rows if row.name in running]
    waiting = [row for row in rows if row.name not in running and row.runs]
    lines = [
        "# Families of models", "",
        f"Written by `scripts/write_families.py`: {len(rows)} families are recognised, {len(there)} run, and "
        f"{sum(bool(proof.pipelines[row.name]) for row in there)} of these are compared, whole, with diffusers "
        "by the tests: text, latent and pixels of a tiny model with the same weights, texts and noise "
        "(tests/pool/families).", "",
        "## Families that run", "",
        "| family | makes | encoders | latent | guidance, steps | equal to, in diffusers | LoRA = merged |",
        "|---|---|---|---|---|---|---|",
        *(_row(row, running[row.name], proof) for row in there), "",
        "Latent: the name of its kind and its channels. Guidance and steps are the usual ones, where a request says",
        "nothing; those without an entry have the defaults of requests.", "",
        "## Models that are two diffusion models", "",
        "One for much noise and one for little, in files of their own or in a folder of diffusers; each of the two",
        "runs alone as well. [models.md](models.md) says how they are named.", "",
        "| model | each of the two | shift | guidance, of each | second from noise | steps |",
        "|---|---|---|---|---|---|",
        *(_pair_row(name, pair) for name, pair in PAIRS.items()), "",
        "## Families that are recognised and do not run", "",
        f"{why_not('...').replace(' (...)', '').capitalize()}:", "",
        "| family | class |", "|---|---|",
        *(f"| {row.title} (`{row.name}`) | {row.runs} |" for row in waiting), "",
        f"{why_not('').capitalize()}: "
        + ", ".join(f"{row.title} (`{row.name}`)" for row in rows if row.name not in running and not row.runs) + ".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def summary(proof: Proof) -> str:
    """For the README: who runs, by what they make."""
    made: dict[str, list[str]] = defaultdict(list)
    running, rows = running_families(), _unique(SIGNATURES)
    for row in rows:
        if row.name in running:
            made[_makes(running[row.name])].append(row.title + ("" if proof.pipelines[row.name] else " *"))
    lines = ["| makes | families that run |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(titles)} |" for kind, titles in sorted(made.items(), reverse=True)]
    rest = len(rows) - sum(map(len, made.values()))
    lines += ["", f"\\* not compared with diffusers as a whole. {rest} more are recognised: [docs/families.md]"
              "(docs/families.md)."]  # fmt: skip
    return "\n".join(lines)


def _row(row: Signature, family: Family, proof: Proof) -> str:
    usual = family.sampling.usual
    readings = readings_of(family.name)
    encoders = [r.encoder for r in readings] if readings else list(MEMBERS.get(family.name, ()))
    encoders += [vision_encoder_of(family)] if family.sampling.sight else []
    cells = (
        f"{row.title} (`{row.name}`)",
        _makes(family),
        ", ".join(encoders) or "-",
        f"{row.latent} ({LATENT_FORMATS[row.latent].channels})" if row.latent in LATENT_FORMATS else "-",
        "-" if usual is None else f"{usual.guidance.value} {usual.cfg:g}, {usual.steps} steps",
        ", ".join(sorted(proof.pipelines[row.name])) or proof.reasons.get(row.name, "not compared"),
        "yes" if row.name in proof.merged else "-",
    )
    return f"| {' | '.join(cells)} |"


def _pair_row(name: str, pair: Family) -> str:
    usual, low = pair.sampling.usual, pair.sampling.low_noise
    assert usual is not None
    assert low is not None
    guidance = f"{usual.guidance.value} {usual.cfg:g} and {low.cfg:g}"
    cells = (
        pair.title,
        f"`{name}`",
        f"{pair.sampling.noise.shift:g}",
        guidance,
        f"{low.boundary:g}",
        str(usual.steps),
    )
    return f"| {' | '.join(cells)} |"


def _makes(family: Family) -> str:
    if family.sampling.video is not None:
        return "video"
    return "image" if family.sampling.audio is None else "audio"


def _unique(rows: Iterable[Signature]) -> list[Signature]:
    return list({row.name: row for row in rows}.values())


def _between(text: str, written: str) -> str:
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def read_tests() -> Proof:
    """The tables of the tests, and the tiny models that modules without a table name."""
    proof = Proof()
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TESTS.glob("*.py"))}
    tiny = {name: family for module in modules.values() for name, family in _tiny_models(module)}
    alike: dict[str, str] = {}
    for path, module in modules.items():
        if not path.name.startswith("test_"):
            continue
        code = {**_brought(module, modules), **_functions(module)}
        tables = dict(_tables(module))
        for key in tables.get(_MERGED, {}):
            proof.merged.add(key)
        alike |= {key: ast.literal_eval(value) for key, value in tables.get(_ALIKE, {}).items()}
        proof.reasons |= {key: ast.literal_eval(value) for key, value in tables.get(_REASONS, {}).items()}
        compared = [item for name in _COMPARED for item in tables.get(name, {}).items()]
        for key, value in compared:
            family = _family(key, value)
            named = _names(value) | {n for called in _names(value) if called in code for n in _names(code[called])}
            found = {_about(name, family, named) for name in named if name.endswith("Pipeline")} - {""}
            proof.pipelines[family] |= found
        if not compared:
            used = {tiny[name] for name in _names(module) if name in tiny}
            for family in used:
                proof.pipelines[family] |= {name for name in _names(module) if name.endswith("Pipeline")}
    for family, other in alike.items():
        proof.pipelines[family] |= {f"{name}, as `{other}`" for name in proof.pipelines[other]}
    return proof


def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def _brought(module: ast.Module, modules: Mapping[Path, ast.Module]) -> dict[str, ast.FunctionDef]:
    """The functions of the other tests that a module imports."""
    others = {path.stem: _functions(other) for path, other in modules.items()}
    brought = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: functions[alias.name]
        for node in brought
        if (functions := others.get((node.module or "").rpartition(".")[2]))
        for alias in node.names
        if alias.name in functions
    }


def _about(name: str, family: str, named: set[str]) -> str:
    """`name`, but for a pipeline of a sister where the code chooses between the two."""
    own = [n for n in named if n.endswith("Pipeline") and family.replace("_", "") in n.lower()]
    return name if not own or name in own else ""


def _family(key: str, value: ast.expr) -> str:
    """The family that a row is about: its key, or the constant of `pool.families.family` that it begins with."""
    first = value.args[0] if isinstance(value, ast.Call) and value.args else None
    found = getattr(unets, first.id, None) if isinstance(first, ast.Name) else None
    return found.name if isinstance(found, Family) else key


def _tables(module: ast.Module) -> Iterator[tuple[str, Mapping[str, ast.expr]]]:
    """The dictionaries of a module with texts for keys, by name."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as table):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as table):
                pass
            case _:
                continue
        pairs = zip(table.keys, table.values, strict=True)
        yield name, {k.value: v for k, v in pairs if isinstance(k, ast.Constant) and isinstance(k.value, str)}


def _tiny_models(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Constants that are a tiny model, and its family."""
    for node in module.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id=cls), args=[ast.Constant(value=str(family)), *_]),
            ) if cls.startswith("Tiny"):
                yield name, family


def _names(node: ast.AST) -> set[str]:
    """Every name in a piece of code."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


if __name__ == "__main__":
    sys.exit(main())
