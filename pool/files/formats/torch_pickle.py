"""Reads the pickle inside a PyTorch file as data: none of its names is imported or called. Torch-free.

Knows the opcodes that pickles of weights use and how they build values; not what the names stand for (`torch_objects`),
nor the container of the pickle (`torch_zip`, `torch_legacy`).

Why not `torch.load(weights_only=True)`: it calls the functions that it allows. With torch 2.13 a file of 854 bytes that
requests a large bytearray takes 6 GB of memory, and a file of 3 MB with nested tuples as a key crashes the process.
Rules: 1. A name that is in no table of `torch_objects` is refused; the others become values, never objects.
2. Work is bounded by the number of opcodes, memory by the length of the pickle: no opcode allocates a declared size.
3. Keys are texts, numbers or names, and nothing here recurses into a value of unknown depth.
Source of the opcodes: Python's `pickletools`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO, cast

from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.files.formats.torch_objects import (
    REBUILDERS,
    BadPickle,
    DeclaredStorage,
    DeclaredTensor,
    GlobalName,
    OpaqueObject,
    ParameterTable,
    check_name,
    dict_from_items,
    module_class,
    storage,
)
from modelpool.pool.values.core.errors import counted

#: about 32 for each tensor: 12,000 tensors, in less than a second
MAX_OPCODES = 400_000
MAX_PICKLE_BYTES = 64 << 20
#: limit of one opcode's argument: a name, or a text among the weights
MAX_ARGUMENT_BYTES = 16 << 20


def read_pickle(file: BinaryIO, size_bytes: int, storages: dict[str, DeclaredStorage] | None = None) -> Any:
    """Read the pickle that begins at the position of `file` and ends within `size_bytes`; leaves `file` after it.

    Tensors are `DeclaredTensor`s, objects `OpaqueObject`; the storages that it refers to are added to `storages` by
    their keys. Raises BadPickle, and CodeInPickle for a name that is in no table.
    """
    machine = _Machine({} if storages is None else storages)
    source = _Bounded(file, min(size_bytes, MAX_PICKLE_BYTES))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], source))):
            if count > MAX_OPCODES:
                raise BadPickle(f"has more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                return machine.value()
            machine.run(opcode.name, argument)
    except BadPickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        # genops and the stack raise these for pickles that are truncated, refer to missing values, or mix up types
        raise BadPickle(f"is damaged: {brief(str(error))}") from None
    raise BadPickle("is damaged: it has no end")


class _Bounded:
    """A file of limited size, which never reads more than the limit."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._left_bytes = file, size_bytes

    def read(self, size_bytes: int) -> bytes:
        if not 0 <= size_bytes <= min(self._left_bytes, MAX_ARGUMENT_BYTES):
            raise BadPickle(
                f"declares a value of {size_bytes} bytes where {self._left_bytes} are left and "
                f"{MAX_ARGUMENT_BYTES} allowed"
            )
        self._left_bytes -= size_bytes
        return self._file.read(size_bytes)

    def readline(self) -> bytes:
        """Read a name or a number as text. No pickle of weights uses an escape in one, and `pickletools` warns of those
        that Python does not know."""
        line = self._file.readline(min(self._left_bytes, 1 << 12))
        self._left_bytes -= len(line)
        if b"\\" in line:
            raise BadPickle(f"uses an escape in a name or a number: {brief(line)}")
        return line


