"""Try an optimizer before its first step: is it right on pieces of parameters?

An optimizer must give each piece of a parameter the values that it gives the whole parameter. SGD and Adam
treat every element by itself. One that looks at a parameter's shape (Adafactor, Muon, Shampoo) or norm (LARS,
LAMB) would silently compute something else, unless parameters are whole. One that looks at all parameters
together (LBFGS) always would. A name does not tell. So a new instance with the same options steps on whole
parameters, and others on what one rank of 2 and of 16 would hold of them. What both have must be equal:
values, and of their state what has a value per element or is one number.

The parameters are two matrices, and of each group of the model the largest of each number of dimensions,
cropped to `_LARGEST` elements. They step `_STEPS` times, with a spike in the gradients. Then counts of steps
are set to `_LATER`, for what begins after a warm-up, and two more steps follow. Gradients of pieces are
marked as in training, for the layout and virtual ranks of the model.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
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

# Cut inside a row and inside a block of 8-bit states; large enough for optimizers that factor their state.
_SHAPES: tuple[Shape, ...] = ((256, 257), (257, 300))
_LARGEST = 1 << 17
_WORLDS = (2, 16)
_LR = 1.0  # since a warm-up begins at 0, where nothing could be compared
_SCALES = (1.0, -0.3, 0.5, 0.2, 40.0, -0.1)  # of the gradients, by step
_STEPS = len(_SCALES)
_LATER = 100_000


class Tried(NamedTuple):
    """Hold what a parameter and its state are after steps. ``numbers``: of its state, and of its group."""

    value: Tensor
    by_element: dict[str, Tensor]
    numbers: dict[str, float]


def refuse_unless_right_on_pieces(optimizer: torch.optim.Optimizer, model: Tryable) -> None:
    """Raise ValueError unless ``optimizer`` treats pieces of ``model``'s parameters like whole ones.

    Warns (UserWarning) of an optimizer that cannot be tried.
    """
    name = type(optimizer).__name__
    if any(kind.__module__.startswith("torch.distributed.") for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{name} owns, averages or broadcasts whole parameters itself, of which a rank holds pieces: "
            "use the optimizer that it wraps, such as torch.optim.AdamW; its state is sharded already"
        )
    # The trial needs values, even where the model has none (FakeTensorMode).
    with torch_private.disable_current_modes(), torch.random.fork_rng(devices=[]):
        kinds = _kinds(optimizer, model)
        key = str(
            [type(optimizer), [{**kind, "params": [p.shape for p in kind["params"]]} for kind in kinds]]
        )
        if key in model.passed:
            return
        whole = _Trial(type(optimizer), kinds).run()
        try:
            expected = [next(whole)]
        except Exception as error:
            warnings.warn(
                f"{name} cannot be tried on pieces of parameters ({type(error).__name__}: {error}). Its "
                "steps are right on a sharded model if each element's update depends on that element alone. "
                "Otherwise leave the parameters whole with shard(..., ignored=...), or use another optimizer",
                stacklevel=2,
            )
            return
        with contextlib.suppress(Exception):  # it may not bear other counts
            expected += [each for each in whole if all(tried.value.isfinite().all() for tried in each)]
        worlds = _WORLDS[:1] if model.layout == "whole" else _WORLDS
        reasons = (_why_not(type(optimizer), kinds, expected, model, world) for world in worlds)
        reason = next(filter(None, reasons), "")
    if reason:
        raise ValueError(
            f"{name} cannot step on a sharded model: {reason}. A rank holds pieces of parameters. For an "
            "optimizer that looks at one whole parameter at a time use shard(..., layout='whole'). One that "
            "looks at all parameters together cannot be used: take SGD or AdamW, or leave the parameters "
            "whole with shard(..., ignored=...)"
        )
    model.passed.add(key)


def _kinds(optimizer: torch.optim.Optimizer, model: Tryable) -> list[dict[str, Any]]:
    """Return a parameter group for each distinct kind of ``optimizer``'s, with values to try."""
    torch.default_generator.manual_seed(0)
    kinds: dict[str, dict[str, Any]] = {}
    shapes: dict[str, dict[int, Shape]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(options.get("lr"), float | int):
            options["lr"] = _LR
        kinds[str(options)] = options
        largest = shapes.setdefault(str(options), {})
        for param in group["params"]:
            shape = _cropped(model.shapes.get(param, ()))
            if math.prod(shape) > math.prod(largest.get(len(shape), (0,))) and len(shape) > 0:
                largest[len(shape)] = shape
    for kind, options in kinds.items():
        wanted = [*_SHAPES, *shapes[kind].values()]
        options["params"] = [torch.randn(shape, device="cpu").to(model.device) for shape in wanted]
    return [*kinds.values()]


def _cropped(shape: Shape) -> Shape:
    """Return ``shape`` with at most `_LARGEST` elements: fewer rows, then shorter ones."""
    sizes = list(shape)
    for dim in range(len(sizes)):
        others = math.prod(sizes) // max(sizes[dim], 1)
        if math.prod(sizes) > _LARGEST:
            sizes[dim] = max(1, _LARGEST // max(others, 1))
    return tuple(sizes)


def _why_not(
    kind: type[torch.optim.Optimizer],
    kinds: Sequence[dict[str, Any]],
    expected: Sequence[list[Tried]],
    model: Tryable,
    world: int,
) -> str:
    """Return how steps on one of ``world`` ranks' pieces differ from the ``expected`` values; or nothing."""
    wholes = [value for group in kinds for value in group["params"]]
    intervals = _intervals([whole.numel() for whole in wholes], model.layout, world)
    rows = iter(zip(wholes, intervals, strict=True))
    pieces = [{**group, "params": [_piece(*next(rows)) for _ in group["params"]]} for group in kinds]
    # A norm of all gradients is then that of this rank's, and is seen to be another.
    alone = Channel(Alone())
    alone.stepping = True
    owners = Owners(weakref.ref(alone), model.device, model.layout == "whole", model.virtual)
    try:
        for wanted, results in zip(expected, _Trial(kind, pieces, owners).run(), strict=False):
            if reason := _difference(results, wanted, wholes, intervals):
                return reason
    except Exception as error:
        return str(error).partition(":")[0]  # such as "norm of a gradient would see this rank's piece alone"
    return ""


def _intervals(sizes: Sequence[int], layout: Policy, world: int) -> list[Piece]:
    """Return what one of ``world`` ranks holds of parameters of ``sizes``: some of each, or some of them."""
    cut = cut_of(layout, world)
    if layout == "whole":
        return [*cut(sizes, 1).pieces(0)]
    return [cut([size], 1).pieces(world // 2)[0] for size in sizes]


def _piece(whole: Tensor, interval: Piece) -> Tensor:
    part = whole.flatten()[interval.start : interval.stop]
    if part.numel() == whole.numel():
        return part.view_as(whole)
    return part.view(-1, *(1 for _ in whole.shape[1:]))


def _difference(
    results: list[Tried], wanted: list[Tried], wholes: Sequence[Tensor], intervals: Sequence[Piece]
) -> str:
    """Return how the ``results`` of pieces differ from what is ``wanted``; an empty text if they do not."""
    for result, expected, before, (start, stop, _) in zip(results, wanted, wholes, intervals, strict=True):
        if start == stop:
            continue
        for key, number in expected.numbers.items():
            ours_too = result.numbers.get(key, math.nan)
            if ours_too != number and not math.isclose(ours_too, number, rel_tol=1e-3, abs_tol=1e-30):
                return f"its {key!r} depends on what a rank holds"
        moved = (expected.value - before).abs().max()
        if not _is_close(result.value, expected.value, start, stop, moved):
            return "it gives a piece of a parameter other values than the whole one"
        for key, value in expected.by_element.items():
            ours = result.by_element.get(key)
            if ours is None or not _is_close(ours, value, start, stop, value.abs().max()):
                return f"it gives a piece of a parameter another state {key!r} than the whole one"
    return ""


def _is_close(piece: Tensor, whole: Tensor, start: int, stop: int, scale: Tensor) -> bool:
    part = whole.flatten()[start:stop]
    rounding = 1e-3 * scale + 1e-6 * part.abs()
    return bool(((piece.flatten() - part).abs() <= rounding).all())


class _Trial:
    """Step an optimizer of class ``kind`` on groups of values. ``owners``: marks gradients, unless None."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        owners: Owners | None = None,
    ) -> None:
        self._kind = kind
        self._groups = groups
        self._values = [value for group in groups for value in group["params"]]
        self._owners = owners

    def run(self) -> Iterator[list[Tried]]:
        """Yield what parameters and state are after the first steps, and after those that come later."""
        torch.default_generator.manual_seed(0)
        params = [[nn.Parameter(value.clone()) for value in group["params"]] for group in self._groups]
        options = [{**group, "params": own} for group, own in zip(self._groups, params, strict=True)]
        optimizer = self._kind(options)  # type: ignore[call-arg]
        before = [dict(group) for group in optimizer.param_groups]
        for scale in _SCALES:
            self._step(optimizer, scale)
        yield _tried(optimizer)
        _skip_steps(optimizer, before)
        for scale in _SCALES[:2]:
            self._step(optimizer, scale)
        yield _tried(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Make a step without the hooks that torch calls for every optimizer, which are users'."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, (param, value) in enumerate(zip(params, self._values, strict=True)):
            if param.numel():  # an empty piece gets no gradient, as in training
                grad = scale * value.square() + 0.1
                owners = self._owners and self._owners._replace(elements=number)
                param.grad = GradientPiece.of(grad, owners) if owners else grad
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # see Optimizer.profile_hook_step
        step(optimizer, lambda: torch.zeros(()))


def _tried(optimizer: torch.optim.Optimizer) -> list[Tried]:
    """Return what the parameters of ``optimizer`` and their state are now."""
    results = []
    for group in optimizer.param_groups:
        shared = {key: value for key, value in group.items() if key != "params" and _is_number(value)}
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            by_element = {
                k: v.as_subclass(Tensor).clone() for k, v in state.items() if _has_elements(v, param)
            }
            numbers = {k: float(v) for k, v in {**shared, **state}.items() if _is_number(v)}
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


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) in (Tensor, GradientPiece) and value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _skip_steps(optimizer: torch.optim.Optimizer, before: Sequence[dict[str, Any]]) -> None:
    """Set counts of steps to `_LATER`, in state and in groups. Options that were so ``before`` are none."""
    states: list[tuple[dict[str, Any], dict[str, Any]]] = [(state, {}) for state in optimizer.state.values()]
    for values, initial in [*states, *zip(optimizer.param_groups, before, strict=True)]:
        for key, value in values.items():
            counts = key != "params" and _is_number(value) and float(value) == _STEPS
            if counts and not (key in initial and float(initial[key]) == _STEPS):
                values[key] = torch.full_like(value, _LATER) if isinstance(value, Tensor) else _LATER
