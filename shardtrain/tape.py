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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtrain.memories import Memories, address

# They fill their first operand without reading it.
_FILLS = {
    getattr(torch.ops.aten, name)
    for name in ("uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_")
}


@dataclass(frozen=True)
class Window:
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
        args, kwargs = tree_map_only(Window, lambda window: window.on(memories), (self.args, self.kwargs))
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
        self._parameters: dict[nn.Parameter, tuple[Window, int]] = {}  # with its version since it is on meta

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

    def _use(self, tensor: Tensor, restore: bool) -> Window:
        """``tensor``'s window; its memory is there, with its values if it is to be restored."""
        number = self._memories.number(tensor)
        if number is None:
            number = self._take_in(tensor)
        elif number in self._memories.forgotten:
            self._restore(number) if restore else self._memories.open(number)
        self._memories.use(number)
        return Window(number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

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
            window = Window(number, param.dtype, param.shape, param.stride(), int(param.storage_offset()))
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
