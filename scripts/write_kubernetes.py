"""Writes the plain manifests in configs/kuberay/persistent: the Helm chart, rendered with each of its examples.

    python scripts/write_kubernetes.py [--check]

Needs the program helm, or the package helm-python-sdk, which contains it as a library. --check writes nothing; it exits
with 1 if a manifest differs.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "configs" / "helm" / "modelpool"
OUT = ROOT / "configs" / "kuberay" / "persistent"
#: the alert rules, of which the chart has a copy: it can read files of its own folder only
ALERTS, ALERTS_COPY = ROOT / "configs" / "prometheus" / "alerts.yml", CHART / "files" / "alerts.yaml"
#: examples of the chart: values that are applied over each other
MANIFESTS = {
    "fixed.yaml": ("fixed.yaml",),
    "autoscaling.yaml": ("autoscaling.yaml",),
    "head_failures.yaml": ("autoscaling.yaml", "head_failures.yaml"),
}
RELEASE, NAMESPACE = "modelpool", "default"


def render(*values: str) -> str:
    """Return the manifests of the chart with these examples, as `helm template` prints them. Raises RuntimeError if the
    chart does not render, ImportError if there is no Helm."""
    files = [str(CHART / "examples" / name) for name in values]
    if program := shutil.which("helm"):
        options = [option for file in files for option in ("--values", file)]
        command = [program, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout
    helm = importlib.import_module("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        rendered: dict[str, str] = chart.render(_merged(files), name=RELEASE, namespace=NAMESPACE)
    return "".join(
        f"---\n# Source: {name}\n{text.strip()}\n" for name, text in sorted(rendered.items()) if text.strip()
    )


def written(name: str) -> str:
    """Return the text of the manifest `name`: without the notes, comments of sources and labels of a release."""
    values = MANIFESTS[name]
    head = (
        f"# Written by scripts/write_kubernetes.py: the chart configs/helm/modelpool with {', '.join(values)} of its "
        "examples.\n# Before `kubectl apply -f`: the image, the keys (no key has the hash below), selectors of nodes.\n"
    )
    documents = [part for part in render(*values).split("---\n") if part.strip() and "NOTES.txt\n" not in part]
    kept = []
    for document in documents:
        lines = [line.rstrip() for line in document.splitlines() if not line.startswith("# Source:")]
        kept.append("\n".join(lines).strip("\n"))
    return head + "---\n".join(f"{text}\n" for text in kept if text.strip())


def _merged(files: list[str]) -> dict[str, object]:
    yaml = importlib.import_module("yaml")
    merged: dict[str, object] = {}
    for file in files:
        merged |= yaml.safe_load(Path(file).read_text(encoding="utf-8"))  # the examples share no table
    return merged


def main() -> None:
    """Write or check the manifests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a manifest differs")
    checks = parser.parse_args().check
    OUT.mkdir(exist_ok=True)
    differing = []
    if ALERTS_COPY.read_text(encoding="utf-8") != ALERTS.read_text(encoding="utf-8"):
        differing.append(ALERTS_COPY.name)
        if not checks:
            shutil.copyfile(ALERTS, ALERTS_COPY)
    for name in MANIFESTS:
        text, path = written(name), OUT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
            if not checks:
                path.write_text(text, encoding="utf-8")
    print("differ:" if checks else "written:", ", ".join(differing) or "none")
    sys.exit(1 if checks and differing else 0)


if __name__ == "__main__":
    main()
