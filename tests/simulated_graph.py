"""A recorder of graphs for the simulated device: it notes operations with their memory, and repeats them.

As on a device, recording changes nothing: what its operations wrote is restored. A replay runs no code of the
host. It computes the operations again, in their order, on the memory that they had, of which the recording
holds all. So what the host must do in each step, and what it does not see, shows as on a device::

    a launch          noted with views of its tensors; numbers of the host as they were
    an allocation     noted, as is `resize_` of a storage
    a wait, a value   refused in the words of CUDA, and so is a copy between host and device
    a draw            draws anew, from torch's generator as it is then; reading its state is refused
    a collective      made again, over gloo or torch's fake process group

What the host computes by itself is not noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardtrain import device as devices
from shardtrain.engine import capture

import simulated_device
from simulated_device import NO_KERNEL, WAITS, SimulatedDevice, tensors, written

T = TypeVar("T")
Launch = Callable[[], object]
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
NO_STATE = (
    "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need this call to be"
)


class Recorder:
    """What stands for `shardtrain.device.Recorder`."""

    only_capturable = False

    def __init__(self, device: SimulatedDevice) -> None:
        self.sim = device
        self.recordings: list[Recording] = []
        self.replays = 0
        self.is_held = False  # whether there is a graph, for which NCCL would wait as its group ends

    def holds(self, tensor: Tensor) -> bool:
        return self.sim.on_device(tensor)

    def warm_up(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Launch]:
        recording = Recording(self.sim)
        generator = torch.default_generator.get_state()
        try:
            with recording, recording.resizes():
                result = run()
        finally:
            recording.undo()
            torch.default_generator.set_state(generator)
        self.recordings.append(recording)
        self.is_held = True
        return result, partial(self._replay, recording)

    def release(self) -> None:
        self.is_held = False

    def _replay(self, recording: Recording) -> None:
        self.replays += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for launch in recording.launches:
                launch()


@contextmanager
def recorder(device: SimulatedDevice) -> Iterator[Recorder]:
    """Let `shardtrain.capture` record with a `Recorder`, whose own code is nobody's line."""
    made = Recorder(device)
    inside = (*capture._INSIDE, __file__, simulated_device.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "recorder", lambda _: made)
        patch.setattr(capture, "_INSIDE", inside)
        yield made


class Recording(TorchDispatchMode):
    """Note every operation of the device inside."""

    def __init__(self, sim: SimulatedDevice) -> None:
        super().__init__()
        self.sim = sim
        self.launches: list[Launch] = []
        self.names: list[str] = []
        self._known: dict[int, Tensor] = {}  # storages, each by a view that holds it
        self._groups: list[dist.ProcessGroup] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # what was in storages, and a view of each

    def on_device(self, tensor: Tensor) -> bool:
        return self.sim.on_device(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._operation(func, args, kwargs or {})

    def _operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        *_, views = written(func)
        arguments = tensors([args, kwargs])
        is_launch = any(map(self.on_device, arguments)) and not (views or name in NO_KERNEL)
        if is_launch and name in WAITS:
            raise RuntimeError(NOT_PERMITTED)
        for tensor in arguments if is_launch else ():
            self._save(tensor)  # it may be written: the schema of a batch's norm does not say so
        sends = func.namespace == "c10d" and self.sim.is_real
        result = func(*self._sending_nothing(args) if sends else args, **kwargs)
        fresh = [t for t in tensors(result) if all(t is not other for other in arguments)]
        if name in ("copy_", "_to_copy") and len({*map(self.on_device, [*arguments, *fresh])}) > 1:
            raise RuntimeError(f"{NOT_PERMITTED} (a copy between host and device)")
        shared = {tensor.untyped_storage()._cdata for tensor in arguments}
        for tensor in fresh:
            if tensor.untyped_storage()._cdata not in shared:
                self._make(tensor)
        if is_launch or (fresh and not arguments and name not in NO_KERNEL and self.on_device(fresh[0])):
            self.names.append(name)
            own_args, own_kwargs = tree_map(self._held, (tuple(args), kwargs))
            self.launches.append(partial(_launch, func, own_args, own_kwargs, [*map(_view, fresh)]))
        return result

    def _sending_nothing(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments of a collective, with a group that moves nothing: other ranks may not record."""
        groups = [arg for arg in args if "c10d.ProcessGroup" in str(getattr(arg, "_type", str)())]
        real = dist.ProcessGroup.unbox(groups[0])
        made = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(real.rank(), real.size())
        silent = dist.ProcessGroup(FakeStore(), real.rank(), real.size())
        silent._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, made)
        self._groups.append(silent)
        return [silent.boxed() if arg is groups[0] else arg for arg in args]

    def _held(self, value: Any) -> Any:
        """Return a view of a tensor on the device; a copy of one of the host, whose value is taken now."""
        if not isinstance(value, Tensor):
            return value
        return _view(value) if self.on_device(value) else value.clone()

    def _save(self, tensor: Tensor) -> None:
        """Keep what is in the storage of ``tensor``, before it is first written."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._known[storage._cdata] = whole
            self._before.append((whole, whole.clone()))

    def _make(self, tensor: Tensor) -> None:
        """Note a storage that is new."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = _view(tensor)
            self.launches.append(partial(_resize, storage, storage.nbytes()))

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Note what is resized inside, and refuse to read random states."""
        resize = torch.UntypedStorage.resize_

        def refused(device: object = None) -> Any:
            raise RuntimeError(NO_STATE)

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (0,))  # type: ignore[call-overload]
            if self.on_device(view):
                self._known.setdefault(storage._cdata, view)  # what is in it then, no one may read
                self.launches.append(partial(_resize, storage, size))
            return resize(storage, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", noted)
            patch.setattr(torch.cuda, "get_rng_state", refused)
            patch.setattr(torch.cuda, "_initialized", True)  # else `torch.utils.checkpoint` does not ask
            patch.setattr(torch.cuda, "device", lambda index: nullcontext())
            yield

    def undo(self) -> None:
        """Restore what was in memory before."""
        with torch._C.DisableTorchFunction():
            for whole, before in self._before:
                storage = whole.untyped_storage()
                if storage.nbytes() == before.numel():
                    whole.copy_(before)
        self._before = []


def _view(tensor: Tensor) -> Tensor:
    """Return another tensor of the same memory, which it has whatever ``tensor.data`` becomes."""
    own = torch.empty(0, dtype=tensor.dtype)
    return own.set_(  # type: ignore[call-overload]
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _launch(func: Any, args: Any, kwargs: Any, fresh: Sequence[Tensor]) -> None:
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if hasattr(leaf, "wait") and not isinstance(leaf, Tensor):
            leaf.wait()
    known = {id(tensor) for tensor in tensors([args, kwargs])}
    new = [tensor for tensor in tensors(result) if id(tensor) not in known]
    for own, computed in zip(fresh, new, strict=True):
        own.copy_(computed)


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    if storage.nbytes() != size:  # it would move
        storage.resize_(size)
