"""The global names that pickles of weights may contain, and the values that represent them.

Torch-free; nothing is imported or called. A name that is in no table here is refused.
Source of the functions: `torch/_utils.py` and `torch/_tensor.py` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from modelpool.pool.files.formats.safetensors_file import MAX_DIMENSIONS, Shape
from modelpool.pool.files.formats.strict_json import brief

#: dtype of each storage class of torch
STORAGE_DTYPES: Mapping[str, str] = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
#: dtype of each dtype object of torch, which files with newer types use
TORCH_DTYPES: Mapping[str, str] = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}

#: objects that training programs save next to the weights; kept as a name, their contents are dropped
OPAQUE_NAMES = frozenset(
    {
        ("__builtin__", "set"),
        ("builtins", "set"),
        ("_codecs", "encode"),
        ("argparse", "Namespace"),
        ("collections", "Counter"),
        ("collections", "defaultdict"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("pathlib", "PosixPath"),
        ("pytorch_lightning.callbacks.early_stopping", "EarlyStopping"),
        ("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint"),
        ("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint"),
        ("torch", "Tensor"),
        ("torch", "device"),
        ("torch.nn.parameter", "Parameter"),
    }
)

#: The hashes of integers are predictable: all multiples of 2**61 - 1 have the same, and 20,000 of them as keys take
#: seconds. Real files count parameters and steps.
MAX_NUMBER_AS_KEY = 1 << 31


class BadPickle(ValueError):
    """A pickle that is damaged, or not one of weights. The message names no file."""


class CodeInPickle(BadPickle):
    """A pickle with a name that `pickle.load` would run as code."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global name in the pickle; it was not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class OpaqueObject:
    """An object other than weights, numbers and texts; only its class name is kept."""

    class_name: GlobalName


class ParameterTable(dict[Any, Any]):
    """The contents of a `torch.nn.ParameterDict`, in which older textual inversions keep their vectors; filled when its
    state is set."""


@dataclass(frozen=True, slots=True)
class DeclaredStorage:
    """A storage that the container has under `key`. The elements of an untyped storage are bytes."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor as the pickle declares it; the size of its storage is not checked yet.

    offset, strides  in elements of `dtype`
    """

    storage: DeclaredStorage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape


def dict_from_items(items: list[Any]) -> dict[Any, Any]:
    """Return the dictionary of alternating keys and values. Raises BadPickle for keys that weights do not have."""
    if len(items) % 2:
        raise BadPickle("is damaged: a key has no value")
    keys = items[::2]
    for key in keys:
        if not isinstance(key, (str, int, float, bytes, GlobalName)) and key is not None:
            raise BadPickle(f"has a {type(key).__name__} as a key, expected a text")
        if isinstance(key, (int, float)) and not -MAX_NUMBER_AS_KEY <= key <= MAX_NUMBER_AS_KEY:
            raise BadPickle(f"has {brief(key)} as a key, expected no number beyond {MAX_NUMBER_AS_KEY}")
    return dict(zip(keys, items[1::2], strict=True))


def check_name(name: GlobalName) -> GlobalName:
    """Return `name` if a table has it. Raises CodeInPickle otherwise."""
    if name in REBUILDERS or (name.module, name.name) in OPAQUE_NAMES or _dtype_of(name) is not None:
        return name
    raise CodeInPickle(f"names {brief(str(name))}, which is neither a part of weights nor known to be harmless")


def _dtype_of(name: GlobalName) -> str | None:
    if name.module == "torch":
        return STORAGE_DTYPES.get(name.name) or TORCH_DTYPES.get(name.name)
    return STORAGE_DTYPES.get(name.name) if name.module == "torch.storage" else None


def module_class(identity: tuple[Any, ...]) -> GlobalName:
    """Return the class of ('module', class, path, source): the form in which files from before torch 1.6 refer to
    modules. The source is dropped. Raises BadPickle."""
    if not isinstance(identity[1], GlobalName):
        raise BadPickle(f"refers to {_kind(identity[1])} outside of it, expected a class")
    return identity[1]


