"""One module maps weights files: whatever reads weights gets them from it, with their scales."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source_tree import PACKAGES, Module, product_modules

#: maps files, and the only module that may use what maps them
MAPS, OPENS = "pool/weights/quant/mapped_file.py", "pool/weights/quant/open_weights.py"
#: functions of `OPENS` that open files, and the function of `PARTS` that opens them for models in files of their own
OPENING, PARTS = ("open_weights", "weights_of_header", "built_from"), "pool/models/loading/open_part.py"
#: packages that read files of weights, and the modules that use one: for types of blocks, and for vectors of faces
READERS = {"safetensors": {"actors/request/face_fields.py"}, "gguf": {"pool/files/formats/ggml_types.py"}}


def called(module: Module, *names: str) -> set[str]:
    """Those of `names` that a module calls, "function" or "object.function"."""
    if not any(name in module.path.read_text(encoding="utf-8") for name in names):
        return set()  # most modules: not worth a parse
    calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    found = {ast.unparse(each) for each in calls if isinstance(each, ast.Name | ast.Attribute)}
    return found & set(names)


def product() -> Iterator[Module]:
    """The modules of the three packages."""
    yield from product_modules(*PACKAGES)


def openers() -> set[str]:
    """The modules of the product that open weights files."""
    return {module.place for module in product() if module.place not in (OPENS, PARTS) and called(module, *OPENING)}


def test_one_module_maps_weights_files() -> None:
    for module in product():
        found = called(module, "MappedFile", "MappedFile.open", "MappedFile.of")
        assert not found or module.place in (MAPS, OPENS), f"{module.place} maps a file by {found}: use {OPENS}"


def test_no_other_package_reads_weights() -> None:
    for module in product():
        assert not called(module, "torch.load"), module.place
        for package, allowed in READERS.items():
            if module.place not in allowed and package in module.path.read_text(encoding="utf-8"):
                assert package not in module.imported_packages, f"{module.place} imports {package}: use {OPENS}"
