"""`PoolConfig`: the configuration of a pool, read from TOML; unknown keys are refused with the file and the key.

Knows names, paths and numbers. What depends on the machine (how many GPUs, of what kind) is decided when a pool starts
and never written back here. Torch-free, ray-free.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator, model_validator

from modelpool.actors.config.example_model import EXAMPLE_VRAM, LORAS_FOLDER, MODELS_FOLDER, example_folder
from modelpool.actors.config.group_sections import GROUPS, autoscaling_of, describe_groups, node_groups
from modelpool.actors.config.maintenance_section import MaintenanceSection
from modelpool.actors.config.model_settings import ModelSettings, settings_of_models
from modelpool.actors.config.output_address import OutputAddress, OutputDefaults, absolute_address, output_address
from modelpool.actors.config.separate_models import SeparateModel, separate_models
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.request.expected_words import expected_words
from modelpool.actors.request.field_table import MAX_BATCH
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.qos import check_user
from modelpool.actors.request.strict import Strict, no_truth_value
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.source_url import checked_source, is_url
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import UnusableField, UserError, parse_bytes, unknown_name, unusable_field
from modelpool.pool.values.core.fast_path import FastPath, FastPaths
from modelpool.pool.values.specs.spec import UserId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.user_share import EVERYBODY, UserShare

#: names the configuration file if none is named otherwise
CONFIG_VARIABLE = "MODELPOOL_CONFIG"
#: the configuration file in the working folder
CONFIG_NAME = "modelpool.toml"


#: tables of the file for the limits of users; they become a part of `PoolConfig.scheduler`
_USERS = "users"
#: nodes of the controller: the cluster's head, or the node of the program that starts the pool
ControllerPlace: TypeAlias = Literal["head", "driver"]
_AUTOSCALING = "autoscaling"
#: keys of the scheduler that are elsewhere in the file, and where
_TABLES: Mapping[str, str] = {
    "shares": "tables such as [users.ann]",
    "groups": "tables such as [groups.a100]",
    "autoscaling": "tables such as [autoscaling]",
    "max_unavailable_nodes": "max_unavailable in [maintenance]",
}
#: smallest size that may be written without a unit
LEAST_PLAIN_BYTES = 1_000_000
#: larger numbers without a unit were meant in MiB
_MOST_GIB = 1024
#: zero bytes, in any unit
_ZERO_BYTES = re.compile(r"0+(\.0*)?\s*([kmgt]i?)?b?", re.IGNORECASE)


class PoolSection(Strict):
    """The workers.

    device        "auto" selects the GPUs in Ray (cuda, rocm or xpu) if there are any, else sim
    workers       number of workers; "all" as `actors.control.pool_plan` decides for the device
    vram          memory limit of a worker on its GPU, such as "64MiB" or "20GiB"; by default all
    vram_policy   how much of the weights stays on the GPU (`pool.devices.vram_policy`); "auto" depends on the device
    reserve_vram  left to other programs, of the memory that is free when a worker starts; by default 400 MiB of a GPU
    products      how linear layers with quantized weights multiply (`pool.weights.ops.layer_choice.Products`)
    attention     "measured": the attention kernel for each class of shapes is measured at its first use on CUDA
                  (`pool.weights.ops.attention_choices`); "default": one order of kernels for all
    loras         "runtime": LoRAs on linear layers are products next to these; "merged": added to the weights
    memory_format  of the weights of convolutions (`pool.weights.patcher.weight_form.MemoryFormat`)
    cuda_graphs   whether calls of resident diffusion models are captured as CUDA graphs at the second use of a size
                  (`pool.weights.patcher.graphed_calls`); only on CUDA
    models        settings for single models, each a table [pool.models.NAME] in the file
    batch         meaning of the batch size "auto" of requests, which job files have by default: "auto" is as many as
                  pay, by measurements; a number holds for all requests that may have one
    overlap_decode  whether a GPU decodes on a stream of its own, while the next task begins, where there is memory for
                  both (`pool.engine.pending_run`); only on CUDA
    most_gpus     GPUs that may share the sampling of one output (`GenerateRequest.gpus`)
    gpu_link      bytes per second from one GPU of a machine to the others, such as "50GB"; by default gangs measure it
    threads       CPU threads of torch in each worker; changes the last bits of images on sim and cpu
    compile       "blocks": torch.compile for the repeated blocks of diffusion models while they are resident
                  (`pool.weights.patcher.compiled_blocks`); changes the last bits of images. Not on sim
    journal       file for the submissions of `modelpool submit`, on a disk of the controller's node that survives a
                  restart; false for none. By default a file of the pool's name in the user's state folder
    checkpoint_seconds  of work after which the state of a sampling run is saved, again and again; 0: never
    checkpoint_dir   folder on a disk of the controller's node that survives the node, for checkpoints of all workers;
                  by default `checkpoints` next to a journal that is configured, else in the user's state folder, where
                  each node also keeps its own workers' checkpoints
    checkpoint_bytes  maximum of each of these folders, such as "8GiB"
    worker_lease_seconds  of `modelpool up`: workers keep their weights for another controller if theirs is lost, and
                  end after this time without one; 0: they end with their controller
    """

    device: Literal["auto", "cuda", "rocm", "xpu", "mps", "npu", "mlu", "directml", "sim", "cpu"] = "auto"
    workers: int | str = "all"
    vram: str | int | None = None
    vram_policy: Literal["auto", "disabled", "none", "low", "normal", "high", "shared"] = "auto"
    reserve_vram: str | int | None = None
    products: Literal["exact", "auto", "reference"] = "exact"
    attention: Literal["default", "measured"] = "default"
    loras: Literal["merged", "runtime"] = "merged"
    memory_format: Literal["contiguous", "channels_last", "auto"] = "contiguous"
    cuda_graphs: bool = False
    models: tuple[ModelSettings, ...] = ()
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] | Literal["auto"] = "auto"
    overlap_decode: bool = False
    most_gpus: Literal[1, 2, 4, 8] = 8
    threads: Annotated[int, Field(ge=1)] = 1
    compile: Literal["off", "blocks"] = "off"
    journal: Path | Literal[False] | None = None
    checkpoint_seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 30.0
    checkpoint_dir: Path | None = None
    checkpoint_bytes: str | int = "8GiB"
    gpu_link: str | int | None = None
    worker_lease_seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 180.0

    @field_validator(
        "workers",
        "vram",
        "reserve_vram",
        "gpu_link",
        "batch",
        "threads",
        "checkpoint_seconds",
        "checkpoint_bytes",
        "worker_lease_seconds",
        mode="before",
    )
    @classmethod
    def _no_truth_value(cls, value: Any, about: ValidationInfo) -> Any:
        """Refuse booleans, which Python counts as numbers."""
        if isinstance(value, bool):
            raise unusable_field(str(about.field_name), value, "a number or a text")
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _models(cls, value: Any) -> tuple[ModelSettings, ...]:
        return settings_of_models(value)

    @field_validator("workers")
    @classmethod
    def _workers(cls, value: int | str) -> int | str:
        count = int(value) if isinstance(value, int) or value.isdecimal() else value
        if count != "all" and (isinstance(count, str) or count < 1):
            raise unusable_field("workers", value, 'a whole number from 1, or "all"')
        return count

    @field_validator("vram")
    @classmethod
    def _vram(cls, value: str | int | None) -> str | int | None:
        if value is not None:
            _check_size("vram", value, "a size such as 64MiB or 24GiB")
        return value

    @field_validator("reserve_vram")
    @classmethod
    def _reserve_vram(cls, value: str | int | None) -> str | int | None:
        if value is not None and not _ZERO_BYTES.fullmatch(str(value).strip()):
            _check_size("reserve_vram", value, "a size such as 600MiB, or 0")
        return value

    @field_validator("gpu_link")
    @classmethod
    def _gpu_link(cls, value: str | int | None) -> str | int | None:
        if value is not None:
            _check_size("gpu_link", value, "bytes per second, such as 50GB")
        return value

    @field_validator("checkpoint_bytes")
    @classmethod
    def _checkpoint_bytes(cls, value: str | int) -> str | int:
        _check_size("checkpoint_bytes", value, "a size such as 8GiB")
        return value

    @property
    def archive(self) -> Path | None:
        """The folder on the controller's node for checkpoints; None for the one in the user's state folder."""
        if self.checkpoint_dir is None and isinstance(self.journal, Path):
            return self.journal.parent / "checkpoints"
        return self.checkpoint_dir

    @property
    def gang_link_bytes_per_second(self) -> int | None:
        """`gpu_link` in bytes per second."""
        return None if self.gpu_link is None else parse_bytes(str(self.gpu_link))

    @property
    def checkpoint_bound_bytes(self) -> int:
        """`checkpoint_bytes` in bytes."""
        return parse_bytes(str(self.checkpoint_bytes))

    @property
    def fast_paths(self) -> FastPaths:
        """`compile` and `cuda_graphs`, by model."""
        usual = FastPath(self.compile == "blocks", self.cuda_graphs)
        own = (
            (
                each.name,
                FastPath(
                    usual.compiles if each.compile is None else each.compile == "blocks",
                    usual.captures if each.cuda_graphs is None else each.cuda_graphs,
                ),
            )
            for each in self.models
        )
        return FastPaths(usual, tuple(own))

    @property
    def budget_bytes(self) -> int | None:
        """`vram` in bytes."""
        return None if self.vram is None else parse_bytes(str(self.vram))

    @property
    def policy(self) -> VramPolicy | None:
        """`vram_policy`; None for the default of the device."""
        return None if self.vram_policy == "auto" else VramPolicy(self.vram_policy)

    @property
    def reserve_bytes(self) -> int | None:
        """`reserve_vram` in bytes; None for the default of the device."""
        return _bytes_or_zero(self.reserve_vram)


class ModelsSection(Strict):
    """Folders of weights (.safetensors files), searched recursively.

    registry      folder where `modelpool models` keeps added paths and hashes; by default one of the user
    allow_pickle  whether to read PyTorch's pickles (.ckpt, .pt, .pth, .bin); only weights are read, no code is run
    separate      models of separate files, each a table [models.NAME] in the file
    sources       URLs of folders or files of weights that nodes fetch when they need them: s3://, gs://, hf://,
                  http(s)://, file:// or the path of a shared folder, or any other scheme of an installed fsspec library
    cache         folder on a local disk of every node for fetched files; required with sources
    cache_bytes   maximum size of that folder, such as "200GiB"; by default the size of the disk
    pin           models that stay on GPUs from the start: NAME, or NAME:N for N GPUs, such as ["sdxl:2"]
    """

    folders: tuple[Path, ...] = ()
    loras: tuple[Path, ...] = ()
    registry: Path | None = None
    allow_pickle: bool = False
    separate: tuple[SeparateModel, ...] = ()
    sources: tuple[str, ...] = ()
    cache: Path | None = None
    cache_bytes: str | int | None = None
    pin: tuple[str, ...] = ()

    @field_validator("sources", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        """Check the form of each URL; which exist is found when the pool starts."""
        urls = (value,) if isinstance(value, (str, Path)) else value
        if not isinstance(urls, (list, tuple)) or not all(isinstance(url, (str, Path)) for url in urls):
            raise unusable_field("sources", value, "a list of URLs such as s3://bucket/models/")
        return tuple(checked_source("sources", str(url)) for url in urls)

    @field_validator("pin")
    @classmethod
    def _pin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            name, replicas = _pin_of(text)
            if not name or replicas < 1:
                raise unusable_field("pin", text, "the name of a model, or NAME:N for N GPUs, such as sdxl:2")
        return value

    @field_validator("cache_bytes", mode="before")
    @classmethod
    def _cache_bytes(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise unusable_field("cache_bytes", value, "a size such as 200GiB")
        if value is not None:
            _check_size("cache_bytes", value, "a size such as 200GiB")
        return value

    @model_validator(mode="after")
    def _has_cache(self) -> ModelsSection:
        if self.sources and self.cache is None:
            raise unusable_field("cache", None, "a folder on a local disk of every node, since there are sources")
        return self

    @property
    def pins(self) -> tuple[tuple[str, int], ...]:
        """The models to pin, each with its number of GPUs."""
        return tuple(map(_pin_of, self.pin))

    @property
    def cache_settings(self) -> CacheSettings | None:
        """The cache of each node; None without sources."""
        if not self.sources or self.cache is None:
            return None
        return CacheSettings(self.cache, None if self.cache_bytes is None else parse_bytes(str(self.cache_bytes)))

    @property
    def assemblies(self) -> tuple[Assembly, ...]:
        """The models of separate files, for the catalog."""
        return tuple(model.assembly for model in self.separate)

    @field_validator("allow_pickle", mode="before")
    @classmethod
    def _truth_value(cls, value: Any) -> Any:
        """Accept only booleans: pydantic would also accept "on" and 1."""
        if not isinstance(value, bool):
            raise unusable_field("allow_pickle", value, "true or false")
        return value


class WorkflowsSection(Strict):
    """Workflows.

    nodes  nodes of installed distributions that workflows may have, by the names of their entry points in the group
           `modelpool.nodes` (`pool.inference.operations.own_nodes`). No other one is imported
    """

    nodes: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = ()


class ClusterSection(Strict):
    """Ray. "auto" or host:port joins a running one; "local" starts one that ends with the pool. Without `address`, the
    one of RAY_ADDRESS is joined if that is set, else a local one is started.

    namespace, name  of the controller, so that other drivers find it
    controller       its node: "head" of the cluster, or the node of the "driver" that starts the pool; by default the
                     head for `modelpool up`, as its pool serves many drivers, else the driver
    poll_seconds     interval at which nodes and drain requests are read from Ray
    start_timeout    seconds that a worker of a group may wait for a node (then another group may be tried), and that a
                     worker may take to start on its node
    heartbeat_seconds  interval at which a silent worker is asked whether it answers; after 10 of them, or more during a
                     long run, it is given up (`actors.control.heartbeats`)
    drain_seconds    time for the running tasks when the pool is asked to end; those that would take longer stop at a
                     step
    notice_command   shell command, run on every node with workers, that prints the deadline once the node will be taken
                     back: a time (2026-01-31T12:00:00Z), Unix seconds, or seconds from now; nothing otherwise
    notice_seconds   interval of that command
    """

    address: str | None = None
    namespace: str = "modelpool"
    name: str = "modelpool"
    controller: ControllerPlace | None = None
    poll_seconds: Annotated[float, Field(ge=0.1, le=3600.0)] = 2.0
    start_timeout: Annotated[float, Field(ge=1.0, le=86400.0)] = 600.0
    heartbeat_seconds: Annotated[float, Field(ge=0.05, le=3600.0)] = 3.0
    drain_seconds: Annotated[float, Field(ge=0.0, le=86400.0)] = 20.0
    notice_command: str = ""
    notice_seconds: Annotated[float, Field(ge=0.5, le=3600.0)] = 5.0

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise unusable_field("name", value, "letters, digits, '.', '_' and '-'; it names a file too")
        return value


class OutputSection(Strict):
    """Files that are written to disk.

    folder  for finished outputs, or a URL such as s3://bucket/folder; by default none. A driver that connects to the
            pool uses it, too: a path is one of its own machine
    name    names of the files, as in "{id}-{seed}" (`actors.outputs.name_template`); by default prompt, seed and digest
    written_by  "nodes": outputs are written by the node that made them, with the driver's access to stores, and by the
            driver where that is impossible. "driver": by the driver, or the job service; then nothing of its access is
            passed to nodes
    record  the scheduler's event log, on the controller's node (see [cluster]); by default none
    """

    folder: Path | str | None = None
    name: str | None = None
    written_by: Literal["nodes", "driver"] = "nodes"
    record: Path | None = None

    @field_validator("folder")
    @classmethod
    def _address(cls, value: Path | str | None) -> OutputAddress | None:
        return None if value is None else output_address(value, "folder")

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str | None:
        return None if value is None else NameTemplate.of(value).text

    @property
    def defaults(self) -> OutputDefaults:
        """The settings that drivers of the pool use."""
        folder = None if self.folder is None else absolute_address(self.folder)
        return OutputDefaults(folder, self.name, self.written_by == "nodes")


#: usual interval of passing on metrics to the Ray of a cluster
RAY_METRICS_SECONDS = 10.0


class ObservabilitySection(Strict):
    """What a pool reports about itself.

    ray_metrics_seconds  interval at which metrics are passed on to Ray: its agents export them with Ray's own; 0:
                         never. By default every 10 s on a cluster; never, and without the agent, where Ray is started
                         for the pool
    traces               exporter of OpenTelemetry traces, by the name of its entry point: "console", or "otlp" with the
                         package opentelemetry-exporter-otlp; by default none. OpenTelemetry's environment variables
                         configure it
    log                  file on the controller's node for entries about the pool, its workers, jobs and failures; false
                         for none. By default one of the pool's name in the user's state folder for `modelpool up`, and
                         none for pools that end with their program
    log_format           "text", or "json" for one JSON object in a line
    """

    ray_metrics_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] | None = None
    traces: str | None = None
    log: Path | Literal[False] | None = None
    log_format: Literal["text", "json"] = "text"

    def export_seconds(self, own_ray: bool) -> float:
        """Return the interval of passing on metrics, 0 for never; `own_ray` was started for the pool."""
        if self.ray_metrics_seconds is None:
            return 0.0 if own_ray else RAY_METRICS_SECONDS
        return self.ray_metrics_seconds


class UserSection(Strict):
    """[users.NAME]: share and limits of one user; see `scheduler.model.user_share.UserShare`. The name "*" is for
    all other users.
    """

    weight: float = 1.0
    running_limit: int | None = None

    _no_truth_value = field_validator("weight", "running_limit", mode="before")(no_truth_value)

    def share_of(self, name: str) -> UserShare:
        """Convert to the scheduler's form. Raises UnusableField."""
        user = name if name == EVERYBODY else check_user(name)
        return UserShare(user=UserId(user), weight=self.weight, running_limit=self.running_limit)