def storage(identity: Any) -> DeclaredStorage:
    """Parse ('storage', class, key, device, elements); legacy files add a view description. Raises BadPickle."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise BadPickle(f"refers to {_kind(identity)} outside of it, expected a storage")
    _, kind, key, _, elements = identity[:5]
    if len(identity) == 6 and identity[5] is not None:
        raise BadPickle("has a storage that is a view of another, as files from before 2018 have; not supported")
    dtype = _dtype_of(kind) if isinstance(kind, GlobalName) else None
    if dtype is None or not isinstance(key, str) or not _is_count(elements):
        raise BadPickle(f"has a storage of {_kind(kind)} with {brief(elements)} numbers, expected a typed one")
    return DeclaredStorage(key, dtype, elements)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: str | None = None) -> Any:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)`."""
    if not isinstance(storage, DeclaredStorage) or not _is_count(offset) or not _are_counts(shape, strides):
        raise BadPickle("has a tensor that is not built from a storage, an offset, a shape and strides")
    if len(rest) > 2 and rest[2]:
        raise BadPickle("has a conjugated or negated tensor; not supported")
    return DeclaredTensor(storage, dtype or storage.dtype, offset, tuple(shape), tuple(strides))


def _tensor_with_type(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """`_rebuild_tensor_v3`: as v2, with the dtype of an untyped storage after the hooks."""
    dtype = _dtype_of(rest[2]) if len(rest) > 2 and isinstance(rest[2], GlobalName) else None
    if dtype is None:
        raise BadPickle("has a tensor of an unknown dtype")
    return _tensor(storage, offset, shape, strides, *rest[:2], *rest[3:], dtype=dtype)


def _same_tensor(tensor: Any, *_: Any) -> Any:
    if not isinstance(tensor, DeclaredTensor):
        raise BadPickle(f"has a parameter that is {_kind(tensor)}, expected a tensor")
    return tensor


def _rebuilt(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """`_rebuild_from_type_v2(function, type, arguments, state)`: a tensor with attributes."""
    rebuild = _TENSOR_REBUILDERS.get(function) if isinstance(function, GlobalName) else None
    if rebuild is None or not isinstance(arguments, tuple):
        raise BadPickle(f"rebuilds a tensor with {_kind(function)}")
    return rebuild(*arguments)


def _ordered(*arguments: Any) -> dict[Any, Any]:
    """`OrderedDict()`, or one of a list of pairs."""
    if not arguments:
        return {}
    items = arguments[0]
    if not isinstance(items, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in items):
        raise BadPickle("has a dictionary that is not built from pairs")
    return dict_from_items([item for pair in items for item in pair])


def _size(sizes: Any) -> tuple[int, ...]:
    """`torch.Size` of a tuple or a list. A text would become a tuple as long as the text at each call."""
    counts = tuple(sizes) if isinstance(sizes, list) else sizes
    if not _are_counts(counts, counts):
        raise BadPickle(f"has a size of {_kind(sizes)}, expected at most {MAX_DIMENSIONS} counts")
    return cast(tuple[int, ...], counts)


_TENSOR_REBUILDERS: Mapping[GlobalName, Callable[..., Any]] = {
    GlobalName("torch._utils", "_rebuild_tensor"): _tensor,
    GlobalName("torch._utils", "_rebuild_tensor_v2"): _tensor,
    GlobalName("torch._utils", "_rebuild_tensor_v3"): _tensor_with_type,
    GlobalName("torch._utils", "_rebuild_parameter"): _same_tensor,
    GlobalName("torch._utils", "_rebuild_parameter_with_state"): _same_tensor,
}
REBUILDERS: Mapping[GlobalName, Callable[..., Any]] = {
    **_TENSOR_REBUILDERS,
    GlobalName("collections", "OrderedDict"): _ordered,
    GlobalName("torch.nn.modules.container", "ParameterDict"): lambda *_: ParameterTable(),
    GlobalName("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    GlobalName("torch", "Size"): _size,
}


def _kind(value: Any) -> str:
    return str(value) if isinstance(value, GlobalName) else f"a {type(value).__name__}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_counts(shape: Any, strides: Any) -> bool:
    return (
        isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides) <= MAX_DIMENSIONS
        and all(_is_count(n) for n in (*shape, *strides))
    )
