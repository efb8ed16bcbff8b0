"""Writes random weights in the shapes of published models, in seconds: `python -m benchmarks.full_size sdxl FOLDER`.

Speed and memory do not depend on the values of weights. A file consists of a header and one random block, repeated, so
that writing takes as long as filling the page cache. Norms are ones and biases zeros, so that activations stay finite.
The engine opens the files as it opens published ones; `write_lora` writes a LoRA for them. Tokenizers of T5 are trained
on a few sentences, in a folder next to the file, and CLIP's is part of the package: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from modelpool.pool.models.text.text_tokenizer import KINDS
from tests.pool.models.components.diffusion import image_published, video_published
from tests.pool.models.components.vae import published
from tests.pool.models.loading import layouts
from tests.pool.models.text.tiny_tokenizers import tiny

Shape = tuple[int, ...]
#: key -> (dtype, shape), in the order of the file
Entries = dict[str, tuple[torch.dtype, Shape]]

MODEL, VAE, TEXT = "model.diffusion_model.", "vae.", "text_encoders."
#: bytes of the random block; longer tensors repeat it
BLOCK_BYTES = 32 << 20
#: threads that write: the kernel clears each new page before it is filled
WRITERS = 16
#: standard deviation of the weights: layers of some thousand inputs about keep the size of what they read
SPREAD = 0.02
#: names of dtypes in a safetensors header
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
}


@dataclass(frozen=True, slots=True)
class FullSizeModel:
    """One model that can be written.

    title       title in tables
    entries     the tensors of the file; of a small model with the same key names if the argument is True
    tokenizers  text encoders whose tokenizer is a file
    width, height, frames, steps  of a usual run
    """

    title: str
    entries: Callable[[bool], Entries]
    tokenizers: tuple[str, ...]
    width: int
    height: int
    steps: int
    frames: int = 0


def write_model(name: str, folder: Path, small: bool = False) -> Path:
    """Write `FULL_SIZE[name]` and its tokenizers to `folder`; return the file. `small`: with tiny widths, for tests.

    The file is in the page cache afterwards. Raises OSError if the folder is full.
    """
    model = FULL_SIZE[name]
    folder.mkdir(parents=True, exist_ok=True)
    for member in model.tokenizers:
        place = folder / f"tokenizer_{member}"
        place.mkdir(exist_ok=True)
        tiny(KINDS[member]).save(str(place / "tokenizer.json"))
    path = folder / f"{name}.safetensors"
    write_entries(path, model.entries(small))
    return path


def write_lora(path: Path, model: Path, rank: int = 16, seed: int = 0) -> Path:
    """Write a LoRA for every attention layer of the diffusion model in the file `model`, with kohya's names."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    with safe_open(model, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            shape = file.get_slice(key).get_shape()
            if not key.startswith(MODEL) or "attn" not in key or not key.endswith(".weight") or len(shape) != 2:
                continue
            name = "lora_unet_" + key.removeprefix(MODEL).removesuffix(".weight").replace(".", "_")
            up = torch.randn(shape[0], rank, generator=generator) * SPREAD
            tensors[f"{name}.lora_up.weight"] = up.bfloat16()
            tensors[f"{name}.lora_down.weight"] = (torch.randn(rank, shape[1], generator=generator) * SPREAD).bfloat16()
            tensors[f"{name}.alpha"] = torch.tensor(float(rank), dtype=torch.bfloat16)
    save_file(tensors, path)
    return path


def write_entries(path: Path, entries: Entries) -> None:
    """Write a safetensors file with these tensors: random matrices, norms of one, biases of zero."""
    header: dict[str, Any] = {}
    ends = 0
    for key, (dtype, shape) in entries.items():
        size_bytes = math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [ends, ends + size_bytes]}
        ends += size_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    largest = max((math.prod(shape) * dtype.itemsize for dtype, shape in entries.values()), default=0)
    blocks = {
        dtype: _bytes(_random(dtype, min(BLOCK_BYTES, largest))) for dtype in {dtype for dtype, _ in entries.values()}
    }
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(descriptor, len(head) + ends)
        os.pwrite(descriptor, head, 0)

        def write(piece: tuple[memoryview, int]) -> None:
            content, place = piece
            while content:
                written = os.pwrite(descriptor, content, place)
                content, place = content[written:], place + written

        with ThreadPoolExecutor(WRITERS, thread_name_prefix="write weights") as threads:
            for _ in threads.map(write, _pieces(entries, header, blocks, len(head))):
                pass
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _pieces(
    entries: Entries, header: Mapping[str, Any], blocks: Mapping[torch.dtype, memoryview], base: int
) -> Iterator[tuple[memoryview, int]]:
    """Parts of the file, and their places in it."""
    for key, (dtype, shape) in entries.items():
        begin, end = header[key]["data_offsets"]
        if len(shape) < 2 or dtype is torch.int64:
            yield _bytes(_vector(key, dtype, shape)), base + begin
            continue
        block = blocks[dtype]
        for place in range(begin, end, len(block)):
            yield block[: min(len(block), end - place)], base + place


def _vector(key: str, dtype: torch.dtype, shape: Shape) -> Tensor:
    if dtype is torch.int64:
        return torch.arange(math.prod(shape))
    is_scale = key.endswith(("weight", "scale", "gamma"))
    return torch.full((max(1, math.prod(shape)),), 1.0 if is_scale else 0.0).to(dtype)


