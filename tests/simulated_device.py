"""A device that is not there: CPU tensors that say they lie on ``cuda:0``, and streams with checked order.

Inside `SimulatedDevice` every operation computes on the CPU at once. What a device would do later, and in
which order, is kept in vector clocks: one count per stream and one of the host. A launch comes after all that
the host knows of, a wait for an event joins the clock that the event has kept. Noted are

races     two accesses to the same bytes, one of them a write, neither of which comes before the other
reuse     memory given back while another stream may still use it, and not yet waited for when the stream that
          it was allocated in goes on: the allocator hands it out at once
waits     the host stops for the device: ``item()``, a copy to pageable memory, an event of this very step
launches  kernels, copies and collectives, by their names; views and allocations launch nothing

What torch refuses for tensors of two devices it refuses here, in torch's words: a gradient on another device
than its tensor, an operation on both, a generator of the host, pinned memory on the device, `numpy()`.
`nn.RNNBase.flatten_parameters` moves weights into one buffer, as cuDNN does.

Over torch's fake process group collectives are NCCL's, as if every rank had this rank's values: alone, those
are the right ones. Over gloo they are real, and the host waits for each, since gloo moves host memory.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain import device as devices

DEVICE = torch.device("cuda", 0)
META = torch.device("meta")
PLAIN = (Tensor, torch.nn.Parameter)
# They neither make nor launch anything, as no getter does, and are most of what is called.
ASKS = {Tensor.untyped_storage, Tensor.data_ptr, Tensor.numel, Tensor.stride, Tensor.storage_offset}
ASKS |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.is_contiguous, torch._C._set_grad_enabled}
HOST = "host"
PINNED = "pinned"

NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_"}
NO_KERNEL |= {"_unsafe_view", "detach", "detach_", "resize_", "is_same_size", "is_pinned", "record_stream"}
NO_KERNEL |= {"_has_compatible_shallow_copy_type"}  # asked by `.data =`, in inference mode by way of here
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount", "is_nonzero"}
WAITS |= {"unique_dim", "unique_consecutive", "repeat_interleave"}
WAITS |= {"_linalg_check_errors", "allclose", "histc"}
# Numbers of the host; and indices, which may be tensors of the host.
TAKES_NUMBERS = {"fill_", "masked_fill_", "masked_fill", "where", "_index_put_impl_", "index_put_"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
ANSWERS = {"is_available": True, "device_count": 1, "get_memory_info": (1 << 30, 1 << 30)}
ANSWERS |= {"set_device_index": None, "reset_peak_memory_stats": None, "empty_cache": None}
ANSWERS |= {"memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 4, "max_memory_reserved": 8}
ACCELERATOR = (*ANSWERS, "current_stream", "set_stream", "synchronize")  # of `torch.accelerator`
STAGED = 1 << 16  # bytes from pageable memory that the driver takes without waiting
AUTOGRAD = "autograd"  # what it makes of nothing in C++ lies on the device; the rest, where its arguments do
OF_GLOO = {"allreduce_", "broadcast_", "_allgather_base_", "allgather_", "_reduce_scatter_base_"}
OF_GLOO |= {"alltoall_base_"}
NOT_OF_NCCL = {torch.int16, torch.complex64, torch.complex128}
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
GRADIENT = "attempting to assign a gradient with device type '{}' to a tensor with device type '{}'."
MEMORY = 'Attempted to set the storage of a tensor on device "{}" to a storage on different device "{}".'
OF_INDICES = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
OF_BACKWARD = "invalid gradient at index {} - expected device {} but got {}"
NO_GENERATOR = "Expected a 'cuda' device type for generator but found 'cpu'"
NO_NUMPY = "can't convert cuda:0 device type tensor to numpy."
GROUPED = "Tensors of the same index must be on the same device and the same dtype except `step` tensors"


class Line:
    """The host or a stream; ``clock``: how much of each line comes before its next action."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Counter[Line]()

    def act(self) -> None:
        self.clock[self] += 1


class Access(NamedTuple):
    """One of ``line``, as its ``tick``-th action, to the bytes ``low:high`` of a storage."""

    line: Line
    tick: int
    low: int
    high: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.line.name}"


class Memory:
    """A storage: where it lies, the stream that it was allocated in, and the accesses that still matter."""

    def __init__(self, place: object, home: Stream, reference: object) -> None:
        self.place = place
        self.home = home
        self.reference = reference
        self.accesses: list[Access] = []


