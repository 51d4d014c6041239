"""Try an optimizer before its first step: is it right on pieces of parameters?

An optimizer must give each piece of a parameter the values that it gives the whole parameter. SGD and Adam
treat every element by itself. One that looks at a parameter's shape (Adafactor, Muon, Shampoo) or norm (LARS,
LAMB) would silently compute something else, unless parameters are whole. One that looks at all parameters
together (LBFGS) always would. A name does not tell. So a new instance with the same options steps on whole
parameters, and others on what one rank of 2 and of 16 would hold of them. Both must get equal values, and
equal state where that has a value per element or is one number.

The parameters are two matrices, and of each group of the model the largest of each number of dimensions,
cropped to `_LARGEST` elements. They step six times, with a spike in the gradients. Then counts of steps are
set to each of `_LATER`, for what begins after a warm-up or comes every so many steps, and two more steps
follow. Hooks of steps that the class registers are part of a step. Gradients of pieces are marked as in
training, for the layout and virtual ranks of the model.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import torch_private
from shardtrain.comm.channel import Channel
from shardtrain.comm.norms import GradientPiece, Owners
from shardtrain.comm.transport import Alone
from shardtrain.engine.optimizers import Tryable
from shardtrain.layout import Piece, Policy, cut_of

Shape = tuple[int, ...]
Group = dict[str, Any]  # of parameters, as in ``optimizer.param_groups``

# Cut inside a row and inside a block of 8-bit states; large enough for optimizers that factor their state.
_SHAPES: tuple[Shape, ...] = ((256, 257), (257, 300))
_LARGEST = 1 << 17
_WORLDS = (2, 16)
_LR = 1.0  # since a warm-up begins at 0, where nothing could be compared
_SCALES = (1.0, -0.3, 0.5, 0.2, 40.0, -0.1)  # of the gradients, by step
# Counts of steps that are divided by many numbers: 1 to 10 and 10,000, all others to 16 and 1,024. As fp32
# they are exact, and so are those before and after.
_LATER = (2**8 * 3**2 * 5**4 * 7, 2**10 * 3 * 5 * 7 * 11 * 13)


class Kind(NamedTuple):
    """Say how an optimizer is made: its class, and its plain attributes, which a constructor may set."""

    cls: type[torch.optim.Optimizer]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Kind:
        """Return the kind of ``optimizer``. Tensors and other objects that are attributes are left out."""
        plain = {}
        for name, value in vars(optimizer).items():
            if value is None or isinstance(value, bool | int | float | str | tuple):
                plain[name] = value
        return cls(type(optimizer), plain)

    def make(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Return a new optimizer; options that are no defaults of groups are set as attributes."""
        made: torch.optim.Optimizer = self.cls(groups)  # type: ignore[call-arg]
        for name in vars(made).keys() & self.attributes.keys():
            setattr(made, name, self.attributes[name])
        return made


class Tried(NamedTuple):
    """Hold what a parameter and its state are after steps. ``numbers``: of its state, and of its group."""

    value: Tensor
    by_element: dict[str, Tensor]
    numbers: dict[str, float]


