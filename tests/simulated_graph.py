"""CUDA graphs for the simulated device: a recording notes operations with their memory, and repeats them.

They stand for `torch.cuda.CUDAGraph` and `torch.cuda.graph`, which `shardtrain.device.Recorder` uses. What a
recording's operations wrote is restored. A replay runs no code of the host: it computes the operations again,
in their order, on the memory that they had, with numbers of the host as they were. Collectives are made
again, over gloo or torch's fake process group. Refused in the words of CUDA are waits of the host, a stream
that waits for older work, and one that the first stream does not wait for in the end.

Memory from before the recording is not the graph's. If a replay uses some that was given back since, or lies
elsewhere now, it finds garbage there, and the device notes that as a finding. So it does for what is launched
or allocated on a stream that takes no part: it runs once, and its memory is not the graph's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from shardtrain import device as devices

from simulated_device import DEVICE, NO_KERNEL, Event, SimulatedDevice, Stream, tensors, written

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
UNJOINED = "CUDA error: capturing stream has unjoined work"


class Recordings:
    """The graphs that were recorded."""

    def __init__(self, sim: SimulatedDevice) -> None:
        self.sim = sim
        self.recordings: list[Recording] = []

    @property
    def is_held(self) -> bool:
        """Whether there is a graph, for which NCCL would wait as its group ends."""
        return not all(recording.is_deleted for recording in self.recordings)

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in self.recordings)

    @contextmanager
    def graph(self, recording: Recording, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """Do as `torch.cuda.graph`; nothing of what is recorded has run in the end."""
        assert capture_error_mode == "thread_local"
        current = self.sim.current
        self.sim.host.clock |= current.clock  # torch synchronizes
        self.sim.recording = recording
        recording.streams[stream] = stream.clock[stream]
        try:
            with devices.inside(stream), recording, recording.resizes():
                yield
            for other, begin in recording.streams.items():
                if other.clock[other] > max(begin, stream.clock[other]):
                    raise RuntimeError(UNJOINED)
        finally:
            self.sim.recording = None
            for other in recording.streams:
                current.clock |= other.clock
            recording.undo()
        self.recordings.append(recording)


@contextmanager
def recorder(device: SimulatedDevice) -> Iterator[Recordings]:
    """Let `shardtrain.capture` record what runs on ``device``, gloo's collectives too."""
    made = Recordings(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", partial(Recording, device))
        patch.setattr(torch.cuda, "graph", made.graph)
        patch.setattr(devices.Recorder, "only_capturable", False)
        patch.setattr(devices.Recorder, "holds", lambda _, tensor: device.on_device(tensor))
        yield made


class Outside:
    """A tensor that was there before a recording, shown as long as its memory is there, too."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self.name = name
        self.storage = weakref.ref(storage)
        self.address = storage.data_ptr()
        self.dtype = tensor.dtype
        self.form = tensor.storage_offset(), tensor.shape, tensor.stride()

    def shown(self, sim: SimulatedDevice) -> Tensor:
        storage = self.storage()
        if storage is not None and storage.data_ptr() == self.address:
            return _alias(storage, self.dtype, *self.form)
        shape = tuple(self.form[1])
        sim.find(f"outside: {self.name} in a replay uses memory of before ({shape}), which was given back")
        garbage = torch.full(shape, math.nan if self.dtype.is_floating_point else 0, dtype=self.dtype)
        sim.adopt(garbage, DEVICE)
        return garbage


class Recording(TorchDispatchMode):
    """Every operation of the device, noted to be repeated: a `torch.cuda.CUDAGraph`.

    ``streams``: those that take part, with how much of each was there when it came in.
    """

    def __init__(self, sim: SimulatedDevice) -> None:
        super().__init__()
        self.sim = sim
        self.launches: list[Callable[[], object]] = []
        self.names: list[str] = []
        self.replays = 0
        self.is_deleted = False
        self.streams: dict[Stream, int] = {}
        self._own: dict[int, Tensor] = {}  # storages of the graph's own memory, each by a view that holds it
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other storages that it uses, and what was there
        self._groups: list[dist.ProcessGroup] = []

    def reset(self) -> None:
        """Do as torch's: delete the graph, and give its memory back."""
        self.is_deleted = True
        self.launches.clear()
        self._own.clear()

    def replay(self) -> None:
        assert not self.is_deleted
        self.replays += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for launch in self.launches:
                launch()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let ``stream`` take part from now on, if ``event`` marks a position in this recording."""
        if event.recording is self:
            self.streams.setdefault(stream, stream.clock[stream])
        elif stream in self.streams and event.clock:
            raise RuntimeError(ISOLATION)

    def refuse(self, wait: str) -> None:
        """Refuse that the host waits. It does over gloo, which stands for NCCL."""
        if not wait.endswith("over gloo"):
            raise RuntimeError(f"{NOT_PERMITTED} ({wait})")

    def _require_stream(self, name: str) -> None:
        if self.sim.current not in self.streams:
            self.sim.find(f"outside: {name} on {self.sim.current.name}, which is not recorded")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._operation(func, args, kwargs or {})

    def _operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        *_, views = written(func)
        arguments = tensors([args, kwargs])
        on_device = self.sim.on_device
        is_launch = any(map(on_device, arguments)) and not (views or name in NO_KERNEL)
        for tensor in arguments if is_launch else ():
            self._save(tensor)  # it may be written: the schema of a batch's norm does not say so
        sends = func.namespace == "c10d" and self.sim.is_real
        result = func(*self._sending_nothing(args) if sends else args, **kwargs)
        fresh = [t for t in tensors(result) if all(t is not other for other in arguments)]
        shared = {tensor.untyped_storage()._cdata for tensor in arguments}
        for tensor in fresh:
            if tensor.untyped_storage()._cdata not in shared:
                self._make(tensor, name)
        if is_launch or (fresh and not arguments and name not in NO_KERNEL and on_device(fresh[0])):
            self._require_stream(name)
            self.names.append(name)
            own = tree_map(partial(self._kept, name), (tuple(args), kwargs))
            self.launches.append(partial(self._launch, func, own, [*map(_view, fresh)]))
        return result

    def _sending_nothing(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments of a collective, with a group that moves nothing: other ranks may not record."""
        [boxed] = [arg for arg in args if "c10d.ProcessGroup" in str(getattr(arg, "_type", str)())]
        real = dist.ProcessGroup.unbox(boxed)
        made = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(real.rank(), real.size())
        silent = dist.ProcessGroup(FakeStore(), real.rank(), real.size())
        silent._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, made)
        self._groups.append(silent)
        return [silent.boxed() if arg is boxed else arg for arg in args]

    def _kept(self, name: str, value: Any) -> Any:
        """Return a view of a tensor on the device; a copy of one of the host, whose value is taken now."""
        if not isinstance(value, Tensor):
            return value
        if not self.sim.on_device(value):
            return value.clone()
        return _view(value) if value.untyped_storage()._cdata in self._own else Outside(value, name)

    def _save(self, tensor: Tensor) -> None:
        """Keep what is in the storage of ``tensor``, before it is first written."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._own and number not in self._before:
            whole = _alias(storage)
            self._before[number] = whole, whole.clone()

    def _make(self, tensor: Tensor, name: str) -> None:
        """Note a storage that is new."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._own or number in self._before:
            return
        if self.sim.on_device(tensor):
            self._require_stream(name)
        self._own[number] = _view(tensor)
        self.launches.append(partial(_resize, storage, storage.nbytes()))

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Note what is resized inside."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            view = _alias(storage, torch.uint8, 0, (0,))
            if self.sim.on_device(view) and storage.nbytes() != size:
                self._require_stream("resize_")
                if storage._cdata in self._before and storage._cdata not in self._own:
                    self.sim.find("outside: memory of before is used in a recording, and given back there")
                self._own.setdefault(storage._cdata, view)  # what is in it then, no one may read
                self.launches.append(partial(_resize, storage, size))
            return resize(storage, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", noted)
            yield

    def undo(self) -> None:
        """Restore what was in memory before. Nothing is in the graph's own memory yet."""
        with torch._C.DisableTorchFunction():
            for whole, before in self._before.values():
                if whole.untyped_storage().nbytes() == before.numel():
                    whole.copy_(before)
            for view in self._own.values():
                _alias(view.untyped_storage()).fill_(255)  # NaN
        self._before = {}

    def _launch(self, func: Any, own: Any, fresh: Sequence[Tensor]) -> None:
        """Repeat an operation on its ``own`` arguments, into the tensors that it made."""
        args, kwargs = tree_map(lambda x: x.shown(self.sim) if isinstance(x, Outside) else x, own)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if hasattr(leaf, "wait") and not isinstance(leaf, Tensor):
                leaf.wait()
        known = {id(tensor) for tensor in tensors([args, kwargs])}
        new = [tensor for tensor in tensors(result) if id(tensor) not in known]
        for tensor, computed in zip(fresh, new, strict=True):
            tensor.copy_(computed)


def _view(tensor: Tensor) -> Tensor:
    """Return another tensor of the same memory, which it has whatever ``tensor.data`` becomes."""
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    return _alias(tensor.untyped_storage(), tensor.dtype, *form)


def _alias(storage: torch.UntypedStorage, dtype: torch.dtype = torch.uint8, *form: Any) -> Tensor:
    """Return a tensor over ``storage``, of which the simulated device hears nothing."""
    with _disable_current_modes():
        return torch.empty(0, dtype=dtype).set_(storage, *form)  # type: ignore[call-overload]


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    if storage.nbytes() != size:  # it would move
        storage.resize_(size)
