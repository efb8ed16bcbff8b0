"""The private and experimental torch names that the pool relies on, and a self-test of their behaviour.

Every other module of the pool imports these names from here, so that a new torch release is checked in one place:
`self_test()`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook, register_module_forward_pre_hook
from torch.utils import backend_registration
from torch.utils.hooks import RemovableHandle

_Function = TypeVar("_Function", bound=Callable[..., Any])


_REGISTER = "_setup_privateuseone_for_python_backend"


def expect_python_backends() -> None:
    """Raise RuntimeError in a torch without device types in Python."""
    if not hasattr(backend_registration, _REGISTER):
        raise RuntimeError(f"torch {torch.__version__} has no devices in Python, which the simulated device is")


def register_python_backend(rename: str, backend_module: object) -> None:
    """Register the process's one out-of-tree device type with Python objects for its guard, hooks and module.

    Experimental since torch 2.10: https://github.com/pytorch/pytorch/pull/157859. Only the simulated device needs it:
    raises RuntimeError in a torch without it.
    """
    expect_python_backends()
    getattr(backend_registration, _REGISTER)(rename, backend_module=backend_module)


# Makes a tensor that has a shape, strides, a dtype and a device, but no data: the class's `__torch_dispatch__` answers
# for what happens to it.
make_wrapper = torch.Tensor._make_wrapper_subclass

# As `__torch_function__` of a tensor class: nothing is intercepted above the dispatcher, attribute reads stay in C.
no_torch_function = torch._C._disabled_torch_function_impl

# The name under which the process's one out-of-tree device type is known; "privateuseone" until it is claimed.
python_backend_name = torch._C._get_privateuse1_backend_name


def set_allocator_settings(settings: str) -> None:
    """Change the settings of the process's caching allocator, in the form of PYTORCH_ALLOC_CONF.

    Torch's public way is that environment variable, which a process reads once, before this project has a say. Does
    nothing in a torch without either of the private names for it.
    """
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    if change is not None:
        change(settings)


def free_workspaces() -> None:
    """Free the workspaces of cuBLAS on all streams of the process: 32 MiB for each on a Hopper, which torch counts as
    memory in tensors. No work that uses them may be pending, and no captured graph is replayed afterwards.

    Does nothing in a torch without the private name for it.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def leave_pool(device: torch.device, pool: Any) -> None:
    """Let the caching allocator of a CUDA device no longer allocate from the private `pool` of a capture, and drop the
    pool if it still allocated from it.

    Torch's public `CUDAGraph.capture_end` does both only if the driver ends the capture. Source: as its order of
    statements in aten/src/ATen/cuda/CUDAGraph.cpp; the allocator refuses to leave a pool that it is not in.
    """
    index = device.index or 0
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return  # the capture was ended, or never began
    torch._C._cuda_releasePool(index, pool)


def set_attention_order(order: Sequence[Any]) -> None:
    """Make torch prefer these attention kernels (`SDPBackend` or its numbers) in this order, then the others in theirs.

    Torch's public way is `sdpa_kernel(set_priority=True)`, which also sets six switches: too slow for each call.
    """
    first = [int(kernel) for kernel in order]
    others = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in first]
    torch._C._set_sdp_priority_order([*first, *others])


def constant_when_compiled(function: _Function) -> _Function:
    """Let torch.compile call `function` once while tracing and treat the result as a constant of the graph.

    As `torch.compiler.assume_constant_result`, which imports the compiler (over a second) only to set this mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def call_module(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module as `nn.Module.__call__` does, which takes two calls of Python functions and twice the time.

    Only a module with hooks, in a process with hooks of all modules, or with a compiled forward takes torch's way.
    While torch compiles a graph, it does not come here.
    """
    held = module.__dict__
    if (
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
        or module._compiled_call_impl is not None
        or _has_any_global_hook()
    ):
        return nn.Module.__call__(module, *args, **kwargs)
    return module.forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CompileErrors:
    """Errors of a function that torch.compile made, raised before the function computes anything.

    failed           it cannot be compiled
    too_many_shapes  it was compiled for as many kinds of inputs as torch keeps, and these are of another
    """

    failed: type[Exception]
    too_many_shapes: type[Exception]


