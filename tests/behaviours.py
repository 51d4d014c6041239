"""What a model may throw at a sharding wrapper: a probe for each behaviour, of shardtrain and of FSDP2.

    python tests/behaviours.py > BEHAVIOURS.md

writes the table. Every probe runs on two ranks in processes of its own, since some hang and some end the
process; it compares with a replica whose gradients are averaged by hand. `test_behaviours.py` runs the
probes of shardtrain with the other tests.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardtrain

from small import Block, OddNet, average_gradients, images, sgd

LIMIT_S = 12.0
WORLD = 2


class Net(OddNet):
    """Without the 0-dim parameter, which has a probe of its own."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor([1.5]))


class Shardtrain:
    """The wrapper of this package, as a probe sees it."""

    full = staticmethod(shardtrain.full_state_dict)
    load = staticmethod(shardtrain.load_full_state_dict)
    no_sync = staticmethod(shardtrain.no_sync)
    clip = staticmethod(shardtrain.clip_grad_norm_)

    def shard(self, model: nn.Module, *units: type[nn.Module], **options: Any) -> nn.Module:
        transport = os.environ.get("SHARDTRAIN_TEST_TRANSPORT", "auto")
        return shardtrain.shard(model, units=units, transport=transport, **options)

    def half(self, model: nn.Module, *units: type[nn.Module]) -> nn.Module:
        return self.shard(model, *units, precision=shardtrain.Precision(param=torch.bfloat16))

    def whole(self, model: nn.Module, *units: type[nn.Module]) -> nn.Module:
        return self.shard(model, *units, layout="whole")

    def from_meta(self, build: Callable[[], nn.Module], *units: type[nn.Module]) -> nn.Module:
        return self.shard(shardtrain.deferred(build), *units)


