"""The choice of units: which modules become one, and which parameters each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from shardtrain import torch_private
from shardtrain.device import unit_bytes_on
from shardtrain.engine.segment import ParamInfo, plain_name
from shardtrain.engine.unit import UnitOptions

UnitChoice = (
    Iterable[type[nn.Module]]
    | Callable[[str, nn.Module], bool]
    | Mapping[nn.Module, UnitOptions]
    | Literal["blocks"]
    | None
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SMALL = 1 << 16  # bytes; smaller units are not worth collectives of their own
_TINY = 2 << 20  # bytes of a model that is not worth several


class Choice(NamedTuple):
    """A unit that is to be made: its modules by name, the first one's first, and its parameters."""

    modules: dict[str, nn.Module]
    infos: list[ParamInfo]
    options: UnitOptions

    @property
    def name(self) -> str:
        """The module's name, or of several neighbours such as ``layers.0 to 3``."""
        first, *others = self.modules
        if not others:
            return first
        return f"{first} to {others[-1].removeprefix(_place(first) + '.')}"

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters in the dtypes in which they are gathered."""
        total = 0
        for info in self.infos:
            dtype = self.options.precision.of_parameter(info.parameter, info.holder)
            total += info.parameter.numel() * dtype.itemsize
        return total


def unit_modules(
    root: nn.Module, units: UnitChoice, conditional: Sequence[nn.Module] = ()
) -> dict[str, nn.Module]:
    """Return the units' modules by name, root first, outer before inner. Raises ValueError for wrong ones."""
    if units is None or units == "blocks":
        chosen = choose_units(root, every_block=units is not None)
    elif isinstance(units, Mapping) and all(isinstance(each, UnitOptions) for each in units.values()):
        _named(root, [module for module in units if module is not root], "units")
        chosen = {name: m for name, m in root.named_modules() if name and m in units}
    elif callable(units) and not isinstance(units, type):
        chosen = {name: m for name, m in root.named_modules() if name and units(name, m)}
    else:
        classes: tuple[Any, ...] = (units,)
        if isinstance(units, Iterable) and not isinstance(units, type | str):
            classes = tuple(units)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            expected = "module classes, a callable, a dict of UnitOptions or 'blocks'"
            raise ValueError(f"units must be {expected}, got {classes!r}")
        chosen = _instances(root, classes)
    skipped: dict[nn.Module, str] = {}
    for name, module in _named(root, conditional, "conditional").items():
        skipped.update(dict.fromkeys(module.modules(), name))
    both = [name for name, m in chosen.items() if m in skipped]
    if both and isinstance(units, Mapping):
        raise ValueError(f"{both[0]} is a unit in units=, but inside conditional={skipped[chosen[both[0]]]}")
    anchors = {"": root, **{name: m for name, m in chosen.items() if m not in skipped}}
    for name, module in anchors.items():
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{name or 'the root'} is a {type(module).__name__}, which has no forward of its own, so "
                "nothing tells when its parameters are needed; shard the module that calls it, or its "
                "children"
            )
    return anchors


