"""`PatcherExtras`: everything that a patcher carries beside weights and patches, as one frozen value.

Clones share it and copy on write, so that cloning does not depend on how much there is. Knows what there is and in
which order it is entered and left around a run; `pool.patcher.model_patcher` owns the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from modelpool.pool.options.callbacks import Callback, CallbackPoint, Callbacks
from modelpool.pool.options.injections import Injection, Injections, Placement, placements_of
from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.object_patches import objects_replaced, patched_object_at
from modelpool.pool.options.transformer_options import Patch, functions_of, on_device
from modelpool.pool.patcher.blocks.applied import applied
from modelpool.pool.patcher.hooks import HookGroup

if TYPE_CHECKING:
    from modelpool.pool.patcher.model_patcher import ModelPatcher


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
        """The injections of the patcher's run are out inside the block, and in again after it.

        When one cannot be put in again, none is, and the run goes on, and ends, without them.
        """
        if not self.injections.entries:
            yield
            return
        # another thread knows no runs of this one: seen from there, injections are in
        known = placements_of(patcher) or (Placement(self.injections, patcher, is_in=True),)
        # the innermost that are in; the blocks around this one ask for those of outer runs
        placement = next((p for p in known if p.is_in), None)
        if placement is None:  # could not be put in again the last time
            yield
            return
        self._take_out(placement, patcher)
        try:
            yield
        finally:
            self._put_in(placement, patcher)

    @contextmanager
    def _injected(self, patcher: ModelPatcher) -> Iterator[None]:
        if not self.injections.entries:
            yield
            return
        placement = Placement(self.injections, patcher)
        with placement.under_way():
            try:
                self._put_in(placement, patcher)
                yield
            finally:
                self._take_out(placement, patcher)

    def _put_in(self, placement: Placement, patcher: ModelPatcher) -> None:
        placement.put_in()
        self.callbacks.call(CallbackPoint.ON_INJECT_MODEL, patcher)

    def _take_out(self, placement: Placement, patcher: ModelPatcher) -> None:
        if placement.is_in:
            placement.take_out()
            self.callbacks.call(CallbackPoint.ON_EJECT_MODEL, patcher)


def get_model_object(patcher: ModelPatcher, path: str) -> Any:
    """What a run of `patcher` finds at `path` in its module: an object patch, or what is there. Raises UnknownName."""
    return patched_object_at(patcher.module, path, patcher.extras.object_patches)


def models_to_load(patcher: ModelPatcher, groups: Iterable[HookGroup | None] = ()) -> tuple[ModelPatcher, ...]:
    """The patchers that a run of `patcher` needs beside it, each once: its additional models, those that functions of
    its options and of its conditions' hook `groups` name (by a method `models()`), and theirs in turn. Lease them
    together with it."""
    found: list[ModelPatcher] = []
    of_conditions = [group.transformer for group in groups if group is not None]

    def visit(one: ModelPatcher) -> None:
        extras = one.extras
        options = [extras.options.transformer, *(of_conditions if one is patcher else ())]
        named = [model for o in options for f in functions_of(o) for model in _models_of(f)]
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
    transformer = on_device(options.transformer, device)
    return options if transformer is options.transformer else replace(options, transformer=transformer)


def _attachment_of_clone(value: Any) -> Any:
    on_clone = getattr(value, "on_model_patcher_clone", None)
    return on_clone() if callable(on_clone) else value
