"""Checks before a pool is started: folders of the configuration, and names in requests. Reads folders and headers of
weights; starts nothing, and takes a fraction of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.client.exact_checks import ExactChecks
from modelpool.actors.client.model_checks import ModelChecks
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.example_model import WAYS_TO_MODELS
from modelpool.actors.ray.ray_session import LOCAL, chosen_address
from modelpool.pool.catalog.registry.file_purpose import LORAS, MODELS, FileKind
from modelpool.pool.devices.kind_names import AUTO, NO_GPU, RAY_COUNTS, DeviceKind, one_worker
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import UserError, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache

if TYPE_CHECKING:
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.pool.catalog.registry.registry import Registry

#: on Linux, at least one of these exists where Ray counts GPUs: of drivers of NVIDIA, AMD, Intel, Tegra and of WSL
GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dri", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg")
#: checked names that are remembered: a batch names the same files in every line
NAMES_REMEMBERED = 4096
#: names in a message
_MOST_LISTED = 20


def check_folders(config: PoolConfig) -> None:
    """Raise UserError if a configured folder of weights does not exist. Nothing is checked for a pool on a cluster:
    its nodes may have the folder.
    """
    if chosen_address(config.cluster.address, os.environ) != LOCAL:
        return
    for key, folders in (("folders", config.models.folders), ("loras", config.models.loras)):
        for folder in folders:
            if not os.path.lexists(folder):
                raise unusable_field(f"[models] {key}", str(folder), "a folder that exists, or a file")


def check_named_models(config: PoolConfig) -> None:
    """Raise UserError for a model with settings of its own, or one to pin, that is no model of the configuration: the
    controller would raise it, without a word about where the name is. Nothing is checked if the files of the pool may
    be on other machines.
    """
    named = [(f"[pool.models.{each.name}]", each.name) for each in config.pool.models]
    named += [("[models] pin", name) for name, _ in config.models.pins]
    if not named or config.models.sources or chosen_address(config.cluster.address, os.environ) != LOCAL:
        return
    registry = _registry_of(config)
    for place, name in named:
        try:
            registry.find_model(name)
        except UserError as problem:
            raise type(problem)(f"{place}: {problem}") from None


def _registry_of(config: PoolConfig) -> Registry:
    from modelpool.pool.catalog.registry.registry import open_registry

    models = config.models
    return open_registry(
        models.folders, models.loras, models.registry, allow_pickle=models.allow_pickle, assemblies=models.assemblies
    )


def check_device(config: PoolConfig) -> None:
    """Raise UserError if the pool cannot have its workers: for a kind of GPU that this machine does not have, and for
    more workers than can be isolated. `plan_pool` raises the same once Ray runs; it also knows how many GPUs there are.
    """
    pool = config.pool
    if pool.device == AUTO or pool.policy is VramPolicy.DISABLED:
        return
    kind = DeviceKind(pool.device)
    if kind.computes_on_host or chosen_address(config.cluster.address, os.environ) != LOCAL:
        return
    if kind in RAY_COUNTS:
        if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
            raise unusable_field("device", kind.value, NO_GPU)
    elif pool.workers not in (1, "all"):
        raise unusable_field("workers", pool.workers, one_worker(kind))


def simulates_gpus(config: PoolConfig) -> bool:
    """Whether it is certain that the pool has simulated GPUs: they are configured, or this machine has no GPU. A
    cluster may have other machines.
    """
    pool = config.pool
    if pool.policy is VramPolicy.DISABLED or pool.device not in (AUTO, DeviceKind.SIM.value):
        return False
    if pool.device == DeviceKind.SIM.value:
        return True
    is_local = chosen_address(config.cluster.address, os.environ) == LOCAL
    return is_local and sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES))


def computes_on_host(config: PoolConfig) -> bool:
    """Whether it is certain that no GPU computes: the catalog of such a pool answers the same in any process."""
    pool = config.pool
    return pool.device in (DeviceKind.SIM.value, DeviceKind.CPU.value) or simulates_gpus(config)


class NameCheck:
    """Checks the names of models and other files as the catalog of a pool would that is started here."""

    def __init__(
        self,
        registry: Registry | None,
        on_found: Callable[[Sequence[Path]], object] = lambda files: None,
        *,
        allow_pickle: bool = False,
        budget_bytes: int | None = None,
        check_exactly: Callable[[GenerateRequest], None] = lambda request: None,
    ) -> None:
        """Without a `registry`, every name counts as known: the pool will check it. `on_found` gets the files of each
        name that is known, once. `budget_bytes` is the configured memory limit of a worker. `check_exactly` checks a
        request as the pool would, in seconds.
        """
        self._check_exactly = check_exactly
        #: nodes of users that the configuration permits, which only a pool imports; None for a running pool's
        self._own_nodes: frozenset[str] | None = frozenset()
        self._registry = registry
        self._allow_pickle = allow_pickle
        self._on_found = on_found
        self._model_checks = (
            None
            if registry is None
            else ModelChecks(registry.find_model, budget_bytes=budget_bytes, allow_pickle=allow_pickle)
        )
        self._checked: LruCache[tuple[str, str], UserError | None] = LruCache(NAMES_REMEMBERED)

    @classmethod
    def of(
        cls,
        config: PoolConfig,
        on_found: Callable[[Sequence[Path]], object] = lambda files: None,
        on_slow: Callable[[], object] = lambda: None,
    ) -> NameCheck:
        """Return the check of a pool with this configuration: of nothing if its files may be on other machines.
        `on_slow` is called before a check that takes seconds."""
        models = config.models
        if models.sources or chosen_address(config.cluster.address, os.environ) != LOCAL:
            return cls(None)._with_nodes(config)
        return cls(
            _registry_of(config),
            on_found,
            allow_pickle=models.allow_pickle,
            budget_bytes=None if config.pool.policy is VramPolicy.DISABLED else config.pool.budget_bytes,
            # what a catalog assumes for GPUs depends on those that Ray counts
            check_exactly=ExactChecks(config, on_slow).check if computes_on_host(config) else lambda request: None,
        )._with_nodes(config)

    @classmethod
    def of_running_pool(cls) -> NameCheck:
        """Return the check of a pool that runs: of nothing, as it has its own files and nodes."""
        found = cls(None)
        found._own_nodes = None
        return found

    def may_be_own_node(self, name: str) -> bool:
        """Whether a node that modelpool does not have may be one of users."""
        return self._own_nodes is None or name in self._own_nodes

    def _with_nodes(self, config: PoolConfig) -> NameCheck:
        self._own_nodes = frozenset(config.workflows.nodes)
        return self

    def check(self, request: GenerateRequest) -> None:
        """Raise the error of the first name in `request` that means no file: UnknownName with near names,
        AmbiguousName or CorruptFile.
        """
        if request.workflow is not None:
            for kind, name in request.workflow.names():
                self._check(kind, name)
            return
        for each in request.passes:
            for kind, name in (("model", each.model), ("upscaler", each.upscaler)):
                if name is not None:
                    self._check(kind, name)
            for lora in each.loras or ():
                self._check(lora.file_kind, lora.name)
        self._check("model", request.model)
        if request.decoder is not None and request.decoder.model:
            self._check("model", request.decoder.model)
        for lora in request.loras:
            self._check(lora.file_kind, lora.name)
        for control in request.controls:
            self._check("controlnet", control.model)
        if request.upscale is not None:
            self._check("upscaler", request.upscale.model)
        if request.hires is not None and request.hires.upscaler is not None:
            self._check("upscaler", request.hires.upscaler)
        for prompt in request.image_prompts:
            if prompt.model != request.model:  # one that reads images by itself
                self._check("image_prompt", prompt.model)
            if prompt.encoder:
                self._check("vision_encoder", prompt.encoder)

    def check_supported(self, request: GenerateRequest) -> None:
        """Raise UserError for a field that the known model of `request` does not support, and for a
        memory limit that is too small for it; see `ModelChecks`."""
        if self._model_checks is not None:
            self._model_checks.check(request)

    def check_before_start(self, request: GenerateRequest) -> None:
        """Raise the UserErrors of `check_supported`, and those with which a pool would refuse `request`, whose images
        are read: for its memory, its embeddings, a strength without a step, or a file that is no model. Takes seconds
        for a request for which one of these is likely, and no more than `check_supported` for others."""
        if self._model_checks is None or self._registry is None:
            return
        self._model_checks.check(request)
        if self._has_unknown_embedding(request) or self._model_checks.is_doubtful(request):
            self._check_exactly(request)

    def _has_unknown_embedding(self, request: GenerateRequest) -> bool:
        """Whether a prompt names an embedding that has no file of its own; a LoRA may contain it."""
        texts = [text for _, text in request.texts()]
        if self._registry is None or not any("embedding:" in text for text in texts):
            return False
        from modelpool.pool.models.text.chunks import embeddings_in

        names = {name for text in texts for name in embeddings_in(text)}
        return not all(self.knows("embedding", name) for name in names)

    def check_upscaler(self, name: str) -> None:
        """Raise UserError for the name of an upscaler that means no file."""
        self._check("upscaler", name)

    def knows(self, kind: str, name: str) -> bool:
        """Whether `name` means a file of this kind: "model", "lora", "controlnet" or "upscaler". True if files are not
        known here."""
        try:
            self._check(kind, name)
        except UserError:
            return False
        return True

    def family_of(self, model: str) -> str:
        """Return the title of the family of the model that `model` names, as a pool lists it; "" if it is not known
        here."""
        if self._registry is None:
            return ""
        from modelpool.pool.catalog.registry.listings import list_model

        try:
            return list_model(model, self._registry.find_model(model), self._allow_pickle).family
        except UserError:
            return ""

    def model_names(self) -> tuple[str, ...] | None:
        """Return the names of all models; None if they are not known here."""
        return self._names(MODELS)

    def only_model(self) -> str | None:
        """Return the name of the only model; None if models are not known here. Raises UserError, which says what the
        files are, if there is none."""
        names = self.model_names()
        if names is None or len(names) == 1:
            return None if names is None else names[0]
        if names:
            raise UserError(f"--model is required; models of this pool: {', '.join(sorted(names))}")
        assert self._registry is not None, "names are known"
        others = [f"{name} ({kind.value})" for kind in FileKind for name, _ in self._registry.files((kind,))]
        found = f"; found {', '.join(others[:_MOST_LISTED])}" if others else ""
        folders = ", ".join(str(each.path) for each in self._registry.locations()) or "no folder"
        raise UserError(
            f"no model was found in {folders}{found}: put a checkpoint there, name its folder in [models] of the "
            "configuration, or add it with `modelpool models add`; `modelpool models` shows every file; "
            f"{WAYS_TO_MODELS}"
        )

    def lora_names(self) -> tuple[str, ...] | None:
        """Return the names of all LoRAs; None if they are not known here."""
        return self._names(LORAS)

    def _names(self, kinds: Collection[FileKind]) -> tuple[str, ...] | None:
        return None if self._registry is None else tuple(name for name, _ in self._registry.files(kinds))

    def _check(self, kind: str, name: str) -> None:
        if self._registry is not None:
            problem = self._checked.get((kind, name), lambda: self._problem(kind, name))
            if problem is not None:
                raise problem.with_traceback(None)  # else it would grow with each line of a batch

    def _problem(self, kind: str, name: str) -> UserError | None:
        registry = self._registry
        assert registry is not None, "without a registry nothing is checked"
        find = {
            "model": registry.find_model,
            "lora": registry.find_lora,
            "controlnet": registry.find_controlnet,
            "upscaler": registry.find_upscaler,
            "image_prompt": registry.find_image_prompt,
            "gligen": registry.find_gligen,
            "vision_encoder": registry.find_vision_encoder,
            "embedding": registry.find_embedding,
        }[kind]
        try:
            file = find(name)
        except UserError as problem:
            return problem
        self._on_found(file.members)
        return None
