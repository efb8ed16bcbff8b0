"""The example model: small files that a clone has in `examples/shapes`, and that a wheel brings along."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

#: name of the model, and of the folder that has it
EXAMPLE_NAME = "shapes"
#: device memory of a pool that runs it on a machine without a configuration: enough for it, and little
EXAMPLE_VRAM = "64MiB"
MODELS_FOLDER, LORAS_FOLDER = "models", "loras"
#: for messages where no model is found
WAYS_TO_MODELS = (
    f"`modelpool models get {EXAMPLE_NAME}` copies a small example model, and `modelpool models get ORG/NAME` fetches "
    "one from the Hugging Face hub"
)
_CLONE = Path(__file__).resolve().parents[2] / "examples" / EXAMPLE_NAME
#: its place below the data folder of an installation; setup.py puts it there
_INSTALLED_END = f"share/modelpool/{EXAMPLE_NAME}/{MODELS_FOLDER}/{EXAMPLE_NAME}.safetensors"


def example_folder(clone: Path = _CLONE) -> Path | None:
    """Return the folder with `models` and `loras` of the example; None if this installation lacks it."""
    if (clone / MODELS_FOLDER).is_dir():
        return clone
    for installed in distributions(name="modelpool"):
        for file in installed.files or ():
            if file.as_posix().endswith(_INSTALLED_END):
                path = Path(str(installed.locate_file(file))).resolve()
                if path.is_file():
                    return path.parents[1]
    return None