def _instances(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Return modules of ``classes`` by name. Raises ValueError for a class of which there is none."""
    chosen = {name: module for name, module in root.named_modules() if name and isinstance(module, classes)}
    missing = []
    for kind in classes:
        if not any(isinstance(module, kind) for module in chosen.values()):
            missing.append(kind.__name__)
    if missing:
        raise ValueError(f"units names {', '.join(missing)}, but the model has no such module")
    return chosen


def _named(root: nn.Module, modules: Sequence[nn.Module], argument: str) -> dict[str, nn.Module]:
    """Return ``modules`` by name. Raises ValueError, naming ``argument``, unless all are inside ``root``."""
    names = {module: name for name, module in root.named_modules() if name}
    if foreign := [type(module).__name__ for module in modules if module not in names]:
        raise ValueError(f"{argument}={foreign[0]}: expected modules inside the one that is sharded")
    return {names[module]: module for module in modules}


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of ``module`` by name, of which ``shard(units="blocks")`` makes units.

    What runs inside blocks is changed before `shard`, as by ``block.compile()`` or activation checkpointing.
    """
    return choose_units(module, every_block=True)


def infos_by_unit(
    root: nn.Module, anchors: Mapping[str, nn.Module], ignored: set[nn.Parameter]
) -> dict[str, list[ParamInfo]]:
    """Return the parameters of each unit: a parameter belongs to the innermost unit of all its uses.

    A weight tied between ``enc.0`` and ``enc.1`` belongs to the unit ``enc`` if there is one, else to the
    root. So it is gathered while either runs, and gathered and reduced once. A module reachable by two names
    is one module, and its parameters stay with it.
    """
    units = {module: name for name, module in anchors.items()}
    innermost: dict[str, str] = {}  # the unit that is, or contains, each module, by the module's name
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in root.named_modules(remove_duplicate=False):  # outer before inner
        outer = innermost.get(module_name.rpartition(".")[0], "")
        innermost[module_name] = units.get(module, outer)
        for attribute, param in module._parameters.items():
            if param is not None and param not in ignored:
                uses.setdefault(param, []).append((module_name, module, attribute))
    infos: dict[str, list[ParamInfo]] = {name: [] for name in anchors}
    for used in uses.values():
        homes = [innermost[module_name] for module_name, _, _ in used]
        home = homes[0]
        while home and not all(f"{other}.".startswith(f"{home}.") for other in homes):
            home = innermost[home.rpartition(".")[0]]
        names: dict[tuple[nn.Module, str], str] = {}
        for module_name, module, attribute in used:
            names.setdefault((module, attribute), plain_name(f"{module_name}.{attribute}".removeprefix(".")))
        infos[home].append(ParamInfo(next(iter(names.values())), tuple(names), tuple(names.values())))
    return {name: members for name, members in infos.items() if members or name == ""}


def most_bytes(unit_bytes: int | None, units: UnitChoice, devices: Iterable[torch.device]) -> int:
    """Return the bytes up to which neighbours become one unit. Raises ValueError for wrong ``unit_bytes``."""
    if unit_bytes is None:
        chooses = units is None or units == "blocks"
        return max([unit_bytes_on(device) for device in devices], default=0) if chooses else 0
    if not isinstance(unit_bytes, int) or unit_bytes < 0:
        raise ValueError(f"unit_bytes={unit_bytes!r}: expected a number of bytes, 0 to join none, or None")
    return unit_bytes


def joined(root: nn.Module, choices: Iterable[Choice], most: int) -> list[Choice]:
    """Join neighbours among ``choices``, the root's first, into units of at most ``most`` bytes.

    Neighbours are successive units in one container, of one class, with equal options. A container's
    modules are mostly called in a row, so that the unit is gathered once for all of them. It is right if they
    are not, only slow: it is gathered for each call.
    """
    units = list[Choice]()
    size = 0
    for choice in choices:
        own_size = choice.gathered_bytes
        if units and size + own_size <= most and _are_neighbours(root, units[-1], choice):
            units[-1].modules.update(choice.modules)
            units[-1].infos.extend(choice.infos)
            size += own_size
        else:
            units.append(choice._replace(modules=dict(choice.modules), infos=list(choice.infos)))
            size = own_size
    return units


def _are_neighbours(root: nn.Module, unit: Choice, choice: Choice) -> bool:
    """Return whether ``choice``, the next one, stands in a row with the last module of ``unit``."""
    last_name = next(reversed(unit.modules))
    name = next(iter(choice.modules))
    place = _place(name)
    if "" in (last_name, name) or place != _place(last_name) or unit.options != choice.options:
        return False
    if not isinstance(root.get_submodule(place), _CONTAINERS):
        return False
    return type(unit.modules[last_name]) is type(choice.modules[name])


def _place(name: str) -> str:
    """Return the name of the container in which the module ``name`` stands, wrapped or not."""
    return name.removesuffix("._checkpoint_wrapped_module").rpartition(".")[0]


def choose_units(root: nn.Module, every_block: bool = False) -> dict[str, nn.Module]:
    """Choose units: descend from the root, and stop at the first module that is a block.

    A module is a block, and becomes a unit, unless it is

    - a container (``Sequential``, or a module without ``forward``): its children are considered;
    - more than half of the model (an "encoder" that is nearly everything): its children are considered, but
      not those of ``nn.MultiheadAttention``, which reads its children's weights without calling them;
    - a single layer other than a linear one or a convolution: it belongs to the unit around it. Models use
      weights of embeddings elsewhere (``F.linear(x, self.embedding.weight)``);
    - small, at most 64 KiB: it belongs to the root, which is gathered during the entire step. So does all of
      a model of at most 2 MiB. A unit costs 0.2 to 1 ms per step, in which 1 MiB is copied several times.
      With ``every_block`` it is at most 1/64 of the model, too, whatever the model's size.

    This gives one unit per residual block of a ResNet, per encoder block of a ViT or Swin, per layer of a
    DenseNet, per auxiliary head, and per classifier. In a VGG, which has no blocks, each convolution is a
    unit. Stem and norms belong to the root.
    """
    sizes: dict[str, int] = {}
    for name, module in root.named_modules():
        sizes[name] = sum(param.nbytes for param in module.parameters())
    small = _SMALL if sizes[""] > _TINY else sizes[""]
    if every_block:
        small = min(_SMALL, sizes[""] // 64)
    chosen: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        layer = next(module.children(), None) is None
        if sizes[name] <= small or (layer and not isinstance(module, (nn.Linear, torch_private.ConvNd))):
            return
        divisible = not (layer or isinstance(module, nn.MultiheadAttention))
        container = isinstance(module, _CONTAINERS) or type(module).forward is nn.Module.forward
        if name and not container and not (divisible and 2 * sizes[name] > sizes[""]):
            chosen[name] = module
            return
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if full_name in sizes:  # a module reachable by two names is listed under its first
                visit(full_name, child)

    visit("", root)
    return chosen
