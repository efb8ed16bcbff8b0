"""Options that several commands share, and the parsing of their text.

Knows words on a command line, not what they are for. The defaults of a request are in `GenerateRequest`; options that
are not set are left out, so that each default has one place.
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

_POOL = "Pool"
_IMAGE = "Image"
_OUTPUT = "Output"
_TERMS = "Scheduling"
#: metavar of a flag, where typer would write <bool>
_NO_VALUE = " "


class DeviceOption(StrEnum):
    """The device kinds that workers can run on."""

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


# Defaults are described here and set in `GenerateRequest` and `PoolConfig`; a test compares the two.
_LORA = "LoRA and strength; repeatable. For models with two experts, append :high or :low."
_SAMPLERS = "euler, euler_ancestral, dpmpp_2m, ddim, uni_pc, uni_pc_2 (default: euler)."
_SCHEDULES = "normal, karras, simple, ... (default: depends on the sampler)."
_CLIP_SKIP = "Number of final CLIP layers to skip; one less than in A1111 (default: 0)."
_DECODER = "Stable Cascade: stage B model, its steps and guidance (default: the one next to --model)."
_LOW_NOISE = "Two experts: guidance of the low-noise expert, and its boundary (default: depends on the model)."
_FOLDER = "Folder for images, manifest and contact sheet (default: outputs)."
_DEVICES = "Device to run on (default: cuda if a GPU is found, else sim)."
_POLICIES = "How much of the weights to keep on the GPU (default: depends on the device, usually normal)."
_PICKLE = "Also read PyTorch pickles (.ckpt, .pt); only weights are read (default: no)."
_RESERVE = "GPU memory to leave to other programs (default: 400MiB)."

Model = Annotated[str | None, _option("--model", "Model name (default: the only one found).", _IMAGE, "NAME")]
Lora = Annotated[list[str] | None, _option("--lora", _LORA, _IMAGE, "NAME:X")]
Negative = Annotated[str | None, _option("--negative", "What to avoid in the image.", _IMAGE, "TEXT")]
Steps = Annotated[int | None, _option("--steps", "Sampling steps (default: 20).", _IMAGE, "N")]
Cfg = Annotated[float | None, _option("--cfg", "Guidance scale; 1 disables guidance (default: 5).", _IMAGE, "X")]
Sampler = Annotated[str | None, _option("--sampler", _SAMPLERS, _IMAGE, "NAME")]
Schedule = Annotated[str | None, _option("--schedule", _SCHEDULES, _IMAGE, "NAME")]
ClipSkip = Annotated[int | None, _option("--clip-skip", _CLIP_SKIP, _IMAGE, "N")]
Decoder = Annotated[str | None, _option("--decoder", _DECODER, _IMAGE, "NAME:N:X")]
LowNoise = Annotated[str | None, _option("--low-noise", _LOW_NOISE, _IMAGE, "X:B")]
Size = Annotated[
    str | None, _option("--size", "Size in pixels, such as 512x768 (default: depends on the model).", _IMAGE, "WxH")
]
Seed = Annotated[
    int | None, _option("--seed", "Seed of the first image; later ones count up (default: random).", _IMAGE, "N")
]
Number = Annotated[int, _option("-n", "Images per prompt (default: 1).", _IMAGE, "N")]

Priority = Annotated[int | None, _option("--priority", "Higher priorities run first (default: 0).", _TERMS, "N")]
User = Annotated[
    str | None, _option("--user", "User for fair-share scheduling (default: your login name).", _TERMS, "NAME")
]
Deadline = Annotated[
    str | None, _option("--deadline", "Target completion time: 45s, 10m, 2h (default: none).", _TERMS, "TIME")
]

Out = Annotated[Path | None, _option("--out", _FOLDER, _OUTPUT, "DIR")]
Resume = Annotated[bool, _option("--resume", "Skip images that already exist.", _OUTPUT, _NO_VALUE)]
AsJson = Annotated[bool, _option("--json", "Print JSON to stdout, one object per line.", _OUTPUT, _NO_VALUE)]

Gpus = Annotated[int | None, _option("--gpus", "Workers, one per GPU (default: all, or 2 simulated).", _POOL, "N")]
Device = Annotated[DeviceOption | None, _option("--device", _DEVICES, _POOL)]
Vram = Annotated[str | None, _option("--vram", "GPU memory limit per worker: 24GiB, 64MiB.", _POOL, "SIZE")]
Policy = Annotated[VramPolicy | None, _option("--vram-policy", _POLICIES, _POOL)]
Reserve = Annotated[str | None, _option("--reserve-vram", _RESERVE, _POOL, "SIZE")]
Config = Annotated[
    Path | None, _option("--config", "Configuration file (default: see modelpool --help).", _POOL, "FILE")
]
AllowPickle = Annotated[bool, _option("--allow-pickle", _PICKLE, _POOL, _NO_VALUE)]
PoolName = Annotated[str | None, _option("--pool", "Use a running pool, by name or host:port.", _POOL, "NAME")]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options that select a pool, or the settings to start one. None means not set."""

    config: Path | None = None
    gpus: int | None = None
    device: DeviceOption | None = None
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
            raise UserError(f"{given[0]} cannot be combined with --pool {self.pool}: it applies to starting a pool")
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
    """Return the fields of a request that were set."""
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


def qos_fields(priority: int | None, user: str | None, deadline: str | None) -> dict[str, Any]:
    """Return the scheduling fields of a request that were set."""
    fields = {"priority": priority, "user": user, "deadline": deadline}
    return {name: value for name, value in fields.items() if value is not None}


def parse_size(text: str) -> tuple[int, int]:
    """Return (64, 96) for '64x96'. Raises UnusableField."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.strip().isdecimal() and height.strip().isdecimal()):
        raise unusable_field("--size", text, "WIDTHxHEIGHT in pixels, such as 512x768")
    return int(width), int(height)


def require_text(name: str, text: str) -> None:
    """Raise UnusableField for bytes that are not text in the encoding of the terminal."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise unusable_field(name, ascii(text), "text in the encoding of the terminal") from None


def model_or_only_one(given: str | None, pool: Pool) -> str:
    """Return the named model, or the only one of the pool. Raises UserError if there are several or none."""
    if given is not None:
        return given
    names = sorted(listing.name for listing in pool.models())
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise UserError(f"--model is required; models of this pool: {known}")
    return names[0]
