"""Tiny models that are two diffusion models, as people have them: the one for high noise in a whole file, that for low
noise in a file of its own, and a description that says which is which; or a folder of diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
from safetensors.torch import save_file

from modelpool.pool.models.text.text_tokenizer import KINDS
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_transformers import FAMILIES, TinyFamily, seeded
from tests.pool.families.whole_transformer import BYTES
from tests.pool.models.text.tiny_tokenizers import tiny

#: of the model for low noise; that for high noise has 1
LOW_SEED = 5
TINY: Mapping[str, TinyFamily] = {"wan_t2v": FAMILIES["wan_t2v"], "wan22_i2v": CONCATENATED}


def write_pair(folder: Path, family: TinyFamily) -> Path:
    """The files of a model called "tiny" in `folder`; the path of its description."""
    save_file(family.file(), folder / "wan_high_noise.safetensors")
    low = family.publish(seeded(family.model, LOW_SEED).state_dict())
    # as published: without what keys begin with in whole files
    save_file({key: value.contiguous().clone() for key, value in low.items()}, folder / "wan_low_noise.safetensors")
    write_tokenizers(folder, family)
    path = folder / "tiny.model.json"
    said = {"format": 1, "checkpoint": "wan_high_noise.safetensors", "low_noise": "wan_low_noise.safetensors"}
    path.write_text(json.dumps(said))
    return path


def write_tokenizers(folder: Path, family: TinyFamily) -> None:
    """What the text encoders of `family` read with, beside their file."""
    for member in family.encoders:
        if member in KINDS and KINDS[member] != BYTES:
            place = folder / f"tokenizer_{member}"
            place.mkdir(exist_ok=True)
            tiny(KINDS[member]).save(str(place / "tokenizer.json"))


class TinyPair(TinyModel):
    """A tiny pair on the CPU, if nothing else is said, that makes what requests ask for."""

    def __init__(self, folder: Path, family: TinyFamily, device: str = "cpu", loras: tuple[Path, ...] = ()) -> None:
        write_pair(folder, family)
        self._open(folder, device, loras)


def write_pair_folder(folder: Path, family: TinyFamily, boundary: Any, scheduler: Any) -> None:
    """The same weights as folders of diffusers have them; `boundary` is what the index says of it."""
    pipeline = "WanPipeline" if family.name == "wan_t2v" else "WanImageToVideoPipeline"
    index: dict[str, Any] = {"_class_name": pipeline, "boundary_ratio": boundary}

    def save(part: Any, place: str, library: str) -> None:
        part.save_pretrained(folder / place)
        index[place] = [library, type(part).__name__]

    save(seeded(family.model, 1), "transformer", "diffusers")
    save(seeded(family.model, LOW_SEED), "transformer_2", "diffusers")
    save(seeded(family.vae, 2), "vae", "diffusers")
    save(scheduler, "scheduler", "diffusers")
    ((make, _),) = family.encoders.values()
    save(make(), "text_encoder", "transformers")
    (kind,) = family.encoders
    (folder / "tokenizer").mkdir()
    tiny(KINDS[kind]).save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "model_index.json").write_text(json.dumps(index))


def flow_scheduler(shift: float) -> Any:
    """Euler's steps, as most pipelines of flows have them."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