def _random(dtype: torch.dtype, size_bytes: int) -> Tensor:
    if dtype is torch.int64:
        return torch.zeros(0, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(max(1, size_bytes // dtype.itemsize), generator=generator).mul_(SPREAD).to(dtype)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def _stored(layout: Mapping[str, Shape], dtype: torch.dtype, vectors: torch.dtype | None = None) -> Entries:
    """The entries of a layout. `vectors` is the dtype of biases and norms, as of matrices if None."""
    return {
        key: (
            torch.int64 if key.endswith("position_ids") else dtype if len(shape) > 1 or vectors is None else vectors,
            tuple(shape),
        )
        for key, shape in layout.items()
    }


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {prefix + key: tuple(value.shape) for key, value in tensors.items()}


def _meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _clip_l(prefix: str, small: bool) -> dict[str, Shape]:
    clip = layouts.TINY_CLIP if small else layouts.CLIP_L
    return layouts.hf_clip(clip, f"{prefix}text_model.")


def _t5(prefix: str, small: bool, kind: str = "T5", words: int = 32128) -> dict[str, Shape]:
    """The encoder of a T5-XXL, without its second name of the table of tokens."""
    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": words}
    if small:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": 4, "vocab_size": 200}
    config = getattr(transformers, f"{kind}Config")(**sizes, feed_forward_proj="gated-gelu", use_cache=False)
    state = _meta(lambda: getattr(transformers, f"{kind}EncoderModel")(config)).state_dict()
    return _under(prefix, {key: value for key, value in state.items() if key != "encoder.embed_tokens.weight"})


def _flux_vae(small: bool) -> dict[str, Shape]:
    widths = (32,) * 4 if small else (128, 256, 512, 512)
    settings: dict[str, Any] = {
        "block_out_channels": widths,
        "latent_channels": 16,
        "layers_per_block": 1 if small else 2,
        "norm_num_groups": 8 if small else 32,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return _under(VAE, published.ldm(_meta(lambda: diffusers.AutoencoderKL(**settings)).state_dict()))


def _flux_model(small: bool) -> dict[str, Shape]:
    if not small:
        return layouts.flux(prefix=MODEL)
    make = lambda: diffusers.FluxTransformer2DModel(  # noqa: E731
        in_channels=64, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 14, 14), guidance_embeds=True,
    )  # fmt: skip
    return _under(MODEL, image_published.flux(_meta(make).state_dict()))


def _flux(small: bool, dtype: torch.dtype) -> Entries:
    vectors = torch.bfloat16
    return {
        **_stored(_flux_model(small), dtype, vectors),
        **_stored(_flux_vae(small), vectors),
        **_stored(_clip_l(f"{TEXT}clip_l.transformer.", small), vectors),
        **_stored(_t5(f"{TEXT}t5xxl.transformer.", small), dtype, vectors),
    }


def _wan(small: bool) -> Entries:
    sizes = {"num_attention_heads": 12, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30}
    vae: dict[str, Any] = {}
    if small:
        sizes = {"num_attention_heads": 1, "text_dim": 32, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
        vae = {"base_dim": 4, "z_dim": 16, "num_res_blocks": 1}
    model = _meta(lambda: diffusers.WanTransformer3DModel(attention_head_dim=128, **sizes))
    codec = _meta(lambda: diffusers.AutoencoderKLWan(**vae))
    return {
        **_stored(_under(MODEL, video_published.wan(model.state_dict())), torch.bfloat16),
        **_stored(_under(VAE, published.wan21(codec.state_dict())), torch.bfloat16),
        **_stored(_t5(f"{TEXT}umt5_xxl.transformer.", small, "UMT5", 256384), torch.bfloat16),
    }


FULL_SIZE: Mapping[str, FullSizeModel] = {
    "sd15": FullSizeModel(
        "SD1.5, float16",
        lambda small: _stored(layouts.tiny_sd1() if small else layouts.sd15(), torch.float16),
        (),
        512,
        512,
        8,
    ),
    "sdxl": FullSizeModel(
        "SDXL, float16",
        lambda small: _stored(layouts.tiny_sdxl() if small else layouts.sdxl(), torch.float16),
        (),
        1024,
        1024,
        20,
    ),
    "flux": FullSizeModel("Flux dev, bfloat16", lambda small: _flux(small, torch.bfloat16), ("t5xxl",), 1024, 1024, 20),
    "flux_fp8": FullSizeModel(
        "Flux dev, float8", lambda small: _flux(small, torch.float8_e4m3fn), ("t5xxl",), 1024, 1024, 20
    ),
    "wan": FullSizeModel("Wan 2.1 1.3B, bfloat16", _wan, ("umt5_xxl",), 832, 480, 10, frames=33),
}


def main() -> None:
    """Write one model and print its size and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(FULL_SIZE))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="the same key names with tiny widths")
    asked = parser.parse_args()
    started = time.perf_counter()
    path = write_model(asked.model, asked.folder, asked.small)
    size_bytes, seconds = path.stat().st_size, time.perf_counter() - started
    print(f"{path}: {size_bytes / 1e9:.2f} GB in {seconds:.1f} s")


if __name__ == "__main__":
    main()
