"""The recorded outputs in `tests/golden/unchanged_outputs.json`: the models and images that they need, and how to make
them again. `tests.actors.test_unchanged_outputs` compares, `tests.actors.record_unchanged_outputs` records.

The pool runs in this process with real engines and without Ray. The models are the shapes example and tiny models with
seeded random weights.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer

from modelpool import GenerateRequest, PoolConfig, UserError
from modelpool.actors.worker.gpu_worker import WorkerEngine
from tests.actors.loop_connection import open_real_pool
from tests.pool.families import tiny_transformers
from tests.pool.families.test_wan_vace import VACE
from tests.pool.families.tiny_audio import STABLE_AUDIO
from tests.pool.families.tiny_cascade import write_files as write_cascade
from tests.pool.families.tiny_pairs import TINY as TWO_EXPERTS
from tests.pool.families.tiny_pairs import write_pair
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS
from tests.pool.families.tiny_transformers import FAMILIES, TinyFamily
from tests.pool.families.tiny_videos import VIDEOS
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.models.text.tiny_tokenizers import tiny
from tests.pool.zoo.case import quiet_libraries

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "examples" / "shapes"
RECORD = ROOT / "tests" / "golden" / "unchanged_outputs.json"
#: tokenizer.json by text encoder, from `tests.pool.models.text.tiny_tokenizers`. Training them anew gives other last
# digits
TOKENIZERS = ROOT / "tests" / "golden" / "unchanged_tokenizers.json.gz"
#: an encoder with each kind of tokenizer
_ENCODER_OF = {"qwen": "qwen3_4b", "llama3": "llama3_8b"}
#: pixels along a side of one block of a fingerprint, and pieces of an audio
BLOCK, PIECES = 8, 64
#: levels by which a fingerprint may differ on another processor: measured with the instructions of SSE 4.1 in place of
#: AVX-512, single pixels differ by 1 level, and so does a mean that is close to the middle of two levels
TOLERANCE = 1

UNETS = {
    "sd1": layouts.tiny_sd1,
    "sd2": layouts.tiny_sd2,
    "sdxl": layouts.tiny_sdxl,
    "sd1_ip2p": SHOWN_LAYOUTS["sd1_ip2p"],
}
#: the usual random weights of this VAE make one colour only
_LOUDER = {
    name: replace(FAMILIES[name], vae_file=TWO_EXPERTS["wan22_i2v"].vae_file) for name in ("wan_t2v", "qwen_image")
}
TRANSFORMERS: tuple[TinyFamily, ...] = (
    *(FAMILIES[name] for name in ("sd3", "flux_dev", "flux2_klein", "chroma", "z_image", "lumina2", "auraflow")),
    *(FAMILIES[name] for name in ("pixart_sigma", "hunyuan_dit", "hunyuan_video", "ltxv", "mochi")),
    *_LOUDER.values(),
    STABLE_AUDIO,
    VACE,
)


def write_models(folder: Path) -> None:
    """Write the tiny models, their LoRA and their ControlNets below `folder`, each model in a folder of its own. Their
    tables of tokens have the sizes of the recorded tokenizers: templates of new families change those trained anew."""
    with patch.object(tiny_transformers, "tiny", _recorded_tokenizer):
        _write_models(folder)


def _recorded_tokenizer(kind: str) -> Tokenizer:
    stored = json.loads(gzip.decompress(TOKENIZERS.read_bytes()))
    return Tokenizer.from_str(stored[_ENCODER_OF[kind]]) if kind in _ENCODER_OF else tiny(kind)


def _write_models(folder: Path) -> None:
    for place, (name, layout) in enumerate(UNETS.items()):
        path = own_folder(folder, name) / f"{name}.safetensors"
        write_tiny_checkpoint(path, seed=place, dtype=torch.float32, layout=layout())
    for family in TRANSFORMERS:
        _write_family(folder, family)
    write_video_unet(folder, "svd")
    pair = own_folder(folder, "pair")
    write_pair(pair, _LOUDER["wan_t2v"])
    write_tokenizers(pair, _LOUDER["wan_t2v"])
    write_cascade(own_folder(folder, "cascade"))
    write_tiny_lora(own_folder(folder, "loras") / "tiny_lora.safetensors", seed=5)
    controls = own_folder(folder, "controlnet")
    write_tiny_checkpoint(
        controls / "sd1_canny.safetensors", seed=6, dtype=torch.float32, layout=ldm_controlnet(layouts.TINY_UNET)
    )
    tiny_controls.write(controls / "flux_canny.safetensors", tiny_controls.flux, 7)


def write_transformer(folder: Path, name: str) -> None:
    """Write one of the tiny `TRANSFORMERS` into a folder of its own in `folder`."""
    with patch.object(tiny_transformers, "tiny", _recorded_tokenizer):
        _write_family(folder, next(family for family in TRANSFORMERS if family.name == name))


def write_video_unet(folder: Path, name: str) -> None:
    """Write a tiny model that makes videos of an image into a folder of its own in `folder`."""
    with quiet_libraries():
        save_file(VIDEOS[name].file(), own_folder(folder, name) / f"{name}.safetensors")


def _write_family(folder: Path, family: TinyFamily) -> None:
    own = own_folder(folder, family.name)
    save_file(family.file(), own / f"{family.name}.safetensors")
    write_tokenizers(own, family)


def write_inputs(folder: Path) -> None:
    """Write the images that requests name: noise, a gradient, and a mask."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(4)
    for name, (width, height) in {"noise": (64, 64), "wide_noise": (96, 64)}.items():
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"{name}.png")
    for number in range(9):
        Image.fromarray(random.integers(0, 256, (64, 96, 3), np.uint8)).save(folder / f"frame_{number}.png")
    rows, columns = np.mgrid[0:64, 0:64].astype(np.uint8)
    Image.fromarray(np.stack([rows * 3, columns * 3, rows + columns], axis=-1)).save(folder / "gradient.png")
    Image.fromarray(((rows > 20) & (columns < 40)).astype(np.uint8) * 255).save(folder / "mask.png")


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below `folder`, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(
    record: Mapping[str, Any], files: Mapping[str, str], made: Mapping[str, np.ndarray | str], exact: bool
) -> list[str]:
    """What differs from the record, one line each. Without `exact`, outputs may differ by what another processor
    rounds differently, and then so may the random weights in `files`. Outputs recorded with `exact` false depend on
    what shared a run with them, so they may differ as much everywhere."""
    changed = sorted(name for name in {*files, *record["files"]} if files.get(name) != record["files"].get(name))
    found = []
    for output in record["outputs"]:
        now = made.get(output["id"], "made nothing")
        if isinstance(now, str):
            found.append(f"{output['id']}: {now}")
        elif (str(now.dtype), list(now.shape)) != (output["dtype"], output["shape"]):
            found.append(f"{output['id']}: {now.dtype} {list(now.shape)}, not {output['dtype']} {output['shape']}")
        elif digest_of(now) != output["pixels_sha256"]:
            levels = apart(fingerprint(now), output["fingerprint"])
            if levels > TOLERANCE or (exact and output["exact"]):
                found.append(f"{output['id']}: other pixels; fingerprints are {levels} of 255 levels apart")
    if changed and (found or exact):
        found.append(f"generated files differ (other generator, or other processor): {', '.join(changed)}")
    return found


