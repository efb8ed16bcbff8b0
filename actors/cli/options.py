"""The options that several commands share, and what their text means.

Knows words on a command line; not what they are for. Defaults of a request stand in `GenerateRequest`; options that are
not given are left out, so that there is one place for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.pool.core.errors import UserError, unusable_field
from modelpool.pool.devices.vram_policy import VramPolicy

if TYPE_CHECKING:
    from modelpool.actors.cli.ports import Pool

_POOL = "The pool"
_IMAGE = "The image"
_OUTPUT = "What comes out"
_TERMS = "When, and for whom"
#: in the place of a flag's value, where typer would write <bool>
_NO_VALUE = " "


class DeviceKind(StrEnum):
    """What workers run on."""

    AUTO = "auto"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"
    NPU = "npu"
    MLU = "mlu"
    DIRECTML = "directml"
    SIM = "sim"
    CPU = "cpu"


def _option(flag: str, text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, metavar=metavar)


# Defaults are told here and set in `GenerateRequest` and `PoolConfig`; a test compares.
_LORA = "LoRA and strength; may be given again. Of a model that is two, :high or :low after it says for which."
_SAMPLERS = "euler, euler_ancestral, dpmpp_2m, ddim, uni_pc, uni_pc_2 (default: euler)."
_SCHEDULES = "normal, karras, simple, ... (default: the sampler's own)."
_CLIP_SKIP = "Last layers of CLIP left out; A1111's number less one (default: 0)."
_DECODER = "Of Stable Cascade: the model of stage B, its steps and guidance (default: the one beside --model)."
_LOW_NOISE = "Of a model that is two: guidance of the second, and below which noise it begins (default: its own)."
_FOLDER = "Folder for images, manifest, contact sheet (default: outputs)."
_DEVICES = "What to run on (default: cuda where there is a GPU, else sim)."
_POLICIES = "How eagerly weights are kept on a GPU (default: what the device suggests, mostly normal)."
_PICKLE = "Read PyTorch pickles (.ckpt, .pt) too; only weights are read (default: no)."
_RESERVE = "Leave so much of each GPU to other programs (default: 400MiB)."

Model = Annotated[str | None, _option("--model", "Model by name (default: the only one there is).", _IMAGE, "NAME")]
Lora = Annotated[list[str] | None, _option("--lora", _LORA, _IMAGE, "NAME:X")]
Negative = Annotated[str | None, _option("--negative", "What the image should not show.", _IMAGE, "TEXT")]
Steps = Annotated[int | None, _option("--steps", "Sampling steps (default: 20).", _IMAGE, "N")]
Cfg = Annotated[float | None, _option("--cfg", "Guidance scale, 1 is none (default: 5).", _IMAGE, "X")]
Sampler = Annotated[str | None, _option("--sampler", _SAMPLERS, _IMAGE, "NAME")]
Schedule = Annotated[str | None, _option("--schedule", _SCHEDULES, _IMAGE, "NAME")]
ClipSkip = Annotated[int | None, _option("--clip-skip", _CLIP_SKIP, _IMAGE, "N")]
Decoder = Annotated[str | None, _option("--decoder", _DECODER, _IMAGE, "NAME:N:X")]
LowNoise = Annotated[str | None, _option("--low-noise", _LOW_NOISE, _IMAGE, "X:B")]
Size = Annotated[str | None, _option("--size", "Pixels, such as 512x768 (default: the model's own).", _IMAGE, "WxH")]
Seed = Annotated[int | None, _option("--seed", "Of the first image, then counting (default: drawn).", _IMAGE, "N")]
Number = Annotated[int, _option("-n", "Images of each prompt (default: 1).", _IMAGE, "N")]

Priority = Annotated[int | None, _option("--priority", "Higher ones go first (default: 0).", _TERMS, "N")]
User = Annotated[str | None, _option("--user", "Whose share it counts for (default: your login name).", _TERMS, "NAME")]
Deadline = Annotated[
    str | None, _option("--deadline", "When it should be done: 45s, 10m, 2h (default: none).", _TERMS, "TIME")
]

Out = Annotated[Path | None, _option("--out", _FOLDER, _OUTPUT, "DIR")]
Resume = Annotated[bool, _option("--resume", "Leave out images that are there already.", _OUTPUT, _NO_VALUE)]
AsJson = Annotated[bool, _option("--json", "JSON on stdout, an object a line.", _OUTPUT, _NO_VALUE)]

Gpus = Annotated[int | None, _option("--gpus", "Workers, one for each GPU (default: all, or 2 simulated).", _POOL, "N")]
Device = Annotated[DeviceKind | None, _option("--device", _DEVICES, _POOL)]
Vram = Annotated[str | None, _option("--vram", "Use no more of each GPU than this: 24GiB, 64MiB.", _POOL, "SIZE")]
Policy = Annotated[VramPolicy | None, _option("--vram-policy", _POLICIES, _POOL)]
Reserve = Annotated[str | None, _option("--reserve-vram", _RESERVE, _POOL, "SIZE")]
Config = Annotated[Path | None, _option("--config", "Configuration (default: see modelpool --help).", _POOL, "FILE")]
AllowPickle = Annotated[bool, _option("--allow-pickle", _PICKLE, _POOL, _NO_VALUE)]
PoolName = Annotated[str | None, _option("--pool", "Use a running pool, by name or host:port.", _POOL, "NAME")]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Which pool to use, or how to start one. None is "not said"."""

    config: Path | None = None
    gpus: int | None = None
    device: DeviceKind | None = None
    vram: str | None = None
    pool: str | None = None
    vram_policy: VramPolicy | None = None
    reserve_vram: str | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        starting = {
            "--config": self.config,
            "--gpus": self.gpus,
            "--device": self.device,
            "--vram": self.vram,
            "--vram-policy": self.vram_policy,
            "--reserve-vram": self.reserve_vram,
            "--allow-pickle": self.allow_pickle or None,
        }
        given = [flag for flag, value in starting.items() if value is not None]
        if self.pool is not None and given:
            raise UserError(f"{given[0]}: belongs to starting a pool, and --pool {self.pool} uses a running one")
        if self.gpus is not None and self.gpus < 1:
            raise unusable_field("--gpus", self.gpus, "a whole number from 1")