def refuse_unless_right_on_pieces(optimizer: torch.optim.Optimizer, model: Tryable) -> None:
    """Raise ValueError unless ``optimizer`` treats pieces of ``model``'s parameters like whole ones.

    Warns (UserWarning) of an optimizer that cannot be tried.
    """
    kind = Kind.of(optimizer)
    name = kind.cls.__name__
    for cls in [kind.cls, *_callers()]:
        if any(base.__module__.startswith("torch.distributed.") for base in cls.__mro__):
            raise ValueError(
                f"{cls.__name__} owns, averages or broadcasts whole parameters itself, of which a rank holds "
                "pieces: use the optimizer that it wraps, such as torch.optim.AdamW; its state is sharded "
                "already"
            )
    # The trial needs values, even where the model has none (FakeTensorMode).
    with torch_private.disable_current_modes(), torch.random.fork_rng(devices=[]):
        groups = _groups_to_try(optimizer, model)
        key = _key_of(kind, groups)
        if key in model.passed:
            return
        trial = _Trial(kind, groups).run()
        try:
            expected = [next(trial)]
        except Exception as error:
            warnings.warn(
                f"{name} cannot be tried on pieces of parameters ({type(error).__name__}: {error}). Its "
                "steps are right on a sharded model if each element's update depends on that element alone. "
                "Otherwise leave the parameters whole with shard(..., ignored=...), or use another optimizer",
                stacklevel=2,
            )
            return
        try:
            expected += itertools.takewhile(_are_finite, trial)
        except Exception as error:
            warnings.warn(
                f"{name} was tried on pieces of parameters in its first steps only: later ones cannot be "
                f"imitated ({type(error).__name__}: {error}). They are right on a sharded model if each "
                "element's update depends on that element alone",
                stacklevel=2,
            )
        worlds = _WORLDS[:1] if model.layout == "whole" else _WORLDS
        reasons = (_difference_in_world(kind, groups, expected, model, world) for world in worlds)
        reason = next(filter(None, reasons), "")
    if reason:
        raise ValueError(
            f"{name} cannot step on a sharded model: {reason}. A rank holds pieces of parameters. For an "
            "optimizer that looks at one whole parameter at a time use shard(..., layout='whole'). One that "
            "looks at all parameters together cannot be used: take SGD or AdamW, or leave the parameters "
            "whole with shard(..., ignored=...)"
        )
    model.passed.add(key)


def _callers() -> list[type]:
    """Return the classes of optimizers whose methods are running: one may wrap the optimizer that steps."""
    classes = []
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.optim.Optimizer):
            classes.append(type(caller))
        frame = frame.f_back
    return classes


def _groups_to_try(optimizer: torch.optim.Optimizer, model: Tryable) -> list[Group]:
    """Return a parameter group for each distinct kind of ``optimizer``'s, with values to try."""
    torch.default_generator.manual_seed(0)
    options_by_kind: dict[str, Group] = {}
    largest_by_kind: dict[str, dict[int, Shape]] = {}  # a shape for each number of dimensions
    for group in optimizer.param_groups:
        options = _options_of(group)
        kind = str(options)
        options_by_kind[kind] = options
        largest = largest_by_kind.setdefault(kind, {})
        for param in group["params"]:
            _keep_largest(largest, _cropped(model.shapes.get(param, ())))
    groups = []
    for kind, options in options_by_kind.items():
        shapes = [*_SHAPES, *largest_by_kind[kind].values()]
        values = [torch.randn(shape, device="cpu").to(model.device) for shape in shapes]
        groups.append({**options, "params": values})
    return groups


def _options_of(group: Group) -> Group:
    """Return the options of a parameter group, with the trial's learning rate."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if isinstance(options.get("lr"), float | int):
        options["lr"] = _LR
    return options


def _keep_largest(largest: dict[int, Shape], shape: Shape) -> None:
    """Put ``shape`` into ``largest`` if it has more elements than that with as many dimensions."""
    dims = len(shape)
    most = math.prod(largest[dims]) if dims in largest else 0
    if dims > 0 and math.prod(shape) > most:
        largest[dims] = shape


def _cropped(shape: Shape) -> Shape:
    """Return ``shape`` with at most `_LARGEST` elements: fewer rows, then shorter ones."""
    sizes = list(shape)
    for dim in range(len(sizes)):
        others = math.prod(sizes) // max(sizes[dim], 1)
        if math.prod(sizes) > _LARGEST:
            sizes[dim] = max(1, _LARGEST // max(others, 1))
    return tuple(sizes)


def _key_of(kind: Kind, groups: Sequence[Group]) -> str:
    """Return a text that is equal for trials of the same class, options and shapes."""
    described = []
    for group in groups:
        shapes = [value.shape for value in group["params"]]
        described.append({**group, "params": shapes})
    return str([kind, described])


def _are_finite(results: Sequence[Tried]) -> bool:
    return all(result.value.isfinite().all() for result in results)


def _difference_in_world(
    kind: Kind,
    groups: Sequence[Group],
    expected: Sequence[list[Tried]],
    model: Tryable,
    world: int,
) -> str:
    """Return how steps on one of ``world`` ranks' pieces differ from the ``expected`` values; or nothing."""
    wholes = _values_of(groups)
    intervals = _intervals([whole.numel() for whole in wholes], model.layout, world)
    # A norm of all gradients is then that of this rank's, and is seen to be another.
    alone = Channel(Alone())
    alone.stepping = True
    owners = Owners(weakref.ref(alone), model.device, model.layout == "whole", model.virtual)
    trial = _Trial(kind, _groups_of_pieces(groups, intervals), owners).run()
    try:
        for wanted, results in zip(expected, trial, strict=False):
            for result, whole, initial, interval in zip(results, wanted, wholes, intervals, strict=True):
                if difference := _difference(result, whole, initial, interval):
                    return difference
    except Exception as error:
        # Such as "norm of a gradient would see this rank's piece alone".
        return str(error).partition(":")[0] or type(error).__name__
    return ""


