"""Trigger words of LoRAs, from the metadata that authors and kohya's trainer write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.models.loading.trigger_words import trigger_words

TAGS = {"10_worn chair": {"worn chair": 40, "wood": 38, "indoors": 5}, "1_other": {"worn chair ": 3, "sky": 1}}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"modelspec.trigger_phrase": "worn chair, old wood"}, ("worn chair", "old wood")),
        ({"ss_tag_frequency": json.dumps(TAGS)}, ("worn chair", "wood")),
        ({"modelspec.trigger_phrase": "chr", "ss_tag_frequency": json.dumps(TAGS)}, ("chr",)),
        ({"ss_tag_frequency": "{"}, ()),
        ({"ss_tag_frequency": '{"a": {"b": "many"}, "c": 3}'}, ()),
        ({}, ()),
    ],
)
def test_words_of_metadata(metadata: dict[str, str], words: tuple[str, ...]) -> None:
    assert trigger_words(metadata) == words


def test_a_listing_has_the_trigger_words_of_its_file(tmp_path: Path) -> None:
    pair = {"lora_unet_a.lora_up.weight": torch.ones(4, 1), "lora_unet_a.lora_down.weight": torch.ones(1, 4)}
    save_file(pair, tmp_path / "worn.safetensors", metadata={"modelspec.trigger_phrase": "worn chair"})
    (found,) = open_registry((), (tmp_path,), tmp_path / "registry").loras()
    assert (found.name, found.modules, found.trigger_words) == ("worn", 1, ("worn chair",))
