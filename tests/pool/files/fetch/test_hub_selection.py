"""Which files of a repository are fetched: what a model needs, once, and no pickles.

Proves for typical layouts of repositories: one set of weights for each component of a diffusers folder, shards with
their index, the tokenizer and scale beside a file; everything else stays; what cannot be decided is refused by name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from modelpool.pool.files.fetch.fetch_errors import SourceFailed
from modelpool.pool.files.fetch.hub_selection import chosen_weights, folder_files
from modelpool.pool.values.core.errors import AmbiguousName, UnknownName, UserError
from tests.each_case import each_case

#: a diffusers folder with everything that repositories add
FOLDER = [
    ".gitattributes", "README.md", "picture.png", "v1-5-pruned.ckpt", "v1-5-pruned.safetensors", "model_index.json",
    "scheduler/scheduler_config.json", "tokenizer/merges.txt", "tokenizer/vocab.json",
    "tokenizer/tokenizer_config.json", "text_encoder/config.json", "text_encoder/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin", "text_encoder/openvino_model.xml",
    "unet/config.json", "unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
    "unet/diffusion_pytorch_model.safetensors.index.json", "unet/model.onnx",
    "vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors", "vae_decoder/model.onnx",
]  # fmt: skip
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "levels": [0.5, 1.0],
}
SMALL = {
    "model_index.json", "scheduler/scheduler_config.json", "tokenizer/merges.txt", "tokenizer/vocab.json",
    "tokenizer/tokenizer_config.json", "text_encoder/config.json", "unet/config.json", "vae/config.json",
}  # fmt: skip


def test_a_diffusers_folder_has_one_set_of_weights_for_each_component() -> None:
    chosen = folder_files("a/b", INDEX, FOLDER)
    assert set(chosen) - SMALL == {
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",  # the only one
    }
    assert set(chosen) >= SMALL
    assert len(chosen) == len(set(chosen))


def test_a_variant_is_taken_where_it_exists() -> None:
    names = [name for name in FOLDER if name != "text_encoder/model.fp16.safetensors"]
    assert set(folder_files("a/b", INDEX, names, "fp16")) - SMALL == {
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    }
    with pytest.raises(UserError, match="no component has weights of the variant 'bf16'"):
        folder_files("a/b", INDEX, FOLDER, "bf16")


@each_case(
    "index",
    ["diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model.fp16.safetensors.index.json"],
)
def test_a_sharded_variant_has_its_index(index: str) -> None:
    both = (
        f"{stem}-0000{n}-of-00002{end}.safetensors"
        for n in (1, 2)
        for stem, end in (("diffusion_pytorch_model", ".fp16"),)
    )
    files = [f"unet/{name}" for name in (*both, index)]
    plain = ["unet/config.json", "unet/diffusion_pytorch_model.safetensors", "model_index.json"]
    chosen = folder_files("a/b", {"unet": ["diffusers", "UNet"]}, [*plain, *files], "fp16")
    assert set(chosen) == {"model_index.json", "unet/config.json", *files}


class Choice(NamedTuple):
    """Files of a repository, the file that was named, and the files that are fetched."""

    names: tuple[str, ...]
    file: str
    chosen: tuple[str, ...]


_SHARDS = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
_PARTS = ("q-00001-of-00002.gguf", "q-00002-of-00002.gguf")
CHOICES = {
    "the only file": Choice(("README.md", "a.safetensors", "a.ckpt"), "", ("a.safetensors",)),
    "a LoRA of PEFT": Choice(
        ("adapter_model.safetensors", "adapter_config.json", "samples/x.safetensors"),
        "",
        ("adapter_model.safetensors", "adapter_config.json"),
    ),
    "a fixed name among others": Choice(
        ("pytorch_lora_weights.safetensors", "other.safetensors"), "", ("pytorch_lora_weights.safetensors",)
    ),
    "an index": Choice((*_SHARDS, "m.safetensors.index.json"), "", ("m.safetensors.index.json", *_SHARDS)),
    "a shard": Choice(
        (*_SHARDS, "m.safetensors.index.json", "n.safetensors"), _SHARDS[1], (*_SHARDS, "m.safetensors.index.json")
    ),
    "parts of GGUF": Choice((*_PARTS, "q.tokenizer.json"), "", _PARTS),
    "one of several": Choice(("a.gguf", "b.gguf", "sub/c.gguf"), "sub/c.gguf", ("sub/c.gguf",)),
    "in a folder only": Choice(("README.md", "split/vae/ae.safetensors"), "", ("split/vae/ae.safetensors",)),
    "with a tokenizer": Choice(("t5.gguf", "t5.tokenizer.json", "b.gguf"), "t5.gguf", ("t5.gguf", "t5.tokenizer.json")),
}


@each_case("case", CHOICES)
def test_files_of_a_repository_without_an_index(case: str) -> None:
    names, file, chosen = CHOICES[case]
    assert sorted(chosen_weights("a/b", dict.fromkeys(names, 5), file)) == sorted(chosen)


class Refused(NamedTuple):
    """Files of a repository, the file that was named, and the error."""

    names: tuple[str, ...]
    file: str
    error: type[UserError]
    said: str


REFUSED = {
    "several": Refused(
        ("a.safetensors", "b.safetensors"),
        "",
        AmbiguousName,
        "name one as a/b:FILE: a.safetensors (5 B), b.safetensors",
    ),
    "a misspelled name": Refused(("flux-q4.gguf", "flux-q8.gguf"), "flux-q5.gguf", UnknownName, "did you mean 'flux-q"),
    "a pickle": Refused(("a.ckpt",), "a.ckpt", SourceFailed, "a.ckpt is a PyTorch pickle"),
    "only pickles": Refused(("a.ckpt", "README.md"), "", SourceFailed, "a/b: has only PyTorch pickles"),
    "no weights": Refused(("README.md",), "", SourceFailed, "a/b: has no files of weights"),
    "no file of weights": Refused(("README.md", "a.gguf"), "README.md", UserError, "README.md: no file of weights"),
}


@each_case("case", REFUSED)
def test_what_cannot_be_chosen_is_refused(case: str) -> None:
    names, file, error, said = REFUSED[case]
    with pytest.raises(error, match=re.escape(said)):
        chosen_weights("a/b", dict.fromkeys(names, 5), file)


def test_components_that_cannot_be_fetched_are_refused() -> None:
    pickles = [name for name in FOLDER if not (name.startswith("unet/") and "safetensors" in name)]
    with pytest.raises(SourceFailed, match="a/b: unet has only PyTorch pickles"):
        folder_files("a/b", INDEX, pickles)
    with pytest.raises(SourceFailed, match="names 'vae', but the repository has no such folder"):
        folder_files("a/b", INDEX, [name for name in FOLDER if not name.startswith("vae/")])
