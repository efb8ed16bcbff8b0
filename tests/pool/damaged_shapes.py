"""Files that something happened to, as the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from modelpool.pool.files.formats.safetensors_file import Shape

STRANGE_SHAPES: list[Shape] = [
    (), (0,), (1,), (7, 7), (-3, 4), (1 << 40, 3, 3, 3), (2, 3, 5, 7, 11), (0, 0, 0, 0, 0),
]  # fmt: skip
STRANGE_ENDS = ["", ".", "weight", "x.1.weight", "block.999999999.norm1.weight"]


@st.composite
def damaged(draw: st.DrawFn, whole: Mapping[str, Shape]) -> dict[str, Shape]:
    """`whole` with one to three tensors missing, of strange shapes or under strange names."""
    shapes = dict(whole)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(shapes)))
        match draw(st.sampled_from(["missing", "shape", "name"])):
            case "missing":
                del shapes[key]
            case "shape":
                shapes[key] = draw(st.sampled_from(STRANGE_SHAPES))
            case "name":
                beginning = ".".join(key.split(".")[: draw(st.integers(1, 3))])
                shapes[f"{beginning}.{draw(st.sampled_from(STRANGE_ENDS))}"] = shapes.pop(key)
    return shapes