class FSDP2:
    """torch's ``fully_shard``, used as its documentation says."""

    def shard(
        self, model: nn.Module, *units: type[nn.Module], ignored: Any = (), **options: Any
    ) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        skipped = {p for m in ignored for p in m.parameters()}
        for module in [m for m in model.modules() if isinstance(m, units)]:
            fully_shard(module, mesh=mesh, ignored_params=skipped, **options)
        return fully_shard(model, mesh=mesh, ignored_params=skipped, **options)

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    def load(self, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), norm).full_tensor()

    def half(self, model: nn.Module, *units: type[nn.Module]) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return self.shard(model, *units, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    def whole(self, model: nn.Module, *units: type[nn.Module]) -> nn.Module:
        return self.shard(model, *units)  # it has one way to cut

    def from_meta(self, build: Callable[[], nn.Module], *units: type[nn.Module]) -> nn.Module:
        with torch.device("meta"):
            model = build()
        self.shard(model, *units).to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model


Api = Shardtrain | FSDP2


def same(api: Api, model: nn.Module, replica: nn.Module) -> None:
    whole = api.full(model)
    for name, param in replica.named_parameters():
        assert whole[name].shape == param.shape, f"{name} has another shape"
        torch.testing.assert_close(
            whole[name], param.detach(), rtol=1e-4, atol=1e-5, msg=f"{name} differs from the replica's"
        )


Loss = Callable[[nn.Module, int], torch.Tensor]


def classify(model: nn.Module, step: int) -> torch.Tensor:
    x, y = images(step)
    return F.cross_entropy(model(x), y)


def step_both(
    model: nn.Module,
    replica: nn.Module,
    loss: Loss = classify,
    steps: int = 3,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    for net in (model, replica):
        optimizer = make(net)
        for step in range(steps):
            optimizer.zero_grad()
            loss(net, step).backward()
            if net is replica:
                average_gradients(net)
            optimizer.step()


def pair(api: Api, make: Callable[[], nn.Module] = Net, *units: type[nn.Module], whole: bool = False) -> Any:
    torch.manual_seed(0)
    replica = make()
    return (api.whole if whole else api.shard)(copy.deepcopy(replica), *(units or (Block,))), replica


class Line(nn.Module):
    """Linear layers, each a unit, run in an order of the caller's."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if order is None else order:
            x = self.layers[index](x)
        return x


def squares(net: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
    return net(torch.randn(4, 7, generator=generator)).square().mean()


def like_a_replica(
    make: Callable[[], nn.Module] = Net, *units: type[nn.Module], loss: Loss = classify
) -> Callable[[Api], None]:
    """Return the probe that trains the model on both sides, with ``loss``."""

    def probe(api: Api) -> None:
        model, replica = pair(api, make, *units)
        step_both(model, replica, loss)
        same(api, model, replica)

    return probe


def optimizer_before(api: Api) -> None:
    torch.manual_seed(0)
    model = Net()
    replica, early = copy.deepcopy(model), sgd(model)
    step_both(api.shard(model, Block), replica, make=lambda net: early if net is model else sgd(net))
    same(api, model, replica)


def divergent_weights(api: Api) -> None:
    torch.manual_seed(dist.get_rank())
    model = api.shard(Net(), Block)
    torch.manual_seed(0)
    same(api, model, Net())


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7, bias=False), nn.ReLU(), nn.Linear(7, 6, bias=False))


def from_the_meta_device(api: Api) -> None:
    torch.manual_seed(0)
    model = api.from_meta(two_layers, nn.Linear)
    torch.manual_seed(0)
    replica = two_layers()
    step_both(model, replica, squares)
    same(api, model, replica)


def with_optimizer(name: str, whole: bool = False, **options: Any) -> Callable[[Api], None]:
    def probe(api: Api) -> None:
        model, replica = pair(api, two_layers, nn.Linear, whole=whole)

        def make(net: nn.Module) -> torch.optim.Optimizer:
            optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
            if name == "LBFGS":
                step = optimizer.step
                optimizer.step = lambda: step(lambda: torch.zeros(()))  # type: ignore[method-assign]
            return optimizer

        step_both(model, replica, squares, make=make)
        same(api, model, replica)

    return probe


def inference_then_training(api: Api) -> None:
    model, replica = pair(api)
    for without_gradients in (torch.inference_mode, torch.no_grad):
        with without_gradients():
            model.eval()(images(0)[0])
        step_both(model.train(), replica)
    same(api, model, replica)


def gradient_penalty(net: nn.Module, step: int) -> torch.Tensor:
    x = torch.ones(4, 7, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    return grad.square().sum()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if dist.get_rank() == 0 else self.a(x)


class Idle(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [self.left(x), self.right(x)]


def one_head(net: nn.Module, step: int) -> torch.Tensor:
    return net(torch.ones(2, 7))[min(dist.get_rank(), 1)].square().mean()


def batch_norm_saves(api: Api) -> None:
    model, replica = pair(api)
    step_both(model, replica)
    mean = api.full(model)["blocks.0.norm.running_mean"]
    means = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean.contiguous())
    assert torch.equal(means[0], means[1]), "what is saved depends on the rank"


def after_an_exception(where: str) -> Callable[[Api], None]:
    def probe(api: Api) -> None:
        def boom(*_: Any) -> None:
            raise KeyError

        model, replica = pair(api)
        target = model.blocks[0].norm
        register = target.register_forward_hook if where == "forward" else target.register_full_backward_hook
        handle = register(boom)
        with contextlib.suppress(KeyError):
            classify(model, 9).backward()
        handle.remove()
        step_both(model, replica)
        same(api, model, replica)

    return probe


def zero_grad_while_accumulating(api: Api) -> None:
    model, replica = pair(api)
    for net in (model, replica):
        optimizer = sgd(net)
        with api.no_sync(model):
            classify(net, 0).backward()
        optimizer.zero_grad()
        classify(net, 1).backward()
        if net is replica:
            average_gradients(net)
        optimizer.step()
    same(api, model, replica)


def attached_later(api: Api) -> None:
    model, replica = pair(api)
    torch.manual_seed(1)
    model.fc = nn.Linear(7, 5)
    replica.fc = copy.deepcopy(model.fc)
    step_both(model, replica)
    same(api, model, replica)


def bad_state(damage: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Api], None]:
    def probe(api: Api) -> None:
        model, replica = pair(api)
        torch.manual_seed(3)
        state = Net().state_dict()
        damage(state)
        try:
            api.load(model, state)
        except Exception as error:
            same(api, model, replica)
            raise error
        raise AssertionError("it was loaded without a word")

    return probe


def ema_copy(api: Api) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, replica = pair(api)
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for net in (model, replica)]
    step_both(model, replica)
    for average, net in zip(averages, (model, replica), strict=True):
        average.update_parameters(net)
    same(api, averages[0].module, averages[1].module)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(x)))


def hooks_fire_once(api: Api) -> None:
    model, _ = pair(api)
    seen: list[torch.Size] = []
    model.fc.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    classify(model, 0).backward()
    assert seen == [True], f"fired {len(seen)} times, with a gradient {sum(seen)} times"


def optimizer_in_backward(api: Api) -> None:
    model, replica = pair(api)
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.05)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    plain = torch.optim.SGD(replica.parameters(), 0.05)
    for number in range(3):
        classify(model, number).backward()
        classify(replica, number).backward()
        average_gradients(replica)
        plain.step()
        plain.zero_grad()
    same(api, model, replica)


def clips_a_mixture(api: Api) -> None:
    torch.manual_seed(0)
    replica = Net()
    model = copy.deepcopy(replica)
    model = api.shard(model, Block, ignored=[model.fc])
    for net in (model, replica):
        x, y = images(0, rank=0)  # the same on all ranks: nothing reduces what is ignored
        F.cross_entropy(net(x), y).backward()
    expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
    torch.testing.assert_close(api.clip(model, 0.1), expected, msg="another norm than the replica's")


def used_outside(api: Api) -> None:
    class Outside(Line):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(super().forward(x), self.layers[0].weight)

    model, replica = pair(api, Outside, nn.Linear)
    step_both(model, replica, squares)
    same(api, model, replica)


def bf16_with_batch_norm(api: Api) -> None:
    torch.manual_seed(0)
    model = api.half(Net(), Block)
    optimizer = sgd(model)
    first = classify(model, 0)
    for _ in range(6):
        optimizer.zero_grad()
        loss = classify(model, 0)
        loss.backward()
        optimizer.step()
    assert loss < first, "the loss does not fall"


def another_order(net: nn.Module, step: int) -> torch.Tensor:
    return net(torch.ones(2, 7), [0, 1, 2] if dist.get_rank() == 0 else [0, 2, 1]).square().mean()


def unequal_steps(api: Api) -> None:
    model, _ = pair(api)
    optimizer = sgd(model)
    for step in range(3 - dist.get_rank()):
        classify(model, step).backward()
        optimizer.step()


def different_models(api: Api) -> None:
    torch.manual_seed(0)
    model = api.shard(Net(7 + 2 * dist.get_rank()), Block)
    step_both(model, Net(7))


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.fc(x.mean((2, 3)) * self.scale)


def unfrozen_later(api: Api) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks.requires_grad_(False)
        return model

    model, replica = pair(api, make)
    step_both(model, replica)
    for net in (model, replica):
        net.requires_grad_(True)
    step_both(model, replica)
    same(api, model, replica)


class Probe(NamedTuple):
    run: Callable[[Api], None]
    refused: str | None = None  # what shardtrain refuses, with the start of its message; else it is equal


PROBES: dict[str, Probe] = {
    "Training equals a replica's": Probe(like_a_replica()),
    "A 0-dim parameter": Probe(like_a_replica(OddNet)),
    "Optimizer built before wrapping": Probe(optimizer_before),
    "Initial weights that differ between ranks become rank 0's": Probe(divergent_weights),
    "Started on the meta device, with the initial weights of the plain model": Probe(from_the_meta_device),
    "channels_last convolutions": Probe(like_a_replica(lambda: Net().to(memory_format=torch.channels_last))),
    "`SGD(fused=True)`": Probe(with_optimizer("SGD", fused=True)),
    "Adafactor": Probe(with_optimizer("Adafactor"), "Adafactor cannot step on a sharded model"),
    "Muon": Probe(with_optimizer("Muon"), "Muon cannot step on a sharded model"),
    'Adafactor, with `layout="whole"`': Probe(with_optimizer("Adafactor", whole=True)),
    'Muon, with `layout="whole"`': Probe(with_optimizer("Muon", whole=True)),
    "LBFGS": Probe(with_optimizer("LBFGS"), "LBFGS cannot step on a sharded model"),
    "`inference_mode`, then training": Probe(inference_then_training),
    "Double backward": Probe(
        like_a_replica(Line, nn.Linear, loss=gradient_penalty),
        "double backward (create_graph=True) is not supported",
    ),
    "A parameter used on one rank only": Probe(
        like_a_replica(lambda: nn.Sequential(Branch(), Branch()), Branch, loss=squares)
    ),
    "A unit whose output matters on one rank only": Probe(like_a_replica(Heads, nn.Linear, loss=one_head)),
    "A parameter used nowhere, in a unit that ran": Probe(
        like_a_replica(lambda: nn.Sequential(Idle(), Idle()), Idle, loss=squares)
    ),
    "BatchNorm: a save does not depend on the rank": Probe(batch_norm_saves),
    "A clean step after an exception in forward": Probe(after_an_exception("forward")),
    "A clean step after an exception in backward": Probe(after_an_exception("backward")),
    "`zero_grad` between accumulating backwards": Probe(zero_grad_while_accumulating),
    "A module attached after wrapping": Probe(attached_later, "parameters attached after shard()"),
    "Loading a state with a missing key loads nothing": Probe(
        bad_state(lambda state: state.pop("fc.weight")), "nothing was loaded: fc.weight is missing"
    ),
    "Loading int64 into an fp32 parameter": Probe(
        bad_state(lambda state: state.update({"fc.weight": state["fc.weight"].long()})),
        "nothing was loaded: fc.weight is torch.int64",
    ),
    "`AveragedModel` (EMA)": Probe(ema_copy),
    "Weights tied across units": Probe(like_a_replica(Tied, nn.Linear, loss=squares)),
    "A user's post-accumulate hook fires once": Probe(hooks_fire_once),
    "An optimizer that steps in backward": Probe(optimizer_in_backward),
    "Clipping with ignored parameters": Probe(clips_a_mixture),
    "A unit's parameter used outside of it": Probe(used_outside, ""),
    "bf16 with BatchNorm": Probe(bf16_with_batch_norm),
    "Ranks that run units in another order": Probe(like_a_replica(Line, nn.Linear, loss=another_order), ""),
    "Unequal numbers of steps": Probe(unequal_steps, ""),
    "Models that differ between ranks": Probe(different_models, "the model to shard differs between ranks"),
    "Reentrant activation checkpointing": Probe(like_a_replica(Checkpointed)),
    "Unfreezing parameters later": Probe(unfrozen_later),
}


# the table


def outcome(api: Api, name: str) -> str:
    """``equal``, or what came instead."""
    try:
        PROBES[name].run(api)
    except Exception as error:
        if isinstance(error, AssertionError) and _is_ours(error):
            return f"**wrong**: {str(error).splitlines()[0]}"
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {text}"
    return "equal"


def _is_ours(error: AssertionError) -> bool:
    """Whether a probe's comparison failed, not an assertion inside of a wrapper."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).name in (Path(__file__).name, "_comparison.py")


def _rank(api: Api, name: str, rank: int, store: str, report: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    Path(f"{report}{rank}").write_text(outcome(api, name))
    os._exit(0)  # no farewell to a group that may be broken


def probe(api: Api, name: str) -> str:
    """The outcome on rank 0, in fresh processes; on rank 1 if that tells more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardtrain"])
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report"
        ranks = [
            context.Process(target=_rank, args=(api, name, rank, f"{folder}/store", report), daemon=True)
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        texts = [Path(f"{report}{rank}") for rank in range(WORLD)]
        said = [path.read_text() for path in texts if path.exists()]
    if any(code not in (0, None) for code in ended):
        return f"**ends the process** (exit code {next(c for c in ended if c)})"
    if None in ended:
        return f"**hangs** (still after {LIMIT_S:.0f} s)"
    return next((text for text in said if text != "equal"), "equal")


def cell(text: str, width: int = 150) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= width else f"{text[:width]}…"


def table() -> str:
    lines = [
        "# Behaviours",
        "",
        f"What each wrapper does, probed on {WORLD} ranks on the CPU by"
        " `python tests/behaviours.py > BEHAVIOURS.md`:"
        f" torch {torch.__version__}, Python {sys.version.split()[0]}, {date.today().isoformat()}."
        " FSDP2 is `torch.distributed.fsdp.fully_shard` over gloo. *Equal*: the same parameters as a replica"
        " whose gradients are averaged by hand. Other words are the error's, cut short.",
        "",
        "| behaviour | shardtrain | FSDP2 |",
        "| --- | --- | --- |",
    ]
    for name in PROBES:
        row = [cell(probe(api, name)) for api in (Shardtrain(), FSDP2())]
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(f"{name}: {row}", file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
