"""The tensor of the simulated device, and how operations on it are carried out.

A `SimTensor` reports device `sim:i` and holds a CPU tensor; an operation runs on the CPU tensors inside, so its results
equal the CPU's, and they are charged to the ledger of the device. The charge is attached to the CPU storage: views
share it, and it ends when the last tensor on that storage dies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from modelpool.pool.devices.sim.ledger import SimAllocation
from modelpool.pool.devices.sim.operations import DIRECT_METHODS, DirectKind, OpKind, OpPlan, plan_of
from modelpool.pool.devices.sim.sim_registry import SimDevice, SimDevices
from modelpool.pool.devices.torch_api.torch_private import make_wrapper, no_torch_function

CPU = torch.device("cpu")
STRIDED = torch.strided


Method: TypeAlias = Callable[..., Any]


def _dispatched() -> bool:
    """Whether torch's dispatcher has more to do than to run an operation: it may record a gradient, and in inference
    mode it tells that mode's tensors from others."""
    return torch.is_grad_enabled() or torch.is_inference_mode_enabled()


def _binary_method(method: Method) -> Method:
    def direct(self: SimTensor, other: Any) -> Any:
        sim = self._sim
        if sim.is_lost or _dispatched():
            return method(self, other)
        if type(other) is SimTensor:
            if other._sim is not sim:
                return method(self, other)
            result = method(self._inner, other._inner)
        elif isinstance(other, torch.Tensor):
            return method(self, other)
        else:
            result = method(self._inner, other)
        return result if result is NotImplemented else wrap_fresh(result, sim)

    return direct


def _elementwise_method(method: Method) -> Method:
    def direct(self: SimTensor, *args: Any, **kwargs: Any) -> Any:
        sim = self._sim
        if kwargs or sim.is_lost or _dispatched():
            return method(self, *args, **kwargs)
        inner_args = []
        for value in args:
            if type(value) is SimTensor and value._sim is sim:
                inner_args.append(value._inner)
            elif isinstance(value, torch.Tensor):
                return method(self, *args)
            else:
                inner_args.append(value)
        return wrap_fresh(method(self._inner, *inner_args), sim)

    return direct


def _view_method(method: Method) -> Method:
    def direct(self: SimTensor, *args: Any, **kwargs: Any) -> Any:
        if _dispatched():
            return method(self, *args, **kwargs)
        return wrap_charged(method(self._inner, *args, **kwargs), self._sim)

    return direct


def _views_method(method: Method) -> Method:
    def direct(self: SimTensor, *args: Any, **kwargs: Any) -> Any:
        if _dispatched():
            return method(self, *args, **kwargs)
        sim = self._sim
        return tuple([wrap_charged(view, sim) for view in method(self._inner, *args, **kwargs)])

    return direct


def _copying_method(method: Method) -> Method:
    def direct(self: SimTensor, *args: Any, **kwargs: Any) -> Any:
        if self._sim.is_lost or _dispatched():
            return method(self, *args, **kwargs)
        inner = self._inner
        result = method(inner, *args, **kwargs)
        return self if result is inner else wrap(result, self._sim)

    return direct