class PoolConfig(Strict):
    """All settings of a pool, by section. Every value has a default."""

    pool: PoolSection = PoolSection()
    models: ModelsSection = ModelsSection()
    cluster: ClusterSection = ClusterSection()
    scheduler: SchedulerConfig = SchedulerConfig()
    output: OutputSection = OutputSection()
    serve: ServeSection = ServeSection()
    observability: ObservabilitySection = ObservabilitySection()
    maintenance: MaintenanceSection = MaintenanceSection()
    workflows: WorkflowsSection = WorkflowsSection()

    @classmethod
    def load(cls, path: str | Path) -> PoolConfig:
        """Read a TOML file; paths in it are relative to its folder.

        Raises UserError naming the file and the key.
        """
        path = Path(path)
        try:
            tables = tomllib.loads(path.read_text())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: is not TOML ({error})") from None
        try:
            return _from_tables(tables, path.resolve().parent)
        except UserError as problem:
            raise type(problem)(f"{path}: {problem}") from None

    @classmethod
    def find(cls, config: str | Path | PoolConfig | None = None) -> PoolConfig:
        """Return `config`, or read it; without one, use the first of these that exists: the file named by
        MODELPOOL_CONFIG, modelpool.toml in the working folder, models added to the registry (with all defaults),
        the laptop preset of this checkout, the example model of an installation, all defaults.
        """
        if isinstance(config, PoolConfig):
            return config
        if config is not None:
            if not isinstance(config, (str, os.PathLike)):
                raise unusable_field("config", config, "the path of a TOML file, or a PoolConfig")
            return cls.load(config)
        if named := os.environ.get(CONFIG_VARIABLE):
            return cls.load(named)
        if Path(CONFIG_NAME).is_file():
            return cls.load(CONFIG_NAME)
        preset = Path(__file__).resolve().parents[2] / "configs" / "laptop.toml"
        # the preset's small budget is for the example, not for the user's models
        if _has_added_models():
            return cls()
        if preset.is_file():
            return cls.load(preset)
        example = example_folder()
        if example is None:
            return cls()
        loras = [example / LORAS_FOLDER]
        return cls().override(models=[example / MODELS_FOLDER], loras=loras, vram=EXAMPLE_VRAM)

    def override(self, **values: Any) -> PoolConfig:
        """Return this configuration with single settings changed, by flat names; None leaves a setting unchanged.

        The names: device, workers, vram, vram_policy, reserve_vram, threads, models, loras (folders), allow_pickle,
        address, namespace, name, controller, output, record, host, port. Relative paths are relative to the working
        folder. Raises UserError for other names and for invalid values.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in _FLAT:
                raise unknown_name("setting", name, _FLAT)
            section, key = _FLAT[name]
            if value is not None:
                changed.setdefault(section, {})[key] = value
        sections: dict[str, Any] = {}
        for section, keys in changed.items():
            now: Strict = getattr(self, section)
            sections[section] = type(now)(**{**now.model_dump(), **_absolute(keys, Path.cwd())})
        return self.model_copy(update=sections)

    def describe(self, changes_only: bool = False) -> str:
        """Format the configuration in the shape of its file; with `changes_only`, without what has its default."""
        lines: list[str] = []
        defaults = PoolConfig()
        for section in type(self).model_fields:
            keys, by_default = self._keys_of(section), defaults._keys_of(section)
            named = {key: item for key, item in keys.items() if not changes_only or item != by_default[key]}
            if named or not changes_only:
                lines += [f"[{section}]", *(f"{key} = {_toml_value(item)}" for key, item in named.items()), ""]
        lines += [line for model in self.pool.models for line in model.describe()]
        lines += [line for model in self.models.separate for line in model.describe()]
        for share in self.scheduler.shares:
            limit = _toml_value(share.running_limit)
            lines += [f'[users."{share.user}"]', f"weight = {share.weight}", f"running_limit = {limit}", ""]
        lines += describe_groups(self.scheduler.groups, self.scheduler.autoscaling)
        return "\n".join(lines)

    def _keys_of(self, section: str) -> dict[str, Any]:
        """Return the keys of a section, without those that are tables of their own."""
        value = getattr(self, section)
        keys: dict[str, Any] = dataclasses.asdict(value) if section == "scheduler" else value.model_dump()
        own = {key: item for key, item in keys.items() if key not in (*_TABLES, "separate", "models")}
        return own if section != "serve" else {**own, **_without_secrets(own)}


_FLAT: Mapping[str, tuple[str, str]] = {
    "device": ("pool", "device"),
    "workers": ("pool", "workers"),
    "vram": ("pool", "vram"),
    "vram_policy": ("pool", "vram_policy"),
    "reserve_vram": ("pool", "reserve_vram"),
    "threads": ("pool", "threads"),
    "models": ("models", "folders"),
    "loras": ("models", "loras"),
    "allow_pickle": ("models", "allow_pickle"),
    "address": ("cluster", "address"),
    "namespace": ("cluster", "namespace"),
    "name": ("cluster", "name"),
    "controller": ("cluster", "controller"),
    "output": ("output", "folder"),
    "record": ("output", "record"),
    "host": ("serve", "host"),
    "port": ("serve", "port"),
}


def _without_secrets(serve: Mapping[str, Any]) -> dict[str, Any]:
    """Return the printed form of the secrets of [serve]: the users that have keys, and whether there is a secret."""
    return {"keys": sorted(serve["keys"]), "webhook_secret": "(set)" if serve["webhook_secret"] else ""}


def _pin_of(text: str) -> tuple[str, int]:
    """Return the name and the number of GPUs of "NAME" or "NAME:N"."""
    name, colon, number = text.rpartition(":")
    return (name, int(number)) if colon and number.isdecimal() else (text, 1)


def _has_added_models() -> bool:
    """Whether models were added to the user's registry."""
    from modelpool.pool.catalog.registry.registry_store import open_store

    try:
        return bool(open_store().locations())
    except UserError:  # reported when the registry is used
        return False


