"""The choice of units: which modules become one, and which parameters each holds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

from torch import nn

from shardtrain.engine.shard import ParamInfo
from shardtrain.engine.unit import Unit

UnitChoice = Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool] | None

_SMALL = 16_384  # elements; a unit below this is not worth a message of its own


def unit_modules(root: nn.Module, units: UnitChoice) -> dict[str, nn.Module]:
    """Return the units' modules by name, root first, outer before inner."""
    if units is None:
        chosen = choose_units(root)
    elif callable(units):
        chosen = {name: m for name, m in root.named_modules() if name and units(name, m)}
    else:
        classes = (units,) if isinstance(units, str) else tuple(units)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise ValueError(f"units must be module classes or a callable, got {classes!r}")
        chosen = {name: m for name, m in root.named_modules() if name and isinstance(m, classes)}
        absent = [c.__name__ for c in classes if not any(isinstance(m, c) for m in chosen.values())]
        if absent:
            raise ValueError(f"units names {', '.join(absent)}, but the model has no such module")
    for name, module in chosen.items():
        check_forward(name, module)
    return {"": root, **chosen}


def infos_by_unit(
    root: nn.Module, anchors: Mapping[str, nn.Module], ignored: set[nn.Parameter]
) -> dict[str, list[ParamInfo]]:
    """Return each parameter under the innermost unit that holds all of its uses.

    A weight tied between ``enc.0`` and ``enc.1`` belongs to the unit ``enc`` if there is one, else to the
    root: it is then whole while either runs, and gathered and reduced once. A module reachable by two names
    is one module, and its parameters stay with it.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    units = {module: name for name, module in anchors.items()}
    names: dict[nn.Parameter, str] = {}
    holders: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    homes: dict[nn.Parameter, set[str]] = {}
    for module_name, module in modules.items():
        home = _innermost(module_name, modules, units)
        for attribute, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            names.setdefault(param, f"{module_name}.{attribute}" if module_name else attribute)
            holders.setdefault(param, {})[module, attribute] = None
            homes.setdefault(param, set()).add(home)
    infos: dict[str, list[ParamInfo]] = {name: [] for name in anchors}
    for param, used_in in homes.items():
        home = _innermost(_common_ancestor(used_in), modules, units)
        infos[home].append(ParamInfo(names[param], tuple(holders[param])))
    return {name: members for name, members in infos.items() if members or name == ""}


def _common_ancestor(names: set[str]) -> str:
    """Return ``a.b`` for ``a.b.c`` and ``a.b.d``."""
    steps = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))


def _innermost(name: str, modules: Mapping[str, nn.Module], units: Mapping[nn.Module, str]) -> str:
    """Return the unit that the module called ``name`` is, or lies in."""
    while modules[name] not in units:
        name = name.rpartition(".")[0]
    return units[modules[name]]


def choose_units(root: nn.Module) -> dict[str, nn.Module]:
    """Choose units: walk down from the root and stop at the first real block.

    A block is what a model's author wrote a class with a ``forward`` for, and repeated. So a module becomes a
    unit unless it is

    - a container (``Sequential``, ``ModuleList``, ``ModuleDict``, or anything without a ``forward``): its
      children are looked at;
    - more than half of the model (an "encoder" that is nearly everything): its children are looked at, but
      not those of ``nn.MultiheadAttention``, which reads its children's weights without calling them;
    - a single layer whose parameters a module around it reads (``F.linear(x, self.embedding.weight)``): it
      stays with that module;
    - small, at most 16,384 elements or 1/64 of the model, whichever is less: it stays with the root,
      which is whole during the entire step. A message costs as much as moving some 10,000 elements.

    That gives one unit per residual block of a ResNet or RegNet, per inverted residual of a MobileNet or
    EfficientNet, per encoder block of a ViT or Swin, per layer of a DenseNet, per mixed block of an
    Inception, per auxiliary head, and one for a classifier; a VGG, which has no blocks, is cut into its
    convolutions. Stem and norms stay with the root.
    """
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in root.named_modules()}
    total = sizes[""]
    small = min(_SMALL, total // 64)
    chosen: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module, around: tuple[nn.Module, ...] = ()) -> None:
        if sizes[name] == 0 or sizes[name] <= small:
            return
        if next(module.children(), None) is None and _is_read(name, module, around):
            return
        whole = isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None
        too_large = 2 * sizes[name] > total and not whole
        if name and not too_large and not _is_container(module):
            chosen[name] = module
            return
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if full_name in sizes:  # a module reachable by two names is listed under its first
                visit(full_name, child, (*around, module))

    visit("", root)
    return chosen


def _is_read(name: str, layer: nn.Module, around: Iterable[nn.Module]) -> bool:
    """Return whether code of a module ``around`` reads a parameter of its ``layer``, other than to set it up.

    That is code that mentions both names, as ``self.embedding.weight`` does.
    """
    attribute = name.rpartition(".")[2]
    for module in around:
        for method in vars(type(module)).values():
            code = getattr(method, "__code__", None)
            mentioned = code.co_names if code is not None and "init" not in code.co_name else ()
            if attribute in mentioned and not layer._parameters.keys().isdisjoint(mentioned):
                return True
    return False


def note_pieces(error: BaseException | None, units: Iterable[Unit]) -> None:
    """Add to ``error`` which parameters the code that raised it reads, though they show pieces there."""
    infos = [(info, unit) for unit in units for s in unit.segments if not s.shows_full for info in s.infos]
    for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None):
        names = frame.f_code.co_names
        around = frame.f_locals.get("self")
        if not isinstance(around, nn.Module) or error is None:
            continue
        for info, unit in infos:
            *_, layer, attribute = ("", *info.name.split("."))
            if attribute in names and (layer in names or around is info.holder):
                note = (
                    f"{info.name} is this rank's piece while {unit.title} does not run, and the forward of "
                    f"{type(around).__name__} reads it: choose units so that they are in one, "
                    "shard(units=...), or read it inside shardtrain.unsharded(model)"
                )
                error.args = (f"{error}. {note}",)
                return


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not _has_forward(module)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def check_forward(name: str, module: nn.Module) -> None:
    """Refuse a module that is never called itself."""
    if not _has_forward(module):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which has no forward of its own, so nothing tells when "
            "its parameters are needed; shard the module that calls it, or its children"
        )


def parameters_of(items: Iterable[nn.Module | nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters that ``ignored`` names."""
    return {p for item in items for p in (item.parameters() if isinstance(item, nn.Module) else [item])}