def load_record() -> dict[str, Any]:
    """The recorded file: `files` are digests of the models, `outputs` are requests and what they made."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def save_record(record: Mapping[str, Any]) -> None:
    """Write the recorded file with one output to a line."""
    parts = ",\n".join(json.dumps(output) for output in record["outputs"])
    files = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record["files"].items())
    RECORD.write_text(f'{{"files": {{\n{files}\n}},\n"outputs": [\n{parts}\n]}}\n')


def run_requests(
    folder: Path,
    outputs: Iterable[Mapping[str, Any]],
    wrap: Callable[[WorkerEngine], WorkerEngine] = lambda engine: engine,
) -> Iterator[tuple[str, np.ndarray | str]]:
    """The id of each output and what its request makes now, or a message where it makes nothing. Requests with equal
    pool settings share one pool and one submission. `folder` has the models and the inputs; engines run in a `wrap`."""
    torch.set_num_threads(1)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for output in outputs:
        groups.setdefault(json.dumps(output["pool"], sort_keys=True), []).append(output)
    for number, group in enumerate(groups.values()):
        path = folder / f"pool_{number}.toml"
        path.write_text(_config(group[0]["pool"], folder))
        with open_real_pool(PoolConfig.load(path), wrap) as pool:
            usable = []
            for output in group:
                try:
                    request = GenerateRequest(**_with_paths(output["request"], folder))
                    pool.recipe(request)
                    usable.append((output["id"], request))
                except UserError as problem:
                    yield output["id"], f"refused: {problem}"
            jobs = pool.submit([request for _, request in usable], output=False)
            for result in jobs.results():
                yield usable[result.index][0], _array(result)


def digest_of(made: np.ndarray) -> str:
    """The SHA-256 of dtype, shape and bytes."""
    head = f"{made.dtype.str} {made.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(made).tobytes()).hexdigest()


def fingerprint(made: np.ndarray) -> str:
    """A few numbers as bytes in hexadecimal, which hardly depend on the last digits of what was computed. Of an image
    or the first and last frame of a video: the mean of each block and channel. Of an audio: the loudness and the mean
    of each piece and channel."""
    if made.dtype == np.uint8:
        frames = made[None] if made.ndim == 3 else made[[0, -1]]
        high, wide = frames.shape[1] // BLOCK, frames.shape[2] // BLOCK
        blocks = frames[:, : high * BLOCK, : wide * BLOCK].reshape(len(frames), high, BLOCK, wide, BLOCK, -1)
        levels = blocks.mean(axis=(2, 4), dtype=np.float64)
    else:
        pieces = np.array_split(made.astype(np.float64), PIECES)
        loudness = np.array([np.sqrt((piece**2).mean(axis=0)) for piece in pieces])
        means = np.array([piece.mean(axis=0) for piece in pieces])
        levels = np.stack([255 * loudness, 127.5 + 127.5 * means])
    return np.rint(levels.clip(0, 255)).astype(np.uint8).tobytes().hex()


def apart(one: str, other: str) -> int:
    """The largest difference between two fingerprints, in levels of 255."""
    first, second = (np.frombuffer(bytes.fromhex(text), np.uint8).astype(int) for text in (one, other))
    return int(np.abs(first - second).max()) if first.shape == second.shape else 256


def own_folder(folder: Path, name: str) -> Path:
    own = folder / name
    own.mkdir(parents=True)
    return own


def write_tokenizers(folder: Path, family: TinyFamily) -> None:
    """Write what the text encoders of `family` read with, where they do not have a tokenizer built in."""
    stored = json.loads(gzip.decompress(TOKENIZERS.read_bytes()))
    for member in set(family.encoders) & set(stored):
        own = folder / f"tokenizer_{member}"
        own.mkdir(exist_ok=True)
        (own / "tokenizer.json").write_text(stored[member])


def _config(settings: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """The TOML of a pool with these settings."""
    tables: dict[str, dict[str, Any]] = {
        "models": {
            "folders": [str(SHAPES / "models"), str(folder / "models")],
            "loras": [str(SHAPES / "loras"), str(folder / "models" / "loras")],
            "registry": str(folder / "registry"),
        },
        "pool": {"workers": 1, "threads": 1, **settings["pool"]},
        **{name: dict(keys) for name, keys in settings.items() if name != "pool"},
    }
    lines = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _with_paths(value: Any, folder: Path) -> Any:
    """A request with `inputs/NAME` replaced by the path of that file."""
    if isinstance(value, str):
        return str(folder / value) if value.startswith("inputs/") else value
    if isinstance(value, dict):
        return {key: _with_paths(part, folder) for key, part in value.items()}
    return [_with_paths(part, folder) for part in value] if isinstance(value, list) else value


def _array(result: Any) -> np.ndarray | str:
    """Pixels of an image, frames of a video, samples of an audio; the message of a failure."""
    for name in ("pixels", "frames", "samples"):
        if hasattr(result, name):
            return np.asarray(getattr(result, name))
    return f"failed: {result.message.splitlines()[-1]}"
