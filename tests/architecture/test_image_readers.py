"""One module decodes the images that users give; every other reader of images has a reason."""

from __future__ import annotations

import ast

from tests.architecture.source_tree import PACKAGES, Module, product_modules

DECODER = "actors/request/image_decoding.py"
#: what opens images otherwise, with the reason
OTHER_READERS = {
    "actors/outputs/file_content.py": "reads outputs back, to compare them with the manifest",
    "actors/outputs/preview_image.py": "reads outputs for reports",
    "actors/outputs/image_metadata.py": "reads texts; pixels go nowhere",
    "actors/http/service/encoded_images.py": "encodes outputs in another format",
    "actors/http/page/thumbnails.py": "reads outputs",
    "pool/values/core/previews.py": "reads previews that a worker has made",
}


def opens_images(module: Module) -> bool:
    """Whether a module opens or turns images with Pillow."""
    if "PIL" not in module.path.read_text(encoding="utf-8"):  # most modules need no parsing
        return False
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "PIL":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "Image"}
        if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image" and "open" in {a.name for a in node.names}:
            return True
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "PIL.Image" and alias.asname}
    return any(_is_call(node, names) for node in ast.walk(module.tree))


def _is_call(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in ("open", "exif_transpose"):
        return False
    return node.attr == "exif_transpose" or ast.unparse(node.value) in {*names, "PIL.Image"}


def test_only_one_module_decodes_images_of_users() -> None:
    found = {module.place for module in product_modules(*PACKAGES) if opens_images(module)}
    assert found - {DECODER} == set(OTHER_READERS)
    assert DECODER in found


def test_no_module_turns_transparency_into_colours_on_its_own() -> None:
    """`convert("RGB")` of an image of a user has the hidden colours of its transparent areas."""
    folders = (
        "actors/http",
        "actors/control/inputs",
        "actors/request/job_files",
        "actors/client",
        "actors/request",
        "actors/graph",
    )
    offenders = [
        f"{module.place}:{node.lineno}"
        for module in product_modules(*folders)
        if module.place not in {DECODER, *OTHER_READERS}
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "convert"
    ]
    assert offenders == []