class _Machine:
    """The stack and memo of a pickle machine, with plain values."""

    def __init__(self, storages: dict[str, DeclaredStorage]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        #: arguments passed to calls so far; one list can be passed many times
        self._argument_count = 0

    def value(self) -> Any:
        """The single value left on the stack at the end."""
        if len(self._stack) != 1:
            raise BadPickle(f"is damaged: it ends with {counted(len(self._stack), 'value')}, expected one")
        return self._stack[0]

    def run(self, opcode: str, argument: Any) -> None:
        """Execute one opcode."""
        if opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode]())
        elif opcode in _ARGUMENTS:
            self._stack.append(argument)
        elif opcode in _PUTS:
            self._memoize(len(self._memo) if argument is None else argument)
        elif opcode in _GETS:
            self._stack.append(self._memo[argument])
        elif opcode in _STEPS:
            _STEPS[opcode](self)
        elif opcode == "GLOBAL":
            module, _, name = argument.partition(" ")
            self._stack.append(check_name(GlobalName(module, name)))
        elif opcode not in _NOTHING:
            raise BadPickle(f"has an opcode {opcode}, which pickles of weights do not use")

    def _memoize(self, number: int) -> None:
        if (
            not 0 <= number <= MAX_OPCODES
        ):  # real memo indices are counts; arbitrary ones can be chosen to collide in hash
            raise BadPickle(f"memoizes a value as number {brief(number)}, expected at most {MAX_OPCODES}")
        self._memo[number] = self._stack[-1]

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop_to_mark(self) -> list[Any]:
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def pop(self, count: int) -> list[Any]:
        if self._marks and len(self._stack) - count < self._marks[-1]:
            raise BadPickle("is damaged: it takes a value from beyond a mark")
        if len(self._stack) < count:
            raise BadPickle("is damaged: it takes a value from an empty stack")
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return items

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        self.push(tuple(self.pop(count)))

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, OpaqueObject):
            raise BadPickle(f"is damaged: it appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            target.update(dict_from_items(items))
        elif not isinstance(target, OpaqueObject):
            raise BadPickle(f"is damaged: it sets items of a {type(target).__name__}")

    def name_from_stack(self) -> None:
        module, name = self.pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("is damaged: it names something without a text")
        self.push(check_name(GlobalName(module, name)))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, GlobalName) or not isinstance(arguments, tuple):
            raise BadPickle(f"is damaged: it calls a {type(function).__name__}")
        self._count_arguments(len(arguments) + sum(len(a) for a in arguments if isinstance(a, (list, tuple))))
        rebuild = REBUILDERS.get(function)
        self.push(OpaqueObject(function) if rebuild is None else rebuild(*arguments))

    def _count_arguments(self, values: int) -> None:
        """Bound the total of call arguments: one value may be passed many times, and results are built from them."""
        self._argument_count += values
        if self._argument_count > MAX_OPCODES:
            raise BadPickle(f"passes more than {MAX_OPCODES} values to calls")

    def set_state(self) -> None:
        """Handle BUILD: sets the state of an object, mostly metadata of ordered dictionaries of weights. A parameter
        table gets its contents here."""
        target, state = self.pop(2)
        if isinstance(target, ParameterTable) and isinstance(state, dict):
            parameters = state.get("_parameters")
            if isinstance(parameters, dict):
                self._count_arguments(len(parameters))
                target.update(parameters)
        if not isinstance(target, (dict, OpaqueObject, DeclaredTensor)):
            raise BadPickle(f"is damaged: it sets the state of a {type(target).__name__}")
        self.push(target)

    def persistent(self) -> None:
        (identity,) = self.pop(1)
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
            self.push(module_class(identity))
            return
        declared = storage(identity)
        if self._storages.setdefault(declared.key, declared) != declared:
            raise BadPickle(f"declares its storage {brief(declared.key)} twice, differently")
        self.push(declared)


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: OpaqueObject(GlobalName("builtins", "set")),
}
# fmt: off
_ARGUMENTS = frozenset({
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
})
# fmt: on
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NOTHING = frozenset({"PROTO", "FRAME"})
_STEPS: Mapping[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "POP": lambda m: m.pop(1).clear(),
    "POP_MARK": lambda m: m.pop_to_mark().clear(),
    "DUP": lambda m: m.push(m._stack[-1]),
    "TUPLE": lambda m: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m: m.tuple_of(1),
    "TUPLE2": lambda m: m.tuple_of(2),
    "TUPLE3": lambda m: m.tuple_of(3),
    "LIST": lambda m: m.push(m.pop_to_mark()),
    "DICT": lambda m: m.push(dict_from_items(m.pop_to_mark())),
    "APPEND": lambda m: m.append(m.pop(1)),
    "APPENDS": lambda m: m.append(m.pop_to_mark()),
    "ADDITEMS": lambda m: m.append(m.pop_to_mark()),
    "SETITEM": lambda m: m.set_items(m.pop(2)),
    "SETITEMS": lambda m: m.set_items(m.pop_to_mark()),
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.set_state,
    "BINPERSID": _Machine.persistent,
}
