"""`PatcherExtras`: everything that a patcher carries beside weights and patches, as one frozen value.

Clones share it and copy on write, so that cloning does not depend on how much there is. Knows what there is and in
which order it is entered and left around a run; `pool.patcher` owns the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from pool.model_patches.applied import applied
from pool.options.callbacks import Callback, CallbackPoint, Callbacks
from pool.options.injections import Injection, Injections
from pool.options.model_options import ModelOptions
from pool.options.object_patches import object_at, objects_replaced
from pool.options.transformer_options import Patch, functions_of, moved

if TYPE_CHECKING:
    from pool.patcher import ModelPatcher


@dataclass(frozen=True, slots=True)
class PatcherExtras:
    """What a patcher carries beside weights and patches. Each `with_` method returns a new value.

    options            what its runs are told
    callbacks          who is told what happens to it
    injections         what is put into the module for a run; out of it while weights change
    object_patches     attribute path -> object that takes the place of what is there, for a run
    attachments        anything of anyone's; one that defines `on_model_patcher_clone()` gives clones what that returns
    additional_models  patchers that its runs need beside it; cloned with it
    """

    options: ModelOptions = field(default_factory=ModelOptions)
    callbacks: Callbacks = field(default_factory=Callbacks)
    injections: Injections = field(default_factory=Injections)
    object_patches: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    attachments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    additional_models: Mapping[str, tuple[ModelPatcher, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def with_options(self, change: Callable[[ModelOptions], ModelOptions]) -> PatcherExtras:
        """These with `change` done to the options."""
        return replace(self, options=change(self.options))

    def with_callback(self, point: CallbackPoint, callback: Callback, key: str = "") -> PatcherExtras:
        """These, and `callback` told of `point`."""
        return replace(self, callbacks=self.callbacks.with_callback(point, callback, key))

    def with_injections(self, key: str, *pairs: Injection) -> PatcherExtras:
        """These, with `pairs` under `key`."""
        return replace(self, injections=self.injections.with_injections(key, *pairs))

    def with_object_patch(self, path: str, value: Any) -> PatcherExtras:
        """These, with `value` in the place of what is at `path` in the module, during runs."""
        return replace(self, object_patches=MappingProxyType({**self.object_patches, path: value}))

    def with_attachment(self, name: str, value: Any) -> PatcherExtras:
        """These, with `value` under `name`."""
        return replace(self, attachments=MappingProxyType({**self.attachments, name: value}))

    def with_additional_models(self, key: str, *patchers: ModelPatcher) -> PatcherExtras:
        """These, with `patchers` under `key`."""
        return replace(self, additional_models=MappingProxyType({**self.additional_models, key: patchers}))

    def cloned(self, clone: Callable[[ModelPatcher], ModelPatcher]) -> PatcherExtras:
        """What a clone of the patcher carries: these, with attachments and additional models that are its own."""
        if not self.attachments and not self.additional_models:
            return self
        models = {key: tuple(map(clone, patchers)) for key, patchers in self.additional_models.items()}
        attachments = {name: _attachment_of_clone(value) for name, value in self.attachments.items()}
        return replace(self, attachments=MappingProxyType(attachments), additional_models=MappingProxyType(models))

    @contextmanager
    def entered(self, patcher: ModelPatcher, options: ModelOptions) -> Iterator[None]:
        """A run of `patcher` with `options`: told of, objects replaced, injected, patched; all undone after it.

        What is undone is undone in the opposite order, whatever raises.
        """
        self.callbacks.call(CallbackPoint.ON_PRE_RUN, patcher)
        try:
            with (
                objects_replaced(patcher.module, self.object_patches),
                self._injected(patcher),
                applied(patcher.module, _on_device(options, patcher.device)),
            ):
                yield
        finally:
            self.callbacks.call(CallbackPoint.ON_CLEANUP, patcher)

    @contextmanager
    def ejected(self, patcher: ModelPatcher) -> Iterator[None]:
        """All injections are out inside the block, and in again after it."""
        self._eject(patcher)
        try:
            yield
        finally:
            self._inject(patcher)

    @contextmanager
    def _injected(self, patcher: ModelPatcher) -> Iterator[None]:
        self._inject(patcher)
        try:
            yield
        finally:
            self._eject(patcher)

    def _inject(self, patcher: ModelPatcher) -> None:
        if self.injections.entries:
            self.injections.inject(patcher)
            self.callbacks.call(CallbackPoint.ON_INJECT_MODEL, patcher)

    def _eject(self, patcher: ModelPatcher) -> None:
        if self.injections.entries:
            self.injections.eject(patcher)
            self.callbacks.call(CallbackPoint.ON_EJECT_MODEL, patcher)


def get_model_object(patcher: ModelPatcher, path: str) -> Any:
    """What a run of `patcher` finds at `path` in its module: an object patch, or what is there. Raises UnknownName."""
    patches = patcher.extras.object_patches
    return patches[path] if path in patches else object_at(patcher.module, path)


def models_to_load(patcher: ModelPatcher) -> tuple[ModelPatcher, ...]:
    """The patchers that a run of `patcher` needs beside it, each once: its additional models, those that functions of
    its options name (by a method `models()`), and theirs in turn. Lease them together with it."""
    found: list[ModelPatcher] = []

    def visit(one: ModelPatcher) -> None:
        extras = one.extras
        named = [model for f in functions_of(extras.options.transformer) for model in _models_of(f)]
        for model in (*(m for models in extras.additional_models.values() for m in models), *named):
            if model is not patcher and not any(model is known for known in found):
                found.append(model)
                visit(model)

    visit(patcher)
    return tuple(found)


def _models_of(function: Patch) -> tuple[ModelPatcher, ...]:
    models = getattr(function, "models", None)
    return tuple(models()) if callable(models) else ()


def _on_device(options: ModelOptions, device: torch.device) -> ModelOptions:
    """`options` with the functions that can be moved (by a method `to`) on `device`."""

    def to_device(function: Patch) -> Patch:
        move = getattr(function, "to", None)
        return move(device) if callable(move) else function

    transformer = moved(options.transformer, to_device)
    return options if transformer is options.transformer else replace(options, transformer=transformer)


def _attachment_of_clone(value: Any) -> Any:
    on_clone = getattr(value, "on_model_patcher_clone", None)
    return on_clone() if callable(on_clone) else value
