"""A model whose parameters have no memory yet, and the means to compute each of them again.

`deferred` lets a constructor run as ever, under a mode that sees every operation. All of them are executed,
so random numbers are drawn, and values can be looked at, exactly as without it. Each is also written on a
tape, with the random generator's state before it. What has been computed may then be forgotten: memory that
was not used lately is given back, and made again from the tape when an operation asks for it. In the end
the parameters are on the meta device, and `shard` has each of them played back on its way to the shards::

    w = empty(4, 3)          0  w := empty
    w.uniform_(-1, 1)        1  w := uniform   (state a)
    b = zeros(4)             2  b := zeros
    w.normal_(0, 0.1)        3  w := normal    (state b), all of it: whatever was before does not matter

    playing w back is 3 alone, playing b back is 2

The tape knows memory, not tensors: an operand is a window on some memory, so views need no entry, and
what an operation reads or writes through a view counts as its memory's.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# They fill their first operand without reading it.
_FILLS = {
    getattr(torch.ops.aten, name)
    for name in ("uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_")
}


@dataclass(frozen=True)
class StorageView:
    """A tensor as a part of memory number ``memory``; ``offset`` and ``stride`` in elements."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, memories: dict[int, UntypedStorage]) -> Tensor:
        storage = memories.setdefault(self.memory, UntypedStorage(0))
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Entry(NamedTuple):
    """One operation on the tape. ``made``: the memory behind each tensor of the result, None if not new.

    ``random``: the generator's state before it. ``fills``: the memory whose contents before it do not
    matter after it.
    """

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[int | None]
    reads: frozenset[int]
    fills: int | None
    random: Tensor | None
    default_dtype: torch.dtype

    def play(self, memories: dict[int, UntypedStorage]) -> None:
        """Do it again, on ``memories``."""
        args, kwargs = tree_map_only(
            StorageView, lambda window: window.on(memories), (self.args, self.kwargs)
        )
        with _default_dtype(self.default_dtype), _random(self.random, kwargs):
            result = self.operation(*args, **kwargs)
        for memory, tensor in zip(self.made, _tensors(result), strict=True):
            if memory is not None:
                memories[memory] = tensor.untyped_storage()


