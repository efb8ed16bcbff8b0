"""The pickle inside a PyTorch file, read as data: nothing that it names is looked up, called or imported. Torch-free.

Knows the opcodes that pickles of weights use and how they build values. Does not know what the names in it
stand for (`torch_objects`), nor in which container the pickle is (`torch_zip`, `torch_legacy`).

Why not `torch.load(weights_only=True)`: it calls what it allows. With torch 2.13 a file of 854 bytes that asks for a
large bytearray takes 6 GB of memory, and a file of 3 MB with tuples in tuples as a key ends the process.
Rules: 1. A name that is in no table of `torch_objects` is refused; the others become values, never objects.
2. Work is bounded by the number of opcodes, memory by the length of the pickle: no opcode allocates what it declares.
3. Keys are texts, numbers or names, and nothing here walks into a value of unknown depth.
Source of the opcodes: Python's `pickletools`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO, cast

from modelpool.pool.formats.strict_json import brief
from modelpool.pool.formats.torch_objects import (
    MAKERS,
    BadPickle,
    DeclaredStorage,
    DeclaredTensor,
    Idle,
    Name,
    ParameterTable,
    checked,
    module_class,
    pairs,
    storage,
)

#: about 32 for each tensor: 12,000 tensors, in less than a second
MAX_OPCODES = 400_000
MAX_PICKLE_BYTES = 64 << 20
#: what one opcode may hold: a name, or a text among the weights
MAX_ARGUMENT_BYTES = 16 << 20


def read_pickle(file: BinaryIO, size_bytes: int, storages: dict[str, DeclaredStorage] | None = None) -> Any:
    """The value of the pickle that begins where `file` is and ends within `size_bytes`; `file` is left after it.

    Tensors are `DeclaredTensor`s, objects `Idle`; the storages that it refers to are added to `storages` by their keys.
    Raises BadPickle, and CodeInPickle for a name that is in no table.
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
        # what genops and the stack say of pickles that end early, name what is not there, or mix up their types
        raise BadPickle(f"is damaged: {brief(str(error))}") from None
    raise BadPickle("is damaged: it has no end")


class _Bounded:
    """A file that gives no more than it was allowed to, however much is asked for."""

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
        """A name or a number as text. No pickle of weights spells one with an escape, and `pickletools` warns of those
        that Python does not know."""
        line = self._file.readline(min(self._left_bytes, 1 << 12))
        self._left_bytes -= len(line)
        if b"\\" in line:
            raise BadPickle(f"spells a name or a number with an escape: {brief(line)}")
        return line


class _Machine:
    """A stack and a memo, as the pickle machine has them, of plain values."""

    def __init__(self, storages: dict[str, DeclaredStorage]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        #: values that calls were given; one list can be given to many
        self._given = 0

    def value(self) -> Any:
        """What is left at the end."""
        if len(self._stack) != 1:
            raise BadPickle(f"is damaged: it ends with {len(self._stack)} values, expected one")
        return self._stack[0]

    def run(self, opcode: str, argument: Any) -> None:
        """Do what `opcode` says."""
        if opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode]())
        elif opcode in _ARGUMENTS:
            self._stack.append(argument)
        elif opcode in _PUTS:
            self._remember(len(self._memo) if argument is None else argument)
        elif opcode in _GETS:
            self._stack.append(self._memo[argument])
        elif opcode in _STEPS:
            _STEPS[opcode](self)
        elif opcode == "GLOBAL":
            module, _, name = argument.partition(" ")
            self._stack.append(checked(Name(module, name)))
        elif opcode not in _NOTHING:
            raise BadPickle(f"has an opcode {opcode}, which pickles of weights have not")

    def _remember(self, number: int) -> None:
        if not 0 <= number <= MAX_OPCODES:  # pickles count; numbers chosen at will can be made to hash alike
            raise BadPickle(f"remembers a value as number {brief(number)}, expected at most {MAX_OPCODES}")
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
        elif not isinstance(target, Idle):
            raise BadPickle(f"is damaged: it appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            target.update(pairs(items))
        elif not isinstance(target, Idle):
            raise BadPickle(f"is damaged: it sets items of a {type(target).__name__}")

    def name_from_stack(self) -> None:
        module, name = self.pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("is damaged: it names something without a text")
        self.push(checked(Name(module, name)))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise BadPickle(f"is damaged: it calls a {type(function).__name__}")
        self._count_given(len(arguments) + sum(len(a) for a in arguments if isinstance(a, (list, tuple))))
        made = MAKERS.get(function)
        self.push(Idle(function) if made is None else made(*arguments))

    def _count_given(self, values: int) -> None:
        """One value may be given many times: what is made of them is bounded too."""
        self._given += values
        if self._given > MAX_OPCODES:
            raise BadPickle(f"gives its calls more than {MAX_OPCODES} values")

    def set_state(self) -> None:
        """What an object is told after it was made: the notes that ordered dictionaries of weights carry, mostly. A
        table of parameters has them from there."""
        target, state = self.pop(2)
        if isinstance(target, ParameterTable) and isinstance(state, dict):
            own = state.get("_parameters")
            if isinstance(own, dict):
                self._count_given(len(own))
                target.update(own)
        if not isinstance(target, (dict, Idle, DeclaredTensor)):
            raise BadPickle(f"is damaged: it sets the state of a {type(target).__name__}")
        self.push(target)

    def persistent(self) -> None:
        (identity,) = self.pop(1)
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
            self.push(module_class(identity))
            return
        declared = storage(identity)
        if self._storages.setdefault(declared.key, declared) != declared:
            raise BadPickle(f"declares its storage {brief(declared.key)} in two ways")
        self.push(declared)


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: Idle(Name("builtins", "set")),
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
    "DICT": lambda m: m.push(pairs(m.pop_to_mark())),
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
