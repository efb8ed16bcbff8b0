"""The files in circulation, in their real key layouts and sizes: recognised, registered, and built without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_folders, kind_of_keys
from modelpool.pool.files.formats.torch_file import read_torch_header
from modelpool.pool.inference.image_prompts.adapter import plan_adapter
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.pool.inference.image_prompts.tiny_adapters import State, flat, ip_adapter, projection

#: widths of the cross-attentions of SD1.5 in the order of modules: down, up, middle; those of SDXL have 70
SD15 = [*[320] * 2, *[640] * 2, *[1280] * 2, *[1280] * 3, *[640] * 3, *[320] * 3, 1280]
SDXL = [*[640] * 4, *[1280] * 20, *[1280] * 30, *[640] * 6, *[1280] * 10]
VIT_H, BIG_G, FACE = (1280, 1024), (1664, 1280), 512


def published(kind: str, widths: list[int], text: int, encoder: tuple[int, int] = VIT_H) -> dict[str, State]:
    """The tables of a file, without values."""
    with torch.device("meta"):
        layers = {
            f"{2 * n + 1}.to_{name}_ip.weight": torch.empty(w, text) for n, w in enumerate(widths) for name in "kv"
        }
        own = projection(kind, text, encoder[0], encoder[1], FACE)
    return {"image_proj": own, "ip_adapter": layers}


#: (file of h94/IP-Adapter or h94/IP-Adapter-FaceID, its tables, title, tokens, width of states, width of a face)
FILES: list[tuple[str, Callable[[], dict[str, State]], str, int, int, int]] = [
    ("ip-adapter_sd15", lambda: published("base", SD15, 768), "IP-Adapter", 4, 1024, 0),
    ("ip-adapter-plus_sd15", lambda: published("plus", SD15, 768), "IP-Adapter Plus", 16, 1280, 0),
    ("ip-adapter-plus-face_sd15", lambda: published("plus", SD15, 768), "IP-Adapter Plus", 16, 1280, 0),
    ("ip-adapter-full-face_sd15", lambda: published("full", SD15, 768), "IP-Adapter Full Face", 0, 1280, 0),
    ("ip-adapter_sdxl", lambda: published("base", SDXL, 2048, BIG_G), "IP-Adapter", 4, 1280, 0),
    ("ip-adapter_sdxl_vit-h", lambda: published("base", SDXL, 2048), "IP-Adapter", 4, 1024, 0),
    ("ip-adapter-plus_sdxl_vit-h", lambda: published("plus", SDXL, 2048), "IP-Adapter Plus", 16, 1280, 0),
    ("ip-adapter-faceid_sd15", lambda: published("faceid", SD15, 768), "IP-Adapter FaceID", 4, 0, 512),
    (
        "ip-adapter-faceid-plusv2_sd15",
        lambda: published("faceid_plus", SD15, 768), "IP-Adapter FaceID Plus", 4, 1280, 512,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tables", "title", "tokens", "states", "face"), FILES, ids=[one[0] for one in FILES])
def test_files_in_circulation_are_recognised(
    name: str, tables: Callable[[], dict[str, State]], title: str, tokens: int, states: int, face: int
) -> None:
    named = flat(tables())
    if face:  # FaceID includes a LoRA, which is used as a file of its own
        named |= {f"ip_adapter.0.to_q_lora.{part}.weight": torch.empty(4, 320) for part in ("down", "up")}
    assert kind_of_keys(named, is_diffusion_model=False) is FileKind.IMAGE_PROMPT
    plan = plan_adapter({key: tuple(value.shape) for key, value in named.items()})
    assert (plan.kind.title, plan.tokens, plan.state_width, plan.face_width) == (title, tokens, states, face)
    plan.empty()


def test_flux1_redux_dev_is_recognised() -> None:
    shapes = {
        "redux_up.weight": (12288, 1152), "redux_up.bias": (12288,),
        "redux_down.weight": (4096, 12288), "redux_down.bias": (4096,),
    }  # fmt: skip
    assert kind_of_keys(shapes, is_diffusion_model=False) is FileKind.IMAGE_PROMPT
    plan = plan_adapter(shapes)
    assert (plan.kind.title, plan.kind.appends, plan.state_width, plan.text_width) == ("Redux", True, 1152, 4096)
    plan.empty()


def test_a_pickle_of_two_tables_has_the_names_of_the_safetensors_file(tmp_path: Path) -> None:
    tables = ip_adapter("base", [(8, 6)])
    torch.save(tables, tmp_path / "ip-adapter_sd15.bin")
    header = read_torch_header(str(tmp_path / "ip-adapter_sd15.bin"))
    expected: dict[str, Tensor] = flat(tables)
    assert {name: tuple(entry.shape) for name, entry in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }


def test_folders_of_comfyui_tell() -> None:
    assert kind_of_folders(("ipadapter",)) is kind_of_folders(("style_models",)) is FileKind.IMAGE_PROMPT


def test_others_are_refused_by_what_is_missing() -> None:
    with pytest.raises(UnknownArchitecture, match=r"its 1 tensor is no image prompt adapter \(the first are x"):
        plan_adapter({"x": (1,)})
    with pytest.raises(UnknownArchitecture, match=r"of no known image prompt adapter"):
        plan_adapter(
            {"image_proj.y": (1,), "ip_adapter.1.to_k_ip.weight": (1, 1), "ip_adapter.1.to_v_ip.weight": (1, 1)}
        )