class Stream(Line):
    device = DEVICE
    stream_id = 0
    device_index = 0
    device_type = 1
    sim: SimulatedDevice  # of the subclass that it makes

    def __init__(self, device: object = None, priority: int | None = 0) -> None:
        named = f"a stream of priority {priority}"
        super().__init__("the compute stream" if priority is None else named)
        self.given_back: list[tuple[Access, str]] = []

    def reuse(self) -> None:
        """Hand out what was given back to this stream since it last did anything."""
        order = self.clock | self.sim.host.clock
        for access, place in self.given_back:
            if order[access.line] < access.tick:
                self.sim.find(f"reuse: memory of {self.name} is given back at {place}, while {access}")
        self.given_back = []

    def record_event(self, event: Event | None = None) -> Event:
        return (event or self.sim.Event()).record(self)

    def wait_event(self, event: Event) -> None:
        if self.sim.recording is not None:
            self.sim.recording.wait(self, event)
        self.clock |= event.clock

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.sim.wait("stream.synchronize()", self.clock)

    def is_capturing(self) -> bool:
        return False


class Event:
    sim: SimulatedDevice

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        self.clock = Counter[Line]()
        self.step = self.sim.step
        self.recording: Any = None  # of which it marks a position

    def record(self, stream: Stream | None = None) -> Event:
        self.stream = stream or self.sim.current
        stream = self.stream
        stream.reuse()
        self.clock = stream.clock.copy()
        self.step = self.sim.step
        recording = self.sim.recording
        self.recording = recording if recording and self.stream in recording.streams else None
        return self

    def synchronize(self) -> None:
        self.sim.wait("event.synchronize()", self.clock, stops=self.step == self.sim.step)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class SimulatedDevice:
    """What stands for ``torch.accelerator`` inside ``with``; ``next_step()`` starts to count anew.

    ``findings``: races and reuse, each once. ``waits``, ``launches``: of this step.
    """

    def __init__(self) -> None:
        self.Stream, self.Event = (type(each.__name__, (each,), {"sim": self}) for each in (Stream, Event))
        self.host, self.current = Line("the host"), self.Stream(priority=None)
        self.findings: dict[str, None] = {}
        self.known: dict[int, Memory] = {}
        self.placing: Any = None  # where the factory or copy under way puts its result
        self.blocking = False  # whether the host waits for that copy
        self.of_gloo = False  # whether a collective of torch runs, whose C++ has memory of its own
        self.step = 0
        self.recording: Any = None  # the graph's that is recorded now: see `simulated_graph`
        self._backends = dist.get_backend_config
        self.next_step()

    @property
    def is_real(self) -> bool:
        """Whether collectives move bytes: over gloo."""
        return "fake" not in self._backends()

    def next_step(self) -> None:
        self.step += 1
        self.waits: list[str] = []
        self.launches: Counter[str] = Counter()

    @contextmanager
    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
        backward = torch.autograd._engine_run_backward
        resize = torch.UntypedStorage.resize_
        group = torch._C._group_tensors_by_device_and_dtype

        def in_hooks(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            self._require_gradients_beside(outputs, grads)
            with functions:  # which torch leaves while it runs a function of its own
                return functions._at(AUTOGRAD, backward, outputs, grads, *args, **kwargs)

        def backends(group: Any = None) -> str:
            return self._backends(group) if self.is_real else "cuda:nccl"

        with monkeypatch.context() as patch, Functions(self) as functions, Operations(self):
            for name in ACCELERATOR:
                patch.setattr(torch.accelerator, name, getattr(self, name))
            patch.setattr(torch, "Stream", self.Stream)
            patch.setattr(torch, "Event", self.Event)
            there = {"current_device": 0, "is_initialized": True, "is_bf16_supported": True}
            there |= {"get_device_name": "a simulated device", "manual_seed": None}
            there |= {"get_rng_state": None, "set_rng_state": None}
            for name, answer in there.items():
                patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
            for name in ("Stream", "Event", "current_stream"):  # FSDP2 asks there
                patch.setattr(torch.cuda, name, getattr(self, name))
            patch.setattr(torch.cuda, "stream", devices.inside)
            patch.setattr(torch.profiler, "profile", self.profile)
            patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            patch.setattr(dist, "get_backend_config", backends)
            patch.setattr(torch.UntypedStorage, "resize_", lambda s, n: self._resize(resize, s, n))
            patch.setattr(torch.autograd, "_engine_run_backward", in_hooks)
            patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", partial(self._grouped, group))
            patch.setattr(torch.backends.cudnn, "is_acceptable", self.on_device)
            patch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", GATES.__getitem__)
            patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
            patch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten_weights)
            yield self
        self.known.clear()

    # torch.accelerator's names

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: ANSWERS[name]

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def profile(self) -> Iterator[SimpleNamespace]:
        """Do as torch's: give each launch as an event on the device."""
        before = self.launches.total()
        launch = SimpleNamespace(device_type=1, is_user_annotation=False)
        yield SimpleNamespace(events=lambda: [launch] * (self.launches.total() - before))

    def synchronize(self, device: object = None) -> None:
        self.wait("synchronize()", self.current.clock)

    def _require_gradients_beside(self, outputs: Iterable[Any], grads: Iterable[Any]) -> None:
        """Refuse gradients to begin with on another device than their outputs, but for numbers."""
        for at, (output, grad) in enumerate(zip(outputs, grads, strict=False)):
            if isinstance(output, Tensor) and isinstance(grad, Tensor) and grad.dim():
                places = [DEVICE if self.on_device(t) else torch.device("cpu") for t in (output, grad)]
                if places[0] != places[1]:
                    raise RuntimeError(OF_BACKWARD.format(at, *places))

    def _grouped(self, group: Callable[..., Any], lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        """Group tensors as optimizers and clipping want them: by the device and dtype of the first list's.

        ``group``: torch's own function, which sees one device.
        """
        groups = dict[Any, Any]()
        for device in (DEVICE, torch.device("cpu")):
            chosen = [at for at, first in enumerate(lists[0]) if self.on_device(first) == (device is DEVICE)]
            if not chosen:
                continue
            some = [[tensors[at] for at in chosen] if tensors else tensors for tensors in lists]
            for tensor in [tensor for tensors in some[1:] for tensor in tensors]:
                if device is not DEVICE and tensor is not None and self.on_device(tensor):
                    raise RuntimeError(GROUPED)
            for (_, dtype), (rows, places) in group(some, with_indices).items():
                groups[device, dtype] = rows, [chosen[at] for at in places]
        return groups

    # order

    def wait(self, what: str, clock: Counter[Line], stops: bool = True) -> None:
        """Let the host wait until ``clock``."""
        if self.recording is not None:
            self.recording.refuse(what)
        self.host.clock |= clock
        self.waits += [f"{what} at {where()}"] if stops else []

    def launch(self, what: str, kernels: int = 1) -> Stream:
        self.launches[what] += kernels
        self.current.reuse()
        self.current.clock |= self.host.clock
        self.current.act()
        return self.current

    def access(self, tensor: Tensor, line: Line, writes: bool, what: str) -> None:
        """Note that ``line`` reads or writes ``tensor`` now; pageable memory is the host's alone."""
        memory = self.memory(tensor)
        if memory is None or not tensor.numel():
            return
        size = tensor.element_size()
        at = tensor.storage_offset()
        last = at + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        now = Access(line, line.clock[line], at * size, (last + 1) * size, writes, what)
        kept = []
        for other in memory.accesses:
            apart = other.low >= now.high or now.low >= other.high
            if not apart and (writes or other.writes) and line.clock[other.line] < other.tick:
                self.find(f"race: {now}, but {other} is not waited for")
            again = writes or (other.line is line and not other.writes)
            if not (again and now.low <= other.low and other.high <= now.high):
                kept.append(other)
        memory.accesses = [*kept, now]

    def find(self, what: str) -> None:
        self.findings.setdefault(f"{what}, at {where()}")

    # memory

    def memory(self, tensor: Tensor) -> Memory | None:
        if type(tensor) in PLAIN:
            return self.known.get(tensor.untyped_storage()._cdata)
        with torch._C.DisableTorchFunctionSubclass():  # norms of pieces answer nothing
            return self.known.get(tensor.untyped_storage()._cdata)

    def place(self, tensor: Tensor) -> object:
        memory = self.memory(tensor)
        return HOST if memory is None else memory.place

    def on_device(self, tensor: Tensor) -> bool:
        return self.place(tensor) is DEVICE

    def adopt(self, tensor: Tensor, place: object) -> None:
        """Note a storage that is new at ``place``."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if place is not HOST and number not in self.known and not tensor.is_meta:
            gone = weakref.ref(storage, lambda _: self._given_back(self.known.pop(number, None)))
            self.known[number] = Memory(place, self.current, gone)

    def _given_back(self, memory: Memory | None) -> None:
        if memory is None or memory.place is not DEVICE:
            return  # the allocator of pinned memory itself waits for copies
        order = self.host.clock | memory.home.clock
        place = None
        for access in memory.accesses:
            if order[access.line] < access.tick:
                place = place or where()
                memory.home.given_back.append((access, place))
        memory.accesses = []

    def _resize(self, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        memory = self.known.get(storage._cdata)
        if memory is not None and storage.nbytes() != size:
            self._given_back(memory)
            memory.home = self.current
        return resize(storage, size)


class Functions(TorchFunctionMode):
    """A mode that lets tensors say where they lie, and takes ``device="cuda"`` out of what is called."""

    def __init__(self, sim: SimulatedDevice) -> None:
        super().__init__()
        self.sim = sim
        t = torch.Tensor
        there = sim.on_device
        self.answers: dict[Any, Callable[..., Any]] = {  # None: what torch answers
            t.device.__get__: lambda x: DEVICE if there(x) else None,
            t.is_cuda.__get__: lambda x: there(x) or None,
            t.is_cpu.__get__: lambda x: False if there(x) else None,
            t.is_pinned: lambda x: sim.place(x) is PINNED,
            t.pin_memory: self._pin,
            t.get_device: lambda x: 0 if there(x) else None,
            t.tolist: lambda x: self._to(x, torch.device("cpu")).tolist() if there(x) else None,
            t.cpu: lambda x: self._to(x, torch.device("cpu")),
            t.cuda: lambda x: self._to(x, DEVICE),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for kind in types:  # pieces of gradients: what they call in turn comes here again
            if kind not in PLAIN and torch._C._is_torch_function_enabled():
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if func in self.answers:
            answer = self.answers[func](*args)
            return func(*args) if answer is None else answer
        if func in ASKS or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            if self.sim.on_device(args[0]):
                raise TypeError(NO_NUMPY)
            self.sim.access(args[0], self.sim.host, False, "numpy()")
        if func in SETTERS:
            SETTERS[func](self.sim, *args)
        if _averages(*args, *kwargs.values()) and dist.is_initialized() and self.sim.is_real:
            raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
        return self._make(func, args, kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call what may be a factory, and note where its result lies."""
        on_device = self.sim.on_device
        near = any(on_device(arg) for arg in args if isinstance(arg, Tensor))
        device = torch.device(kwargs["device"]) if kwargs.get("device") else META
        if kwargs.get("pin_memory"):
            if device.type == "cuda" or (device.type == "meta" and near):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return self._at(PINNED, func, *args, **{**kwargs, "pin_memory": False})
        if device.type == "meta":  # or none: what it makes lies where its arguments do
            self.sim.of_gloo = near and "torch.distributed" in (getattr(func, "__module__", None) or "")
            try:
                return self._at(DEVICE if near else None, func, *args, **kwargs)
            finally:
                self.sim.of_gloo = False
        kwargs["device"] = torch.device("cpu")
        if func in (torch.tensor, torch.as_tensor):
            return self._to(func(*args, **kwargs), device)
        return self._at(HOST if device.type == "cpu" else DEVICE, func, *args, **kwargs)

    def _at(self, place: object, func: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.sim.placing
        self.sim.placing = place
        try:
            return func(*args, **kwargs)
        finally:
            self.sim.placing = before

    def _pin(self, tensor: Tensor, *_: object) -> Tensor:
        if self.sim.on_device(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        pinned: Tensor = self._at(PINNED, torch.clone, tensor)
        return pinned

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """Do as ``tensor.to(*args, **kwargs)``."""
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            device = DEVICE if self.sim.on_device(args[0]) else torch.device("cpu")
        if device is not None and device.type == "meta":
            return tensor.to(*args, **kwargs)
        here = DEVICE if self.sim.on_device(tensor) else HOST
        there = here if device is None else DEVICE if device.type == "cuda" else HOST
        moves = here is not there
        self.sim.blocking = not non_blocking
        place = PINNED if non_blocking and moves and there is HOST else there
        keywords = {} if form is None else {"memory_format": form}
        return self._at(place, tensor.to, dtype or tensor.dtype, copy=copy or moves, **keywords)


def _averages(*arguments: object) -> bool:
    """Return whether a collective is to average, which torch documents for NCCL only."""
    kind = dist.ReduceOp.RedOpType
    return any(isinstance(each, kind) and each is dist.ReduceOp.AVG for each in arguments)


def refuse_gradient(sim: SimulatedDevice, tensor: Tensor, grad: Tensor | None) -> None:
    """Refuse a ``grad`` on another device than ``tensor``; torch itself compares the rest."""
    if grad is not None and sim.on_device(grad) != sim.on_device(tensor):
        raise RuntimeError(GRADIENT.format(*("cuda" if sim.on_device(t) else "cpu" for t in (grad, tensor))))


def forget_node(sim: SimulatedDevice, tensor: Tensor, data: Tensor) -> None:
    """Make autograd forget the accumulation node of ``tensor``, as it does at data of another device."""
    if sim.on_device(data) != sim.on_device(tensor):
        another = torch.float16 if tensor.dtype is not torch.float16 else torch.bfloat16
        with torch._C.DisableTorchFunction():
            tensor.data = torch.empty(0, dtype=another)


SETTERS: dict[Any, Callable[..., None]] = {
    torch.Tensor.grad.__set__: refuse_gradient,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: forget_node,  # type: ignore[attr-defined]
}


def flatten_weights(
    weights: Sequence[Tensor],
    per_layer: int,
    inputs: int,
    gates: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    bidirectional: bool,
) -> None:
    """Copy ``weights`` into one buffer, which they show from then on: `torch._cudnn_rnn_flatten_weight`.

    cuDNN knows their sizes from those of the layers. ``per_layer``: weights of one layer and direction.
    """
    directions = 1 + bidirectional
    outputs = projected or hidden
    sizes = list[int]()
    for layer in range(layers):
        of_inputs = inputs if layer == 0 else outputs * directions
        of_layer = [gates * hidden * of_inputs, gates * hidden * outputs]
        of_layer += [gates * hidden] * 2 if per_layer >= 4 else []
        of_layer += [hidden * projected] if projected else []
        sizes += of_layer * directions
    buffer = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=weights[0].device)
    for weight, place in zip(weights, buffer.split(sizes), strict=True):
        place = place.view(-1, 1)
        place.copy_(weight.view_as(place))
        weight.data = place.view_as(weight)


@functools.cache
def written(func: Any) -> tuple[list[str], set[str], bool]:
    """Return the names of an operation's arguments, which of them it writes, and whether it makes a view."""
    arguments = func._schema.arguments
    returns = func._schema.returns
    writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return [a.name for a in arguments], writes, views


class Operations(TorchDispatchMode):
    """A mode that notes what every operation reads and writes, in which stream."""

    def __init__(self, sim: SimulatedDevice) -> None:
        super().__init__()
        self.sim = sim

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._operation(func, args, kwargs or {})

    def _operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        sim = self.sim
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        names, writes, views = written(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reads = [t for n, v in given.items() if n not in writes for t in tensors(v)]
        outs = [t for n in writes for t in tensors(given.get(n))]
        if name in ("copy_", "_foreach_copy_", "_to_copy"):
            return self._copy(func, name, args, kwargs, outs, reads)
        on_device = [t for t in (*reads, *outs) if sim.on_device(t)]
        place = self._place(kwargs, [*reads, *outs])
        self._refuse(func, name, reads, outs, given)
        if place is DEVICE and given.get("generator") is not None:
            raise RuntimeError(NO_GENERATOR)
        if kwargs.get("device") == DEVICE:  # asked for in C++
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **kwargs)
        fresh = [t for t in tensors(result) if all(t is not other for other in outs)]
        makes = not views or name == "lift_fresh" or sim.of_gloo
        for tensor in fresh:
            if makes or not shows_one_of(tensor, reads):
                sim.adopt(tensor, place)
        if waits_for_values(name, given):
            if on_device:
                self._use(sim.launch(name), reads, outs, name)
                sim.wait(name, sim.current.clock)
        elif not (views or name in NO_KERNEL):
            self._compute(name, bool(on_device) or place is DEVICE, reads, outs, fresh)
        return result

    def _compute(
        self,
        name: str,
        launches: bool,
        reads: Sequence[Tensor],
        outs: Sequence[Tensor],
        fresh: Sequence[Tensor],
    ) -> None:
        """Note that an operation writes ``outs`` and makes ``fresh``: on the host, unless it ``launches``."""
        sim = self.sim
        if not launches:
            sim.host.act()
            self._use(sim.host, reads, [*outs, *fresh], name)
        elif any(tensor.numel() for tensor in (*outs, *fresh)) or not (outs or fresh):
            self._use(sim.launch(name, kernels(name, outs or fresh)), reads, [*outs, *fresh], name)

    def _place(self, kwargs: dict[str, Any], arguments: Sequence[Tensor]) -> object:
        """Return where the results of an operation lie."""
        placing = self.sim.placing
        if kwargs.get("device") == DEVICE or (placing is AUTOGRAD and not arguments):
            return DEVICE
        if placing is None or placing is AUTOGRAD:
            return DEVICE if any(self.sim.on_device(tensor) for tensor in arguments) else HOST
        return placing

    def _refuse(
        self, func: Any, name: str, reads: Sequence[Tensor], outs: Sequence[Tensor], given: dict[str, Any]
    ) -> None:
        """Refuse what torch refuses for tensors of two devices."""
        if name == "set_":
            self._require_memory_beside(*given.values())
        elif not (written(func)[2] or name in NO_KERNEL):
            self._require_one_device(func, name, reads, outs, given)

    def _require_one_device(
        self, func: Any, name: str, reads: Sequence[Tensor], outs: Sequence[Tensor], given: dict[str, Any]
    ) -> None:
        """Refuse tensors of the host beside those of the device; a number is one if the kernel reads one."""
        groups: list[Sequence[Tensor]] = [[*reads, *outs]]
        numbers = 0 if name.startswith(("_fused", "_amp")) else 1
        if name in INDEXES:
            indexed, indices = given["self"], tensors(given["indices"])
            if not self.sim.on_device(indexed) and any(map(self.sim.on_device, indices)):
                raise RuntimeError(f"{OF_INDICES} ({name} at {where()})")
            groups = [[indexed, *tensors(given.get("values"))]]
        written_to = {id(out) for out in outs}
        if name.startswith("_foreach"):  # each of a list by itself
            lists = [value for value in given.values() if isinstance(value, list | tuple) and tensors(value)]
            alone = [value for value in given.values() if isinstance(value, Tensor)]
            groups = [[*tensors([*group]), *alone] for group in zip(*lists, strict=False)]
        elif torch.Tag.pointwise not in func.tags and name not in TAKES_NUMBERS:
            numbers = 0
        for group in groups:
            here = [t for t in group if not self.sim.on_device(t) and not t.is_meta]
            taken = [t for t in here if t.dim() == 0 and id(t) not in written_to][:numbers]
            if len(taken) < len(here) < len(group):
                raise RuntimeError(f"{TWO_DEVICES} ({name} at {where()})")

    def _require_memory_beside(self, tensor: Tensor, source: Any = None, *_: object) -> None:
        """Refuse to give ``tensor`` the memory of ``source``, a tensor or a storage, of another device."""
        if source is None:
            return
        storage = source.untyped_storage() if isinstance(source, Tensor) else source
        memory = self.sim.known.get(storage._cdata)
        place = memory.place if memory else self.sim.placing  # a new one lies where things are made now
        source_on_device = place is DEVICE
        if source_on_device != self.sim.on_device(tensor):
            devices = ("cpu", "cuda:0") if source_on_device else ("cuda:0", "cpu")
            raise RuntimeError(MEMORY.format(*devices))

    def _use(self, line: Line, reads: Iterable[Tensor], outs: Iterable[Tensor], what: str) -> None:
        for tensor, writes in [*((t, False) for t in reads), *((t, True) for t in outs)]:
            on_host = line is not self.sim.host and not self.sim.on_device(tensor)
            self.sim.access(tensor, self.sim.host if on_host else line, writes, what)  # a number, taken now

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, outs: Any, reads: Any) -> Any:
        """Run a copy, perhaps between host and device."""
        sim = self.sim
        pairs = list(zip(outs, reads, strict=False))
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        placing = None if sim.placing is AUTOGRAD else sim.placing
        blocking = sim.blocking
        result = func(*args, **kwargs)
        if name == "_to_copy":
            sim.adopt(result, placing if placing is not None else sim.place(reads[0]))
            pairs = [(result, reads[0])]
            non_blocking = placing is None or not blocking
        inside = [pair for pair in pairs if sim.on_device(pair[0]) and sim.on_device(pair[1])]
        if any(to.numel() for to, _ in inside):
            together = len({(to.dtype, source.dtype) for to, source in inside}) == 1
            tos = [to for to, _ in inside]
            line = sim.launch(name, kernels(name, tos) if together else len(tos))
            self._use(line, [source for _, source in inside], tos, name)
        for to, source in [pair for pair in pairs if not any(pair[0] is to for to, _ in inside)]:
            if not sim.on_device(to) and not sim.on_device(source):
                sim.host.act()
                self._use(sim.host, [source], [to], name)
            elif to.numel():
                self._transfer(to, source, non_blocking)
        return result

    def _transfer(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        sim = self.sim
        upload = self.sim.on_device(to)
        what, there = ("upload", source) if upload else ("download", to)
        line = sim.launch(what)
        pinned = sim.place(there) is PINNED
        if not non_blocking or not (pinned or (upload and there.nbytes <= STAGED)):
            self._use(line, [source] if sim.on_device(source) else [], [to] if upload else [], what)
            sim.wait(f"{what} of {there.nbytes} bytes", line.clock)
            sim.host.act()
            self._use(sim.host, [] if sim.on_device(source) else [source], [] if upload else [to], what)
            return
        sim.access(source, line if pinned or not upload else sim.host, False, what)
        sim.access(to, line, True, what)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        outs = tensors(args[0])
        reads = tensors(args[1])
        if name in ("allreduce_", "broadcast_", "allreduce_coalesced_"):
            reads = outs
        on_device = [tensor for tensor in (*outs, *reads) if self.sim.on_device(tensor)]
        if self.sim.is_real:
            return self._over_gloo(func, name, args, kwargs, outs, reads)
        assert len(on_device) == len(outs) + len(reads), f"{name} of host memory, at {where()}"
        assert all(t.is_contiguous() and t.dtype not in NOT_OF_NCCL for t in on_device), (
            f"{name} at {where()}"
        )
        if name == "allgather_":  # of uneven sizes, which the fake group does not know
            args = [[[read.clone() for _ in outs] for read in reads], *args[1:]]
        result = func(*args, **kwargs)
        if name.startswith(("_reduce_scatter", "reduce_scatter", "alltoall", "allgather_")):
            for out, read in zip(outs, reads * len(outs), strict=False):
                values = read.view(-1)[: out.numel()].clone()  # ``out`` may be a part of ``read``
                out.zero_().view(-1)[: values.numel()].copy_(values)
        self._use(self.sim.launch(name), reads, outs, name)
        return result

    def _over_gloo(
        self, func: Any, name: str, args: Any, kwargs: Any, outs: list[Tensor], reads: list[Tensor]
    ) -> Any:
        """Run a real collective; of tensors of the device, on copies in host memory."""
        sim = self.sim
        result = func(*args, **kwargs)
        if any(sim.on_device(tensor) for tensor in (*outs, *reads)):
            assert name in OF_GLOO, f"{name} of tensors of the device, at {where()}"
            sim.wait(f"{name} over gloo", sim.current.clock)  # the copy back is not waited for
            self._use(sim.launch(name), reads, outs, name)
        else:
            sim.host.act()
            self._use(sim.host, reads, outs, name)
        return result


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dictionaries; `tree_leaves` takes four times as long."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors(item)]


def waits_for_values(name: str, given: dict[str, Any]) -> bool:
    """Return whether an operation's result has a size, or is a number, that only its values tell."""
    by_mask = name in INDEXES and any(t.dtype is torch.bool for t in tensors(given["indices"]))
    return name in WAITS or by_mask


def shows_one_of(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether ``tensor`` lies in the memory of one of ``others``, and so on its device.

    In inference mode also what may return its argument, such as `Tensor.to`, is an operation.
    """
    memory = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == memory for other in others)


def kernels(name: str, outs: Sequence[Tensor]) -> int:
    """Return how many kernels work through ``outs``; one of a ``_foreach`` takes 64 tensors, of one dtype."""
    if not name.startswith("_foreach"):
        return 1
    dtypes = Counter(out.dtype for out in outs)
    return sum(-(-count // 64) for count in dtypes.values())


def where() -> str:
    """Return the innermost lines of the package, and of the test."""
    lines = []
    for frame, line in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if "/shardtrain/" in code.co_filename or "/test_" in code.co_filename:
            lines.append(f"{code.co_filename.rsplit('/', 1)[1]}:{line} {code.co_name}")
    return " < ".join(lines[:5])
