"""`applied`: a module with a run's options for the time of a block of code.

Chooses by the kind of module; knows no option in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.run_context import Run, under_way
from modelpool.pool.options.wrappers import WrapperPoint
from modelpool.pool.patcher.blocks.overlays import Overlays


@contextmanager
def applied(module: nn.Module, options: ModelOptions) -> Iterator[None]:
    """Calls of `module` inside the block act as `options` say; after it, the module is exactly as it was.

    Without options for the module nothing is put on it. Raises UnusableField, before the block, for an option that this
    kind of module has no place for: an option is never ignored.
    """
    run = Run(module, options)
    overlays = Overlays(run)
    try:
        if not options.transformer.is_empty:
            _install(module, options, overlays)
        if options.wrappers.at(WrapperPoint.DIFFUSION_MODEL):
            overlays.put(module, _wrapped(options))
        with under_way(run):
            yield
    finally:
        overlays.remove()


def _install(module: nn.Module, options: ModelOptions, overlays: Overlays) -> None:
    # here, because importing diffusers takes seconds, and only runs with such options need its names
    from modelpool.pool.patcher.blocks.diffusers_names import is_unet
    from modelpool.pool.patcher.blocks.dit import DitInstaller
    from modelpool.pool.patcher.blocks.unet import UnetInstaller

    installer = UnetInstaller if is_unet(module) else DitInstaller
    installer(module, options.transformer, overlays).install()


def _wrapped(options: ModelOptions) -> Callable[..., Any]:
    def around(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return options.wrappers.around(WrapperPoint.DIFFUSION_MODEL, below)(*args, **kwargs)

    return around