class Tape(TorchDispatchMode):
    """While it is entered, writes down operations on CPU tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: list[Entry] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)  # memory → entries, in order
        self._memories = Memories()
        self._parameters: dict[
            nn.Parameter, tuple[StorageView, int]
        ] = {}  # with its version since it is on meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [tensor for tensor in _tensors((args, kwargs)) if tensor.device.type == "cpu"]
        filled = self._filled(func, given)
        windows = {id(tensor): self._use(tensor, restore=tensor is not filled) for tensor in given}
        random = _state(kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **kwargs)
        made = [self._number_if_new(tensor) for tensor in _tensors(result)]
        written = {windows[id(t)].memory for t in _written(func, args, kwargs) if id(t) in windows}
        written.update(number for number in made if number is not None)
        if written:
            reads = {windows[id(tensor)].memory for tensor in given if tensor is not filled}
            fills = None if filled is None else windows[id(filled)].memory
            args, kwargs = tree_map_only(Tensor, lambda t: windows.get(id(t), t), (args, kwargs))
            dtype = torch.get_default_dtype()
            self._write(Entry(func, args, kwargs, made, frozenset(reads), fills, random, dtype), written)
        self._memories.forget(keep=written.union(window.memory for window in windows.values()))
        return result

    def _write(self, entry: Entry, written: set[int]) -> None:
        for memory in written:
            self._writers[memory].append(len(self._entries))
        self._entries.append(entry)

    def _number_if_new(self, tensor: Tensor) -> int | None:
        if tensor.device.type != "cpu" or self._memories.number(tensor) is not None:
            return None
        number = self._memories.add(tensor)
        self._memories.use(number)
        return number

    def _use(self, tensor: Tensor, restore: bool) -> StorageView:
        """``tensor``'s window; its memory is there, with its values if it is to be restored."""
        number = self._memories.number(tensor)
        if number is None:
            number = self._take_in(tensor)
        elif number in self._memories.forgotten:
            self._restore(number) if restore else self._memories.open(number)
        self._memories.use(number)
        return StorageView(number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _filled(self, func: Any, given: list[Tensor]) -> Tensor | None:
        """The operand whose memory is overwritten as a whole without being read, if there is one."""
        if func.overloadpacket not in _FILLS or not given:
            return None
        first, *others = given
        shared = any(address(other) == address(first) for other in others)
        whole = first.is_contiguous() and first.nbytes == self._memories.size(first)
        return first if whole and not shared else None

    def _take_in(self, tensor: Tensor) -> int:
        """Write down the present values of memory that the tape has not seen being made."""
        number = self._memories.add(tensor)
        self._memories.pin(number)
        values = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
        nothing: frozenset[int] = frozenset()
        entry = Entry(values.clone, (), {}, [number], nothing, None, None, torch.get_default_dtype())
        self._write(entry, {number})
        return number

    def _restore(self, number: int) -> None:
        values = self._play(number)
        self._memories.open(number).copy_(values)

    def peek(self, tensor: Tensor) -> None:
        """Somebody looks at ``tensor``'s memory without an operation, and may do so again."""
        if self._memories.number(tensor) is not None:
            self._memories.pin(self._use(tensor, restore=True).memory)

    def defer(self, model: nn.Module) -> None:
        """Put the parameters of ``model`` that the tape can play on the meta device; all else stays."""
        for param in model.parameters():
            number = self._memories.number(param)
            if number is None or self._memories.is_pinned(number) or type(param) is not nn.Parameter:
                continue
            window = StorageView(
                number, param.dtype, param.shape, param.stride(), int(param.storage_offset())
            )
            become(param, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta"))
            self._parameters[param] = (window, param._version)
        for number in list(self._memories.forgotten):
            self._restore(number)

    def __contains__(self, param: object) -> bool:
        return param in self._parameters

    def value(self, name: str, param: nn.Parameter) -> Tensor:
        """The whole value of a parameter that was deferred.

        Raises:
            ValueError: it was changed since, or an operation cannot be done again.
        """
        window, version = self._parameters[param]
        if param._version != version or param.shape != window.shape:
            raise ValueError(
                f"parameter {name} was changed after deferred(), while it had no values; change it inside "
                "the function that deferred() calls, or after shard()"
            )
        try:
            return window.on({window.memory: self._play(window.memory)})
        except RuntimeError as error:
            raise ValueError(
                f"parameter {name} cannot be computed again ({error}); build the model without deferred()"
            ) from error

    def _play(self, memory: int) -> UntypedStorage:
        """The contents that ``memory`` has after the last entry, in new memory."""
        memories: dict[int, UntypedStorage] = {}
        with torch.no_grad(), _disable_current_modes():
            for index in self._needed(memory):
                self._entries[index].play(memories)
        return memories[memory]

    def _needed(self, memory: int) -> list[int]:
        """The entries that decide what ``memory`` holds in the end, in order."""
        needed: set[int] = set()
        asked = {(memory, len(self._entries))}
        to_do = list(asked)
        while to_do:
            memory, until = to_do.pop()
            for index in reversed([index for index in self._writers[memory] if index < until]):
                needed.add(index)
                entry = self._entries[index]
                new = {(read, index) for read in entry.reads} - asked
                asked |= new
                to_do += new
                if entry.fills == memory:
                    break
        return sorted(needed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        twin = copy.copy(self)
        copies = {copy.deepcopy(param, memo): window for param, (window, _) in self._parameters.items()}
        twin._parameters = {param: (window, param._version) for param, window in copies.items()}
        return twin


def become(param: nn.Parameter, tensor: Tensor) -> None:
    """Let the object ``param`` be ``tensor`` from now on, where setting ``.data`` is not allowed."""
    fresh = nn.Parameter(tensor, param.requires_grad)
    fresh.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, fresh)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The operands that ``func`` says it writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _state(kwargs: dict[str, Any]) -> Tensor:
    generator = kwargs.get("generator") or torch.default_generator
    return generator.get_state()


@contextmanager
def _random(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """In here the generator, the default one or a copy of that in ``kwargs``, starts from ``state``."""
    if state is None:
        yield
    elif kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(state)
        yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(state)
            yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Memory of tensors that can be given back, because their values can be made again.

KEPT = 1 << 26  # bytes of values that are kept for operations to come
_SMALL = 1 << 12  # bytes; not worth forgetting


class Memories:
    """The memory of the tensors that were made on a tape: numbered, given back when it has not been used
    lately, and resized when it is to be used again.

    ``number`` of a memory outlives the memory itself.
    """

    def __init__(self) -> None:
        self._count = 0
        self._numbers: dict[int, int] = {}  # address of a living storage → its number
        self._living: dict[int, weakref.ref[UntypedStorage]] = {}
        self._present: OrderedDict[int, int] = OrderedDict()  # number → bytes, least recently used first
        self.forgotten: dict[int, int] = {}  # number → bytes that it had
        self._pinned: set[int] = set()  # others than operations may look at these

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(address(tensor))

    def size(self, tensor: Tensor) -> int:
        """Bytes of its memory, there or not."""
        number = self.number(tensor)
        known = None if number is None else self.forgotten.get(number)
        return tensor.untyped_storage().nbytes() if known is None else known

    def add(self, tensor: Tensor) -> int:
        """Give new memory its number."""
        storage = tensor.untyped_storage()
        address, self._count = storage._cdata, self._count + 1
        number = self._numbers[address] = self._count

        def died(_: object) -> None:
            del self._living[number]
            self._present.pop(number, None)
            self.forgotten.pop(number, None)
            if self._numbers.get(address) == number:
                del self._numbers[address]

        self._living[number] = weakref.ref(storage, died)
        return number

    def pin(self, number: int) -> None:
        self._pinned.add(number)

    def is_pinned(self, number: int) -> bool:
        return number in self._pinned

    def use(self, number: int) -> None:
        """Note that it is there, and has just been used."""
        storage = self._living[number]()
        assert storage is not None
        self._present[number] = storage.nbytes()
        self._present.move_to_end(number)

    def open(self, number: int) -> UntypedStorage:
        """Give forgotten memory its size again; what it holds is undefined."""
        storage = self._living[number]()
        assert storage is not None
        storage.resize_(self.forgotten.pop(number))
        return storage

    def forget(self, keep: set[int]) -> None:
        """Give back what has not been used for longest, but not ``keep``, while there is too much."""
        held = sum(self._present.values())
        for number, size in list(self._present.items()):
            if held <= KEPT:
                return
            storage = self._living[number]()
            if number not in keep | self._pinned and size > _SMALL and storage is not None:
                self.forgotten[number] = self._present.pop(number)
                storage.resize_(0)
                held -= size


def address(tensor: Tensor) -> int:
    """Which memory it lies in, there or not."""
    return int(tensor.untyped_storage()._cdata)


# Initial values: of models that have them, and of deferred ones, which have a tape to play instead.

_TAPE = "_shardtrain_tape"

# They read memory without an operation that the mode would see.
_PEEKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__repr__}

Model = TypeVar("Model", bound=nn.Module)


class _Peeks(TorchFunctionMode):
    """Tells the tape who looks at memory without an operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PEEKS:
            self._tape.peek(args[0])
        return func(*args, **(kwargs or {}))


def deferred(build: Callable[..., Model], *args: Any, **kwargs: Any) -> Model:
    """``build(*args, **kwargs)`` with its parameters on the meta device, to be given to `shard`.

    `shard` then computes the initial values unit by unit, on rank 0, and they are bit for bit those that
    ``build`` would have given without `deferred`. Random number generators are left where ``build`` leaves
    them. Never more than the largest unit and 64 MiB of values are whole on a rank, so a model need not fit
    in its memory. Until `shard` the parameters can be converted (``.to(dtype)``, channels_last), but have no
    values to look at or to change. Buffers have theirs.
    """
    tape = Tape()
    with tape, _Peeks(tape):
        model = build(*args, **kwargs)
    tape.defer(model)
    model.__dict__[_TAPE] = tape
    return model


class Initial:
    """The parameters' values before they are cut, and where they are to lie.

    ``device``: None leaves parameters where they are, and deferred ones on the CPU.
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        self._device = device
        self._tapes = [m.__dict__[_TAPE] for m in module.modules() if _TAPE in m.__dict__]

    def device(self, tensor: Tensor) -> torch.device:
        found = torch.device("cpu") if self._tape(tensor) else tensor.device
        return self._device if self._device is not None and found.type != "meta" else found

    def value(self, name: str, param: nn.Parameter) -> Tensor:
        tape = self._tape(param)
        return param.detach() if tape is None else tape.value(name, param)

    def _tape(self, param: Tensor) -> Tape | None:
        return next((tape for tape in self._tapes if param in tape), None)


def forget(module: nn.Module) -> None:
    """Leave no tape behind."""
    for part in module.modules():
        part.__dict__.pop(_TAPE, None)