def _intervals(sizes: Sequence[int], layout: Policy, world: int) -> list[Piece]:
    """Return what one of ``world`` ranks holds of parameters of ``sizes``: some of each, or some of them."""
    cut = cut_of(layout, world)
    if layout == "whole":
        return [*cut(sizes, 1).pieces(0)]
    return [cut([size], 1).pieces(world // 2)[0] for size in sizes]


def _groups_of_pieces(groups: Sequence[Group], intervals: Sequence[Piece]) -> list[Group]:
    """Return ``groups`` with each value cut to its interval."""
    following = iter(intervals)
    cut_groups = []
    for group in groups:
        pieces = [_piece(whole, next(following)) for whole in group["params"]]
        cut_groups.append({**group, "params": pieces})
    return cut_groups


def _piece(whole: Tensor, interval: Piece) -> Tensor:
    """Return the ``interval`` of a value, in the shape that a local shard has."""
    piece = _part(whole, interval)
    if piece.numel() == whole.numel():
        return piece.view_as(whole)
    return piece.view(-1, *(1 for _ in whole.shape[1:]))


def _part(whole: Tensor, interval: Piece) -> Tensor:
    """Return the elements of ``whole`` in the ``interval`` (1-D)."""
    return whole.flatten()[interval.start : interval.stop]


def _difference(piece: Tried, whole: Tried, initial: Tensor, interval: Piece) -> str:
    """Return how a ``piece`` after steps differs from its ``interval`` of the ``whole``; or nothing.

    ``initial``: the value of the whole parameter before the steps.
    """
    if interval.start == interval.stop:
        return ""
    for key, number in whole.numbers.items():
        if not _is_same_number(piece.numbers.get(key, math.nan), number):
            return f"its {key!r} depends on what a rank holds"
    largest_update = (whole.value - initial).abs().max()
    if not _is_close(piece.value, _part(whole.value, interval), largest_update):
        return "it gives a piece of a parameter other values than the whole one"
    for key, state in whole.by_element.items():
        piece_state = piece.by_element.get(key)
        if piece_state is None or not _is_close(piece_state, _part(state, interval), state.abs().max()):
            return f"it gives a piece of a parameter another state {key!r} than the whole one"
    return ""


def _is_same_number(number: float, expected: float) -> bool:
    return number == expected or math.isclose(number, expected, rel_tol=1e-3, abs_tol=1e-30)


def _is_close(piece: Tensor, part: Tensor, scale: Tensor) -> bool:
    """Return whether a ``piece`` equals ``part`` (1-D) up to rounding of values as large as ``scale``."""
    rounding = 1e-3 * scale + 1e-6 * part.abs()
    return bool(((piece.flatten() - part).abs() <= rounding).all())


class _Trial:
    """Step an optimizer of ``kind`` on groups of values. ``owners``: marks gradients, unless None."""

    def __init__(self, kind: Kind, groups: Sequence[Group], owners: Owners | None = None) -> None:
        self._kind = kind
        self._groups = groups
        self._values = _values_of(groups)
        self._owners = owners

    def run(self) -> Iterator[list[Tried]]:
        """Yield what parameters and state are before and after the spike, and after steps that come later.

        Before the spike updates are small, so small differences count.
        """
        torch.default_generator.manual_seed(0)
        optimizer = self._optimizer()
        numbers = list[list[dict[str, float]]]()
        for scale in _SCALES:
            if scale == max(_SCALES):
                yield _results_of(optimizer)
            self._step(optimizer, scale)
            numbers.append([_numbers_of(place) for place in _places(optimizer)])
        yield _results_of(optimizer)
        counts = _counts_of(*numbers[-3:])
        for later in _LATER:
            _set_counts(optimizer, counts, later - 1)
            for scale in _SCALES[:2]:
                self._step(optimizer, scale)
            yield _results_of(optimizer)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of copies of the values."""
        groups = []
        for group in self._groups:
            params = [nn.Parameter(value.clone()) for value in group["params"]]
            groups.append({**group, "params": params})
        return self._kind.make(groups)

    def _step(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Make a step, with the hooks of this optimizer, which its class has registered.

        Hooks that torch calls for every optimizer are users'.
        """
        params = _values_of(optimizer.param_groups)
        for number, (param, value) in enumerate(zip(params, self._values, strict=True)):
            if param.numel():  # an empty piece gets no gradient, as in training
                param.grad = self._gradient(number, value, scale)
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):  # see Optimizer.profile_hook_step
            step = step.__wrapped__

        def closure() -> Tensor:
            return torch.zeros(())

        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (optimizer, closure), {})
        step(optimizer, closure)
        for hook in optimizer._optimizer_step_post_hooks.values():
            hook(optimizer, (optimizer, closure), {})

    def _gradient(self, number: int, value: Tensor, scale: float) -> Tensor:
        """Return a gradient of the parameter ``number``, whose initial value is ``value``."""
        grad = scale * value.square() + 0.1
        if self._owners is None:
            return grad
        return GradientPiece.on(grad, self._owners._replace(elements=number))


