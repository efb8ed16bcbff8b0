"""Options that several commands share, and the parsing of their text.

Knows words on a command line, not what they are for. Options of request fields come from
`actors.cli.terminal.request_options`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from modelpool.actors.cli.terminal.option_groups import OptionGroup, Without
from modelpool.actors.cli.terminal.request_options import option_of
from modelpool.actors.config.example_model import WAYS_TO_MODELS
from modelpool.actors.request.field_table import IMAGE
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import UserError, unusable_field

_POOL = "Pool"
_OUTPUT = "Output"
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


# Defaults are described here and set in `PoolConfig`; a test compares the two.
_FOLDER = "Folder for images, manifest and contact sheet (default: outputs), or a URL: s3://bucket/folder."
_NAME = "Names of the files, from fields of their requests: {id}-{seed} (default: prompt, seed and a digest)."
_DEVICES = "Device to run on (default: cuda if a GPU is found, else sim)."
_POLICIES = "How much of the weights to keep on the GPU (default: depends on the device, usually normal)."
_PICKLE = "Also read PyTorch pickles (.ckpt, .pt); only weights are read (default: no)."
_RESERVE = "GPU memory to leave to other programs (default: 400MiB)."

Model = option_of("model")
Seed = option_of("seed")
Number = Annotated[int, _option("-n", "Images per prompt (default: 1).", IMAGE, "N")]

Out = Annotated[str | None, _option("--out", _FOLDER, _OUTPUT, "DIR_OR_URL")]
#: of commands that read a file of requests
JobFile = Annotated[
    str,
    typer.Argument(
        metavar="JOBS",
        help="One request per row: .jsonl, .csv, .txt or .parquet, a folder of a dataset, a URL, or - for stdin.",
        show_default=False,
    ),
]
LineModel = Annotated[
    str | None, typer.Option("--model", help="Model for lines without one.", metavar="NAME", show_default=False)
]
LineSeed = Annotated[int, typer.Option("--seed", help="Varies the seeds of lines without a seed.", metavar="N")]
Columns = Annotated[
    list[str] | None,
    _option("--column", "The column of a field, as in prompt=caption; width= leaves a column out.", _OUTPUT, "F=C"),
]
IgnoreColumns = Annotated[bool, _option("--ignore-columns", "Leave out columns that are no field.", _OUTPUT, _NO_VALUE)]
Name = Annotated[str | None, _option("--name", _NAME, _OUTPUT, "TEMPLATE")]
Shards = Annotated[
    int | None, _option("--shards", "Pack the outputs in WebDataset shards of N (default: files).", _OUTPUT, "N")
]
ShardFormat = Annotated[
    str | None, _option("--shard-format", "Format of shards: webdataset (default) or parquet.", _OUTPUT, "NAME")
]
Thumbnails = Annotated[bool, _option("--thumbnails", "Also write a small WebP of each image.", _OUTPUT, _NO_VALUE)]
Why = Annotated[
    bool, _option("--why", "Print at the end where each job ran and why (always in the manifest).", _OUTPUT, _NO_VALUE)
]
Resume = Annotated[bool, _option("--resume", "Skip images that already exist.", _OUTPUT, _NO_VALUE)]
Preview = Annotated[
    str | None,
    _option("--preview", "Keep the newest preview in this file: .webp, .png or .jpg.", _OUTPUT, "FILE"),
]
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
class OutputOptions(OptionGroup):
    """Options of how a command outputs what it generates. None means not set."""

    out: Out = None
    name: Name = None
    resume: Resume = False
    as_json: AsJson = False
    preview: Preview = None


@dataclass(frozen=True, slots=True)
class PoolOptions(OptionGroup):
    """Options that select a pool, or the settings to start one. None means not set."""

    gpus: Gpus = None
    device: Device = None
    vram: Vram = None
    vram_policy: Policy = None
    reserve_vram: Reserve = None
    allow_pickle: AllowPickle = False
    config: Config = None
    pool: PoolName = None

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


#: of commands that generate what was checked before
PlainPoolOptions = Annotated[PoolOptions, Without.of("allow_pickle")]


def require_text(name: str, text: str) -> None:
    """Raise UnusableField for bytes that are not text in the encoding of the terminal."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise unusable_field(name, ascii(text), "text in the encoding of the terminal") from None


def only_model(names: Iterable[str]) -> str:
    """Return the only one of the models of a pool. Raises UserError if there are several or none."""
    known = sorted(names)
    if not known:
        raise UserError(f"this pool has no models; {WAYS_TO_MODELS}")
    if len(known) != 1:
        raise UserError(f"--model is required; models of this pool: {', '.join(known)}")
    return known[0]
