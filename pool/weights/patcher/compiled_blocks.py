"""Compiles the repeated blocks of a model with `torch.compile`, for runs in which they are frozen.

A block is frozen if all its weights are on the device in compute dtype, none has a patch that is computed at each use,
and the run has no option that acts inside the model. For the run, its modules get torch's own classes back, so that
the graph contains no casting, and its forward is the compiled one. Any other block runs as usual: a model that is
resident in part is compiled in part. A class is compiled once for all its blocks and all its models, per shape; weights
are inputs of the graph, so a switch of LoRAs compiles nothing.

Interrupts are checked before each compiled block, not at each layer. Results differ from uncompiled ones by rounding.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.devices.torch_api.torch_private import compile_errors
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.user_folders import cache_folder, folder_name
from modelpool.pool.weights.ops.attention_calls import is_refusal
from modelpool.pool.weights.ops.casting_classes import FUNCTIONS_ATTRIBUTE, Casting, casting_class
from modelpool.pool.weights.ops.context import check_interrupt
from modelpool.pool.weights.ops.convolution import installed_torch_has_conv3d_fault
from modelpool.pool.weights.ops.low_rank_linear import LOW_RANK_ATTRIBUTE
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory

#: a backend of torch.compile: its name, or a function of a graph and its example inputs
Backend: TypeAlias = str | Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]

#: torch's name of the variable with the folder of compiled code. Its keys contain torch's version and the device
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

#: sizes for which blocks run uncompiled that are remembered
UNCOMPILED_KEPT = 256
#: a block class and the shapes of its inputs
InputShapes: TypeAlias = tuple[type[nn.Module], tuple[Any, ...]]

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class BlockCompiler:
    """Compiles the forwards of block classes. One for all models of an engine.

    backend     as in `torch.compile`
    refused     block class -> why torch could not compile it; its blocks run uncompiled
    uncompiled  classes with the shapes of inputs for which their code contains an attention kernel that refuses them
    is_stopped  all blocks run uncompiled
    """

    backend: Backend = "inductor"
    refused: dict[type[nn.Module], str] = field(default_factory=dict)
    uncompiled: LruCache[InputShapes, bool] = field(default_factory=lambda: LruCache(UNCOMPILED_KEPT))
    is_stopped: bool = False
    _compiled: dict[type[nn.Module], Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, device_name: str) -> BlockCompiler:
        """Return a compiler that keeps code in the user's cache folder, also for later processes: in a folder for
        each kind of GPU and version of torch, which may be copied to other machines or removed. Sets the environment
        variable by which torch finds that folder, unless it is set.

        Within it torch finds code by the graph, so that models with equal blocks share it.
        """
        os.environ.setdefault(CACHE_VARIABLE, str(cache_folder() / "compiled" / folder_name(device_name)))
        return cls()

    def stop(self, reason: str) -> None:
        """Let all blocks run uncompiled from the next run on. For changes that torch does not notice: compiled code and
        its copy on the disk contain the attention kernel that came first when it was traced."""
        if not self.is_stopped:
            self.is_stopped = True
            self._compiled.clear()
            _LOG.warning("all blocks run uncompiled from now on: %s", reason)

    def forward_of(self, block_class: type[nn.Module]) -> Callable[..., Any] | None:
        """Return the compiled forward of `block_class`, to be called with an instance; None if it is not to be
        compiled. Nothing is compiled until its first call.
        """
        if self.is_stopped or block_class in self.refused:
            return None
        known = self._compiled.get(block_class)
        if known is None:
            known = torch.compile(block_class.forward, fullgraph=True, backend=self.backend)
            self._compiled[block_class] = known
        return partial(self._call, block_class, known)

    def _call(
        self, block_class: type[nn.Module], compiled: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        check_interrupt()
        known = len(self.uncompiled) and (block_class, shapes_of(args, kwargs)) in self.uncompiled
        if block_class not in self.refused and not known:
            errors = compile_errors()
            try:
                return compiled(block, *args, **kwargs)
            except errors.too_many_shapes:  # those that are compiled stay so
                pass
            except errors.failed as error:  # before anything was computed
                inner = getattr(error, "inner_exception", error)
                if exhausted_memory(inner) is not None:  # no evidence about the class
                    raise inner from None
                self.refused[block_class] = reason = " ".join(str(error).partition("\n\n")[0].split())
                self._compiled.pop(block_class, None)
                _LOG.warning("blocks of %s run uncompiled: %s", block_class.__name__, reason)
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                # traced code calls its kernel directly; the call of the module is routed to another one
                self.uncompiled.put((block_class, shapes_of(args, kwargs)), True)
                _LOG.warning("blocks of %s run uncompiled for one size: %s", block_class.__name__, error)
        return block_class.forward(block, *args, **kwargs)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of the tensors of a call, by position and name."""
    named = (*enumerate(args), *sorted(kwargs.items()))
    return tuple((name, tuple(v.shape), v.dtype) for name, v in named if isinstance(v, Tensor))


