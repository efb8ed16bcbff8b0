"""`applied`: applies a run's options to a module for the duration of a block of code.

Dispatches on the kind of module; knows no option in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import ModuleRun, active_run
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher.blocks.overlays import Overlays


@contextmanager
def applied(module: nn.Module, options: ModelOptions) -> Iterator[None]:
    """Make calls of `module` inside the block act on `options`; on exit the module is exactly as before.

    Without options for the module nothing is installed. Raises UnusableField, before the block, for an option that does
    not apply to this kind of module: an option is never ignored.
    """
    run = ModuleRun(module, options)
    overlays = Overlays(run)
    try:
        if not options.transformer.is_empty:
            _install(module, options, overlays)
        if options.wrappers.at(WrapperPoint.DIFFUSION_MODEL):
            overlays.put(module, _wrapped(options))
        with active_run(run):
            yield
    finally:
        overlays.remove()


def _install(module: nn.Module, options: ModelOptions, overlays: Overlays) -> None:
    # imported here because importing diffusers takes seconds, and only runs with such options need its names
    from modelpool.pool.weights.patcher.blocks.diffusers_names import is_unet
    from modelpool.pool.weights.patcher.blocks.dit import DitInstaller
    from modelpool.pool.weights.patcher.blocks.unet_blocks import UnetInstaller

    installer = UnetInstaller if is_unet(module) else DitInstaller
    installer(module, options.transformer, overlays).install()


def _wrapped(options: ModelOptions) -> Callable[..., Any]:
    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return options.wrappers.around(WrapperPoint.DIFFUSION_MODEL, original)(*args, **kwargs)

    return wrapper