def _check_size(key: str, size: Any, expected: str) -> None:
    """Raise UnusableField if `size` is none, and for a small number without a unit: who writes 20 means 20 GiB, not 20
    bytes.
    """
    try:
        size_bytes = parse_bytes(str(size))
    except UserError:
        raise unusable_field(key, size, expected) from None
    plain = str(size).strip()
    if size_bytes < LEAST_PLAIN_BYTES and plain.replace(".", "", 1).isdecimal():
        unit = "GiB" if float(plain) <= _MOST_GIB else "MiB"
        raise unusable_field(key, size, f'a size with a unit, such as "{plain}{unit}": a number alone is in bytes')


def _bytes_or_zero(size: str | int | None) -> int | None:
    """Parse a size that may be 0 (which `parse_bytes` refuses), with or without a unit, or None."""
    if size is None:
        return None
    return 0 if _ZERO_BYTES.fullmatch(str(size).strip()) else parse_bytes(str(size))


def _from_tables(tables: Mapping[str, Any], folder: Path) -> PoolConfig:
    sections: dict[str, Any] = {}
    for section, table in tables.items():
        if section in (_USERS, GROUPS, _AUTOSCALING):
            continue
        if section not in PoolConfig.model_fields:
            raise unknown_name("section", section, (*PoolConfig.model_fields, _USERS, GROUPS, _AUTOSCALING))
        if not isinstance(table, dict):
            raise unusable_field(section, table, f"a table, [{section}]")
        own, more = dict(table), {}
        try:
            if section == "models":
                more = {"separate": separate_models(table, folder, ModelsSection.model_fields)}
                own = {key: value for key, value in table.items() if not isinstance(value, dict)}
            sections[section] = _section(section, _absolute(own, folder) | more)
        except UserError as problem:
            raise type(problem)(f"[{section}] {problem}") from None
    if _USERS in tables:
        known = sections.get("scheduler", SchedulerConfig())
        sections["scheduler"] = dataclasses.replace(known, shares=_shares(tables[_USERS]))
    if GROUPS in tables or _AUTOSCALING in tables:
        known = sections.get("scheduler", SchedulerConfig())
        groups = node_groups(tables.get(GROUPS, {}))
        limits = autoscaling_of(tables.get(_AUTOSCALING, {}), groups)
        sections["scheduler"] = dataclasses.replace(known, groups=groups, autoscaling=limits)
    return PoolConfig(**sections)