def request_fields(
    negative: str | None = None,
    lora: list[str] | None = None,
    steps: int | None = None,
    cfg: float | None = None,
    sampler: str | None = None,
    schedule: str | None = None,
    size: str | None = None,
    clip_skip: int | None = None,
    decoder: str | None = None,
    low_noise: str | None = None,
) -> dict[str, Any]:
    """The fields of a request that were given."""
    fields: dict[str, Any] = {
        "negative": negative,
        "loras": tuple(lora) if lora else None,
        "steps": steps,
        "cfg": cfg,
        "sampler": sampler,
        "schedule": schedule,
        "clip_skip": clip_skip,
        "decoder": decoder,
        "low_noise": low_noise,
    }
    if size is not None:
        fields["width"], fields["height"] = parse_size(size)
    return {name: value for name, value in fields.items() if value is not None}


def terms(priority: int | None, user: str | None, deadline: str | None) -> dict[str, Any]:
    """The fields of a request that were given and say nothing about the image."""
    said = {"priority": priority, "user": user, "deadline": deadline}
    return {name: value for name, value in said.items() if value is not None}


def parse_size(text: str) -> tuple[int, int]:
    """(64, 96) of '64x96'. Raises UnusableField."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.strip().isdecimal() and height.strip().isdecimal()):
        raise unusable_field("--size", text, "WIDTHxHEIGHT in pixels, such as 512x768")
    return int(width), int(height)


def require_text(name: str, text: str) -> None:
    """Raise UnusableField for bytes that are no text in the terminal's encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise unusable_field(name, ascii(text), "text in the encoding of the terminal") from None


def model_or_only_one(given: str | None, pool: Pool) -> str:
    """The model that was named, or the only one. Raises UserError when that leaves a choice."""
    if given is not None:
        return given
    names = sorted(listing.name for listing in pool.models())
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise UserError(f"--model: nothing was given, expected one of the models that the pool has: {known}")
    return names[0]
