"""Memory of tensors that can be given back, because their values can be made again."""

from __future__ import annotations

import weakref
from collections import OrderedDict

from torch import Tensor, UntypedStorage

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