def _values_of(groups: Sequence[Group]) -> list[Tensor]:
    """Return the parameters of all ``groups``, in their order."""
    values = list[Tensor]()
    for group in groups:
        values += group["params"]
    return values


def _results_of(optimizer: torch.optim.Optimizer) -> list[Tried]:
    """Return copies of what the parameters of ``optimizer`` and their state are."""
    results = []
    for group in optimizer.param_groups:
        options = _numbers_of({key: value for key, value in group.items() if key != "params"})
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            by_element = {}
            for key, value in state.items():
                if _has_elements(value, param):
                    by_element[key] = value.as_subclass(Tensor).clone()
            numbers = _numbers_of({**options, **state})
            results.append(Tried(param.detach().clone(), by_element, numbers))
    return results


def _has_elements(value: Any, param: Tensor) -> bool:
    """Return whether ``value`` has a number for each element of ``param``. Codes of 8 bits are none."""
    return (
        type(value) in (Tensor, GradientPiece)
        and value.shape == param.shape
        and value.is_floating_point()
        and value.itemsize > 1
    )


def _numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return those ``values`` of a group or a state that are one number."""
    return {key: float(value) for key, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) in (Tensor, GradientPiece) and value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _places(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what may hold counts of steps: attributes, groups and the state of each parameter."""
    return [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]


def _counts_of(*numbers: Sequence[dict[str, float]]) -> list[tuple[int, str]]:
    """Return the numbers of places that grew by one in each step: positions of places, and names.

    ``numbers``: of each place, after each of the last steps.
    """
    counts = []
    for position, latest in enumerate(numbers[-1]):
        for name in latest:
            values = [
                of_places[position].get(name, math.nan) for of_places in numbers if position < len(of_places)
            ]
            if len(values) == len(numbers) and all(b - a == 1 for a, b in itertools.pairwise(values)):
                counts.append((position, name))
    return counts


def _set_counts(optimizer: torch.optim.Optimizer, counts: Sequence[tuple[int, str]], count: int) -> None:
    places = _places(optimizer)
    for position, name in counts:
        value = places[position][name]
        if isinstance(value, Tensor):
            value.fill_(count)
        else:
            places[position][name] = type(value)(count)