def compile_errors() -> CompileErrors:
    """Return the errors; imports torch's compiler, which takes a second."""
    from torch._dynamo import exc

    return CompileErrors(exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


class _Recorder(torch.Tensor):
    """A wrapper tensor that records the operations that reach it."""

    operations: list[str]
    __torch_function__ = no_torch_function  # type: ignore[assignment] # as torch's own wrapper classes do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the stubs give the signature of torch's disabled handler
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args[0].operations.append(str(func))
        return args[0]


class _Token:
    """An object with an observable lifetime."""

    alive = 0

    def __init__(self) -> None:
        type(self).alive += 1

    def __del__(self) -> None:
        type(self).alive -= 1


def self_test() -> None:
    """Check the behaviours that the pool relies on. Raises RuntimeError naming the one that this torch lacks."""
    _check("a wrapper tensor keeps its metadata and sends operations to Python", _wrapper_works())
    _check("an attribute of a storage lives exactly as long as the storage", _storage_attribute_lives())
    _check("the order of attention kernels can be set", _attention_order_is_set())
    _check("hooks of a module are where its calls look for them", _hooks_are_found())
    _check("the out-of-tree device type has a name", isinstance(python_backend_name(), str))


def _check(behaviour: str, holds: bool) -> None:
    if not holds:
        raise RuntimeError(f"torch {torch.__version__} does not do what the pool builds on: {behaviour}")


def _wrapper_works() -> bool:
    # by position, as the simulated device calls it
    wrapper = make_wrapper(_Recorder, (2, 3), (1, 2), 4, None, torch.float16, torch.strided, torch.device("cpu"))
    wrapper.operations = []
    torch.neg(wrapper)
    described = (wrapper.shape, wrapper.stride(), wrapper.storage_offset(), wrapper.dtype, wrapper.device.type)
    return described == ((2, 3), (1, 2), 4, torch.float16, "cpu") and wrapper.operations == ["aten.neg.default"]


def _attention_order_is_set() -> bool:
    before = list(torch._C._get_sdp_priority_order())
    wanted = before[::-1]
    set_attention_order(wanted[:2])
    found = list(torch._C._get_sdp_priority_order())
    set_attention_order(before)
    return found[:2] == wanted[:2] and list(torch._C._get_sdp_priority_order()) == before


def _hooks_are_found() -> bool:
    """Whether `call_module` calls each kind of hook of a forward, and a compiled forward. Backward hooks are kept as
    these are, and need autograd, which starts threads."""
    seen: list[str] = []

    def called(register: Callable[[nn.Module], Any]) -> None:
        module = nn.Identity()
        handle = register(module)
        call_module(module, torch.ones(1))
        if isinstance(handle, RemovableHandle):
            handle.remove()

    called(lambda m: m.register_forward_hook(lambda *_: seen.append("after")))
    called(lambda m: m.register_forward_pre_hook(lambda *_: seen.append("before")))
    # other threads may call modules meanwhile
    called(lambda m: register_module_forward_pre_hook(lambda of, _: seen.append("of all") if of is m else None))
    called(lambda m: setattr(m, "_compiled_call_impl", lambda x: seen.append("compiled")))
    called(lambda m: None)
    return seen == ["after", "before", "of all", "compiled"]


def _storage_attribute_lives() -> bool:
    before = _Token.alive
    base = torch.zeros(4)
    storage: Any = base.untyped_storage()
    storage.pool_token = _Token()
    del storage
    view = base[1:]
    del base
    gc.collect()
    kept = _Token.alive == before + 1 and hasattr(view.untyped_storage(), "pool_token")
    del view
    return kept and _Token.alive == before
