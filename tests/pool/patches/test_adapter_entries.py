"""What is in a LoRA file: every spelling and kind, and nothing that is wrong passes for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pool.errors import CorruptFile
from pool.patches.adapter_entries import AdapterKind, Strange, read_adapters
from tests.pool.patches.golden_adapters import GOLDEN

LOADED = json.loads((GOLDEN / "lora_formats.json").read_text())["load_lora"]
KIND_NAMES = {
    AdapterKind.LORA: "lora",
    AdapterKind.LOHA: "loha",
    AdapterKind.LOKR: "lokr",
    AdapterKind.GLORA: "glora",
    AdapterKind.OFT: "oft",
    AdapterKind.BOFT: "boft",
    AdapterKind.NORM: "diff",
    AdapterKind.DIFFERENCE: "diff",
    AdapterKind.REPLACEMENT: "set",
}
#: files that are refused here. One is no LoRA; the other has a core that shares no rank with its factors, which fails
#: upstream when it is computed.
REFUSED = {"unknown": "no LoRA keys", "lokr_dec": "factors of shapes"}
#: the order of the tensors in the golden results
ORDERS = {
    "lora": ("up", "down", "alpha", "mid", "dora_scale", "reshape"),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale"),
    "lokr": (
        *("lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
        "dora_scale",
    ),
    "glora": ("a1", "a2", "b1", "b2", "alpha", "dora_scale"),
    "oft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
    "boft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)
    return path


def golden_tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of the case's shapes; its scalars and the new shape hold what the result says."""
    numbers = {"reshape_weight": torch.tensor([8, 12])}
    alphas = [w for r in case["result"].values() for w in r.get("weights", ()) if isinstance(w, float)]
    tensors = {}
    for key, shape in case["input"].items():
        name, part = key.replace("KEY", "m"), key.rsplit(".", 1)[1]
        tensors[name] = numbers.get(part, torch.tensor(alphas[0]) if part == "alpha" else torch.ones(shape))
    return tensors


@pytest.mark.parametrize("name", LOADED)
def test_golden_spelling(tmp_path: Path, name: str) -> None:
    case = LOADED[name]
    path = write(tmp_path / "lora.safetensors", golden_tensors(case))
    if name in REFUSED:
        with pytest.raises(CorruptFile, match=REFUSED[name]):
            read_adapters(path)
        return
    found = {}
    for entry in read_adapters(path).entries:
        kind = KIND_NAMES[entry.kind]
        own: dict[str, Any] = {part: list(t.shape) for part, t in entry.parts.items()}
        own |= {"alpha": entry.alpha, "reshape": list(entry.reshaped) if entry.reshaped else None}
        result: dict[str, Any] = {"type": kind}
        if kind in ORDERS:
            result["weights"] = [own.get(part) for part in ORDERS[kind]]
        else:
            result["tensors"] = [list(t.shape) for t in entry.parts.values()]
        found["m.bias" if entry.is_bias else "m.weight"] = result
    assert found == case["result"]


@pytest.mark.parametrize(
    ("name", "loser"),
    [("lora_and_diff", "LoRA counts less than the difference"), ("lora_and_loha", "LoRA counts less")],
)
def test_what_counts_less_is_told(tmp_path: Path, name: str, loser: str) -> None:
    (strange,) = read_adapters(write(tmp_path / "x.safetensors", golden_tensors(LOADED[name]))).strange
    assert loser in strange.reason


def test_a_file_that_is_a_whole_has_nothing_strange(tmp_path: Path) -> None:
    for name in set(LOADED) - {*REFUSED, "lora_and_diff", "lora_and_loha"}:
        assert read_adapters(write(tmp_path / "x.safetensors", golden_tensors(LOADED[name]))).strange == (), name


UP, DOWN = torch.ones(8, 2), torch.ones(2, 8)
BROKEN: dict[str, tuple[dict[str, Tensor], str]] = {
    "no down": ({"a.lora_up.weight": UP}, "'a' has no 'down' factor"),
    "no up": ({"a.lora_A.weight": DOWN}, "'a' has no 'up' factor"),
    "half a LoHa": ({"a.hada_w1_a": UP, "a.hada_w1_b": DOWN, "a.hada_w2_a": UP}, "no 'hada_w2_b' factor"),
    "half a LoKr": ({"a.lokr_w1": UP, "a.lokr_w2_a": UP}, "no 'lokr_w2_b' factor"),
    "other rank": (
        {"a.lora_up.weight": UP, "a.lora_down.weight": torch.ones(3, 8)},
        r"up \(8, 2\), down \(3, 8\)|down \(3, 8\), up \(8, 2\)",
    ),
    "rank 0": ({"a.lora_up.weight": torch.ones(8, 0), "a.lora_down.weight": torch.ones(0, 8)}, r"expected \(O, R\)"),
    "flat factor": ({"a.lora_up.weight": UP, "a.lora_down.weight": torch.ones(2)}, r"expected \(O, R\)"),
    "LoHa of other ranks": (
        {"a.hada_w1_a": UP, "a.hada_w1_b": DOWN, "a.hada_w2_a": UP, "a.hada_w2_b": torch.ones(3, 8)},
        "the LoHa of 'a'",
    ),
    "one core": (
        {f"a.hada_w{n}_{s}": DOWN for n in (1, 2) for s in "ab"} | {"a.hada_t1": torch.ones(2, 2, 3, 3)},
        "the LoHa of 'a'",
    ),
    "square blocks": ({"a.oft_blocks": torch.ones(2, 4, 3)}, "expected blocks"),
    "two alphas": ({"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.alpha": torch.ones(2)}, "alpha of 'a'"),
    "endless alpha": (
        {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.alpha": torch.tensor(torch.inf)},
        "expected one finite number",
    ),
    "the same factor twice": (
        {"a.lora_up.weight": UP, "a.lora_B.weight": UP, "a.lora_down.weight": DOWN},
        "are both the 'up' factor of 'a'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    tensors, message = BROKEN[name]
    path = write(tmp_path / "lora.safetensors", tensors)
    with pytest.raises(CorruptFile, match=message) as caught:
        read_adapters(path)
    assert str(path) in str(caught.value)


def test_what_belongs_to_nothing_is_named(tmp_path: Path) -> None:
    tensors = {
        "a.lora_up.weight": UP,
        "a.lora_down.weight": DOWN,
        "b.alpha": torch.tensor(1.0),
        "c.a1.weight": UP,
        "d.new_kind": UP,
    }
    file = read_adapters(write(tmp_path / "lora.safetensors", tensors))
    assert [entry.name for entry in file.entries] == ["a"]
    assert [s.name for s in file.strange] == ["b", "c", "d.new_kind"]
    assert str(Strange("b", "why")) == "b (why)"