class CompiledBlocks:
    """The repeated blocks of one module, of which those that are frozen are compiled during runs."""

    def __init__(
        self, module: nn.Module, device: torch.device, compute_dtype: torch.dtype, compiler: BlockCompiler
    ) -> None:
        self._module = module
        self._device = device
        self._compute_dtype = compute_dtype
        self._compiler = compiler
        #: modules with torch's own classes now
        self._frozen: list[nn.Module] = []
        self._compiled: list[nn.Module] = []
        self._may_freeze = False
        self._has_reported = False

    @contextmanager
    def running(self, is_plain: bool) -> Iterator[None]:
        """Compile blocks that are frozen inside the block of code; none if the run is not `is_plain`, with options that
        act inside the module. Nests."""
        before = self._may_freeze
        self._set(is_plain)
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Compile nothing inside the block of code, which changes weights or what their blocks compute."""
        with self.running(is_plain=False):
            yield

    @cached_property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The repeated blocks, in tree order."""
        return repeated_blocks(self._module)

    def _set(self, may_freeze: bool) -> None:
        self._thaw()
        self._may_freeze = may_freeze
        if may_freeze:
            for block in self.blocks:
                if self._is_frozen(block):
                    self._freeze(block)
            self._report()

    def _report(self) -> None:
        """Say once why blocks are never compiled: their weights are converted at each use."""
        if self._has_reported:
            return
        blocks = [block for block in self.blocks if any(map(self._converts, block.modules()))]
        if blocks:
            self._has_reported = True
            classes = ", ".join(f"{count} {name}" for name, count in compiled_classes(blocks).items())
            _LOG.warning("not compiled, as weights in 8 bits or packed are converted at each use: %s", classes)

    def _converts(self, module: nn.Module) -> bool:
        """Whether the module has a weight on the device that is stored smaller than it is computed with."""
        return any(
            isinstance(tensor, PackedWeight) or (tensor.is_floating_point() and tensor.dtype.itemsize == 1)
            for tensor in module._parameters.values()
            if tensor is not None and tensor.device == self._device
        )

    def _freeze(self, block: nn.Module) -> None:
        stock = _stock_class(block)
        forward = self._compiler.forward_of(stock)
        if forward is None:
            return
        for module in block.modules():
            if isinstance(module, Casting):
                module.__class__ = _stock_class(module)  # type: ignore[assignment] # mypy narrows to both
                self._frozen.append(module)
        block.__dict__["forward"] = partial(forward, block)
        self._compiled.append(block)

    def _thaw(self) -> None:
        for block in self._compiled:
            del block.__dict__["forward"]
        for module in self._frozen:
            module.__class__ = casting_class(type(module), "weight" in module._parameters)  # type: ignore[arg-type] # classes are hashable
        self._compiled.clear()
        self._frozen.clear()

    def _is_frozen(self, block: nn.Module) -> bool:
        return all(self._is_plain(module) for module in block.modules())

    def _is_plain(self, module: nn.Module) -> bool:
        attributes = module.__dict__
        if "forward" in attributes or attributes.get(FUNCTIONS_ATTRIBUTE) or LOW_RANK_ATTRIBUTE in attributes:
            return False
        if isinstance(module, nn.Conv3d) and installed_torch_has_conv3d_fault():
            return False
        return all(
            tensor.device == self._device
            and not isinstance(tensor, PackedWeight)
            and (tensor.dtype == self._compute_dtype or not tensor.is_floating_point())
            for tensor in module._parameters.values()
            if tensor is not None
        ) and all(buffer.device == self._device for buffer in module._buffers.values() if buffer is not None)


def repeated_blocks(root: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks of `root` that are worth a compilation: those that diffusers names for its class, else those
    that share their class with another block of the same list of modules. None is inside another.
    """
    # imported here because importing diffusers takes seconds, and a process without a model does not need it
    from modelpool.pool.weights.patcher.blocks.diffusers_names import repeated_block_names

    names = repeated_block_names(root)
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        repeated: set[nn.Module] = set()
        if names:
            repeated = {child for child in module.children() if _stock_class(child).__name__ in names}
        elif isinstance(module, nn.ModuleList):
            counts = Counter(map(_stock_class, module))
            repeated = {
                child
                for child in module
                if counts[_stock_class(child)] > 1 and any(child.children()) and not isinstance(child, nn.ModuleList)
            }
        for child in module.children():
            if child in repeated:
                found.append(child)
            else:
                visit(child)

    visit(root)
    return tuple(found)


def compiled_classes(blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return the number of blocks of each class, by name."""
    return dict(Counter(_stock_class(block).__name__ for block in blocks))


def _stock_class(module: nn.Module) -> type[nn.Module]:
    own = type(module)
    return own.__bases__[1] if isinstance(module, Casting) else own