def _shares(table: Any) -> tuple[UserShare, ...]:
    """Parse the tables [users.NAME]."""
    if not isinstance(table, dict):
        raise unusable_field(_USERS, table, "tables such as [users.ann]")
    shares = []
    for name, keys in table.items():
        if not isinstance(keys, dict):
            raise unusable_field(f"[users] {name}", keys, f"a table, [users.{name}]")
        try:
            shares.append(UserSection(**keys).share_of(name))
        except UserError as problem:
            raise type(problem)(f"[users.{name}] {problem}") from None
    return tuple(shares)


def _section(name: str, keys: Mapping[str, Any]) -> Strict | SchedulerConfig:
    model = PoolConfig.model_fields[name].annotation
    assert isinstance(model, type), f"section {name} has no class"
    strict = issubclass(model, Strict)
    known = list(model.model_fields) if strict else [field.name for field in dataclasses.fields(SchedulerConfig)]
    for key in keys:
        if key not in known:
            raise unknown_name("key", key, known)
    return model(**keys) if strict else _scheduler_config(keys)


def _scheduler_config(keys: Mapping[str, Any]) -> SchedulerConfig:
    for key, table in _TABLES.items():
        if key in keys:
            raise unusable_field(key, keys[key], f"no such key here; write {table}")
    for key, found in keys.items():
        if (
            isinstance(found, bool) and key != "placement"
        ):  # pydantic would convert it to a number before the class sees it
            raise unusable_field(key, found, "a finite number")
    try:
        return TypeAdapter(SchedulerConfig).validate_python(dict(keys))
    except ValidationError as complaint:
        detail = complaint.errors()[0]
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, UnusableField):
            raise own from None
        key = ".".join(str(part) for part in detail["loc"])
        raise unusable_field(key, detail["input"], expected_words(detail["type"], detail["msg"])) from None


def _absolute(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths among `keys` absolute; other values are left for the section to refuse."""

    def absolute(item: Any) -> Any:
        return Path(os.path.normpath(folder / Path(item).expanduser())) if isinstance(item, (str, Path)) else item

    found = dict(keys)
    for key in ("folders", "loras"):
        if isinstance(found.get(key), (str, Path)):
            found[key] = (found[key],)
        if isinstance(found.get(key), (list, tuple)):
            found[key] = tuple(absolute(item) for item in found[key])
    for key in ("folder", "record", "registry", "cache", "journal", "checkpoint_dir", "log"):
        if key in found and not (key == "folder" and isinstance(found[key], str) and is_url(found[key])):
            found[key] = absolute(found[key])
    return found


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return '""  # not set'
        case bool():
            return str(value).lower()
        case str() | Path():
            return f'"{value}"'
        case list() | tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case _:
            return str(value)