def _converting_method(method: Method) -> Method:
    copying = _copying_method(method)

    def direct(self: SimTensor, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is torch.dtype and not kwargs:
            return copying(self, args[0])
        return method(self, *args, **kwargs)

    return direct


def _indexing_method(method: Method) -> Method:
    view = _view_method(method)

    def direct(self: SimTensor, index: Any) -> Any:
        for part in index if type(index) is tuple else (index,):
            if type(part) not in _INDEX_PARTS:
                return method(self, index)
        return view(self, index)

    return direct


_INDEX_PARTS = frozenset((int, slice, type(None), type(Ellipsis)))  # their result is a view
_DIRECT_METHODS: Mapping[DirectKind, Callable[[Method], Method]] = {
    DirectKind.BINARY: _binary_method,
    DirectKind.ELEMENTWISE: _elementwise_method,
    DirectKind.VIEW: _view_method,
    DirectKind.VIEWS: _views_method,
    DirectKind.COPYING: _copying_method,
    DirectKind.CONVERTING: _converting_method,
    DirectKind.INDEXING: _indexing_method,
}


def _with_direct_methods(cls: type[SimTensor]) -> type[SimTensor]:
    """Replace the methods of DIRECT_METHODS: they run on the CPU tensors inside, above torch's dispatcher, which costs
    more than most of them.

    The dispatcher still has those on several devices, on a lost device, with other classes of tensors, and those that
    `_dispatched` names.
    """
    for name, kind in DIRECT_METHODS.items():
        setattr(cls, name, _DIRECT_METHODS[kind](getattr(torch.Tensor, name)))
    return cls


@_with_direct_methods
class SimTensor(torch.Tensor):
    """A tensor on a simulated device. Created only by `wrap` and `wrap_charged`."""

    __slots__ = ("_inner", "_sim")

    _inner: torch.Tensor  # the CPU tensor that holds the data; same shape and dtype, and equivalent strides
    _sim: SimDevice  # the device that `_inner`'s storage is charged to

    __torch_function__ = no_torch_function  # type: ignore[assignment] # as torch's own wrapper classes do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the stubs give the signature of torch's disabled handler
        cls, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1:
            return NotImplemented  # another tensor class takes part: it knows how to become an ordinary tensor
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub is untyped
        return f"{repr(self._inner)[:-1]}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        known = memo.get(id(self))
        if known is not None:
            return known  # type: ignore[no-any-return]
        twin = wrap(copy.deepcopy(self._inner, memo), self._sim)
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=self.requires_grad)  # type: ignore[assignment]
        else:
            twin.requires_grad_(self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle a tensor on {self.device}: copy it to the host with .cpu() first")

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning replaces its data by other data of this device."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimTensor):
            raise RuntimeError(f"cannot put data of {value.device} into a tensor on {self.device}")
        _become(self, value)

    def new_tensor(
        self,
        data: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """As on any device; torch's own would use sim:0 for every index."""
        place = self.device if device is None else device
        return torch.tensor(data, dtype=dtype or self.dtype, device=place, requires_grad=requires_grad)

    def tolist(self) -> Any:
        """The values as nested lists, copied from the device."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array, copied from the device if `force`. Raises TypeError, as CUDA does, otherwise."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return self.detach().cpu().numpy(force=True)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError(f"cannot hand out memory of {self.device}: copy the tensor to the host with .cpu() first")

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), format_spec)


def wrap(inner: torch.Tensor, sim: SimDevice) -> SimTensor:
    """`inner`, a CPU tensor that nothing else holds, as a tensor on `sim`. Raises torch.OutOfMemoryError."""
    storage: Any = inner.untyped_storage()
    if getattr(storage, "sim_allocation", None) is None:
        storage.sim_allocation = SimAllocation(sim.ledger, storage.nbytes())
    return wrap_charged(inner, sim)


def wrap_fresh(inner: torch.Tensor, sim: SimDevice) -> SimTensor:
    """`wrap` for a tensor with a storage that was made for it."""
    storage: Any = inner.untyped_storage()
    storage.sim_allocation = SimAllocation(sim.ledger, storage.nbytes())
    return wrap_charged(inner, sim)


def wrap_charged(inner: torch.Tensor, sim: SimDevice) -> SimTensor:
    """`wrap` for a tensor with storage that is charged to `sim`."""
    # by position: torch parses names in a third of the time that it takes to make a tensor
    offset = inner.storage_offset()
    if offset or not inner.is_contiguous():
        strides = inner.stride()
        tensor = make_wrapper(SimTensor, inner.shape, strides, offset, None, inner.dtype, STRIDED, sim.torch_device)
    else:
        tensor = make_wrapper(SimTensor, inner.shape, None, None, None, inner.dtype, STRIDED, sim.torch_device)
    tensor._inner = inner
    tensor._sim = sim
    return tensor


def _become(tensor: SimTensor, other: SimTensor) -> None:
    """Replace everything of `tensor` except its identity by `other`."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor._inner, tensor._sim = other._inner, other._sim


def common_device(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> SimDevice | None:
    """Return the device that a layer may compute on above torch's dispatcher. None where the dispatcher decides, and
    for weights of another dtype."""
    if type(x) is not SimTensor or _dispatched():
        return None
    sim, dtype = x._sim, x._inner.dtype
    if sim.is_lost:
        return None
    for tensor in (weight, bias):
        if tensor is None:
            continue
        if type(tensor) is not SimTensor or tensor._sim is not sim or tensor._inner.dtype is not dtype:
            return None
    return sim


def make_on_device(devices: SimDevices, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that creates a tensor without tensor arguments, for the device in `kwargs`."""
    sim = devices.resolve(kwargs["device"])
    assert sim is not None, f"{plan.op} reached the simulated device for {kwargs['device']}"
    sim.require()
    if plan.size_position is not None:
        sim.ledger.require(_size_bytes(args[plan.size_position], kwargs.get("dtype")))
    if plan.kind is not OpKind.RANDOM:
        return wrap(plan.compute(*args, **{**kwargs, "device": CPU}), sim)
    _refuse_host_generator(kwargs, sim)
    with sim.random_stream():
        return wrap(plan.compute(*args, **{**kwargs, "device": CPU}), sim)


def copy_from(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Write `source` into `target`, converting its dtype; at least one of them is on a simulated device."""
    for tensor in (source, target):
        if isinstance(tensor, SimTensor):
            tensor._sim.require()
    values = source._inner if isinstance(source, SimTensor) else source
    if isinstance(target, SimTensor):
        if not isinstance(source, SimTensor):
            target._sim.ledger.count_h2d(target._inner.nbytes)
        target._inner.copy_(values)
    else:
        assert isinstance(source, SimTensor)
        source._sim.ledger.count_d2h(values.nbytes)
        target.copy_(values)
    return target


def run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out `op` on arguments of which at least one is a SimTensor."""
    prepared = _PREPARED.get(id(op))
    if prepared is None:
        plan = plan_of(op)
        prepared = _PREPARED[id(op)] = plan, _RUNNERS[plan.kind]
    plan, runner = prepared
    return runner(plan, args, kwargs)


def _run_pure(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner_args, inner_kwargs, sim = _unwrap(plan, args, kwargs)
    result = plan.compute(*inner_args, **inner_kwargs)
    return wrap(result, sim) if type(result) is torch.Tensor and sim is not None else _wrap_each(result, sim)


def _run_whole(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors_in([*args, *kwargs.values()])):
        raise RuntimeError(f"{plan.op} records no gradient on a simulated device: run under torch.no_grad()")
    return _run_pure(plan, args, kwargs)


def _run_view(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and not args[0].is_inference():
        with torch.inference_mode(False):  # torch lets an ordinary tensor have ordinary views only
            return _run_pure(plan, args, kwargs)
    return _run_pure(plan, args, kwargs)


def _run_in_place(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = [args[position] for position in plan.written_positions]
    if not all(isinstance(tensor, SimTensor) for tensor in written):
        raise _mixed_devices(plan, args, kwargs)
    inner_args, inner_kwargs, _ = _unwrap(plan, args, kwargs)
    plan.compute(*inner_args, **inner_kwargs)
    return written[0] if len(written) == 1 else tuple(written)


def _run_out(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute into scratch that may be resized, then copy: the output tensors must have the right shape already."""
    written = [kwargs[name] for name in plan.written_names]
    if not all(isinstance(tensor, SimTensor) for tensor in written):
        raise _mixed_devices(plan, args, kwargs)
    inner_args, inner_kwargs, _ = _unwrap(plan, args, kwargs)
    for name, tensor in zip(plan.written_names, written, strict=True):
        inner_kwargs[name] = torch.empty(0, dtype=tensor.dtype)
    plan.compute(*inner_args, **inner_kwargs)
    for name, tensor in zip(plan.written_names, written, strict=True):
        if inner_kwargs[name].shape != tensor.shape:
            raise _refusal(plan, tensor._sim)
        tensor._inner.copy_(inner_kwargs[name])
    return written[0] if len(written) == 1 else tuple(written)


def _run_random(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sim = _unwrap(plan, args, kwargs)[2]
    assert sim is not None, f"{plan.op} reached the simulated device without a tensor of it"
    _refuse_host_generator(kwargs, sim)
    structure = _run_out if plan.written_names else _run_in_place if plan.written_positions else _run_pure
    with sim.random_stream():
        return structure(plan, args, kwargs)


def _run_copy(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return copy_from(source=args[1], target=args[0])


def _run_convert(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    source: SimTensor = args[0]
    source._sim.require()
    options = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
    asked = kwargs.get("device")
    if asked is None:
        return wrap(plan.compute(source._inner, **options), source._sim)
    target = source._sim.siblings.resolve(asked)
    if target is not None:
        target.require()
        return wrap(plan.compute(source._inner, **options), target)
    if torch.device(asked).type == "cpu":
        source._sim.ledger.count_d2h(source._inner.nbytes)
    return plan.compute(source._inner, device=asked, **options)  # type: ignore[no-any-return]


def _run_read_scalar(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: SimTensor = args[0]
    source._sim.require()
    source._sim.ledger.count_d2h(source._inner.nbytes)
    return plan.compute(source._inner)


def _run_restride(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimTensor:
    target: SimTensor = args[0]
    _become(target, wrap(plan.compute(target._inner.detach(), *args[1:], **kwargs), target._sim))
    return target


def _run_same_class(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return type(args[0]) is type(args[1])


def _run_refused(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _refusal(plan, next(value._sim for value in args if isinstance(value, SimTensor)))


_RUNNERS: Mapping[OpKind, Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], Any]] = {
    OpKind.PURE: _run_pure,
    OpKind.WHOLE: _run_whole,
    OpKind.VIEW: _run_view,
    OpKind.IN_PLACE: _run_in_place,
    OpKind.OUT: _run_out,
    OpKind.RANDOM: _run_random,
    OpKind.COPY: _run_copy,
    OpKind.CONVERT: _run_convert,
    OpKind.READ_SCALAR: _run_read_scalar,
    OpKind.RESTRIDE: _run_restride,
    OpKind.SAME_CLASS: _run_same_class,
    OpKind.REFUSED: _run_refused,
}

# The plans and runners of operations, by the identity of the operation, which the plan keeps alive: operations and
# kinds compute their hashes in Python. As bounded as torch's set of operations.
_PREPARED: dict[int, tuple[OpPlan, Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], Any]]] = {}


def _unwrap(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], SimDevice | None]:
    """CPU arguments for `plan.op`, and the device of its results (None: the host).

    Raises RuntimeError where CUDA would: tensors of two devices, or host tensors with a dimension mixed in.
    """
    sim: SimDevice | None = None
    inner_args = list(args)
    count = len(inner_args)
    for position in plan.tensor_positions:
        if position >= count:
            break
        value = inner_args[position]
        if type(value) is SimTensor:
            if value._sim is not sim:
                if sim is not None:
                    raise _mixed_devices(plan, args, kwargs)
                sim = value._sim
            inner_args[position] = value._inner
        elif type(value) is list or type(value) is tuple:
            inner_args[position] = unwrapped = []
            for item in value:
                if type(item) is SimTensor:
                    if item._sim is not sim:
                        if sim is not None:
                            raise _mixed_devices(plan, args, kwargs)
                        sim = item._sim
                    unwrapped.append(item._inner)
                else:
                    if item is not None and item.dim():
                        if position not in plan.cpu_positions or sim is None:
                            raise _mixed_devices(plan, args, kwargs)
                        sim.ledger.count_h2d(item.nbytes)
                    unwrapped.append(item)
        elif isinstance(value, torch.Tensor) and value.dim():
            raise _mixed_devices(plan, args, kwargs)
    if sim is not None and sim.is_lost and plan.kind is not OpKind.VIEW:
        sim.require()
    if not kwargs:
        return inner_args, kwargs, sim
    return inner_args, *_unwrap_named(plan, args, kwargs, sim)


def _unwrap_named(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], sim: SimDevice | None
) -> tuple[dict[str, Any], SimDevice | None]:
    """`_unwrap` for the keyword arguments, with the device of the positional ones."""
    inner_kwargs = dict(kwargs)
    for name in plan.tensor_names & kwargs.keys():
        value = kwargs[name]
        if isinstance(value, SimTensor):
            if sim is not None and value._sim is not sim:
                raise _mixed_devices(plan, args, kwargs)
            sim = value._sim
            inner_kwargs[name] = value._inner
        elif isinstance(value, torch.Tensor) and value.dim():
            raise _mixed_devices(plan, args, kwargs)
    asked = kwargs.get("device")
    if asked is not None and sim is not None:
        sim = sim.siblings.resolve(asked)
        inner_kwargs["device"] = asked if sim is None else CPU
    return inner_kwargs, sim


def _wrap_each(result: Any, sim: SimDevice | None) -> Any:
    """The tensors in `result` on `sim`; other values unchanged."""
    if sim is None:
        return result
    if isinstance(result, torch.Tensor):
        return wrap(result, sim)
    if isinstance(result, list | tuple):
        return type(result)([_wrap_each(item, sim) for item in result])
    return result


def _size_bytes(size: Sequence[int] | int, dtype: torch.dtype | None) -> int:
    """Bytes of a dense tensor of `size` in `dtype`, torch's default where that is None."""
    count = 1
    for extent in (size,) if isinstance(size, int) else size:
        count *= extent
    return count * (dtype or torch.get_default_dtype()).itemsize


def _refuse_host_generator(kwargs: Mapping[str, Any], sim: SimDevice) -> None:
    """As CUDA does: a host generator draws on the host, and its values would be copied."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{sim.torch_device}' device type for generator but found 'cpu'")


def _mixed_devices(plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RuntimeError:
    """The error for tensors that are not all on one device, worded as CUDA's."""
    found = sorted({str(tensor.device) for tensor in _tensors_in([*args, *kwargs.values()])})
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(found)}! "
        f"(in {plan.op})"
    )


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _refusal(plan: OpPlan, sim: SimDevice) -> RuntimeError:
    """The error for an operation that would change or replace a storage behind the ledger."""
    return RuntimeError(
        f"{plan.op} would resize or replace the storage of a tensor on {sim.torch_device}: make a new one"
    )
