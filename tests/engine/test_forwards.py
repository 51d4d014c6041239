"""What runs inside units: compiled, computed again, or both."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shardtrain
from shardtrain import Precision
from shardtrain.config.errors import UserError
from shardtrain.job.blocks import checkpoint_blocks, compile_blocks, require_inductor

from pool import each_rank
from small import (
    Block,
    OddNet,
    Parts,
    Vit,
    assert_same_parameters,
    classify,
    images,
    like_a_replica,
    sgd,
    shard,
    sharded_and_replica,
    train,
)
from tiny import CPU

Inside = Callable[[nn.Module], None]
BF16 = shardtrain.Precision(param=torch.bfloat16, output=torch.float32)


def dropping() -> nn.Module:
    """With a random draw."""
    net = OddNet()
    net.blocks = nn.Sequential(DroppingBlock(7), DroppingBlock(7))
    return net


def counting() -> nn.Module:
    """With a norm whose statistics depend on how many batches it has seen; torch does not compile that."""
    net = dropping()
    for block in net.blocks:
        block.norm.momentum = None
    return net


class DroppingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


def compiled(model: nn.Module) -> None:
    compile_blocks(model, CPU, backend="aot_eager")


def both(model: nn.Module) -> None:
    compiled(model)
    checkpoint_blocks(model)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[dict[str, int]]:
    """Torch's counts of what it compiles in here, from zero. Nothing compiled is left behind."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Torch asks for it itself; by default it keeps the warning from users, too.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
        yield counters["stats"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def sharded(inside: Inside, make: Callable[[], nn.Module] = OddNet, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    inside(model)
    return shard(model, **options)


@pytest.mark.parametrize(
    ("make", "inside", "bf16", "reshard"),
    [
        (counting, checkpoint_blocks, False, True),
        pytest.param(Vit, both, True, True, marks=pytest.mark.long),
        pytest.param(dropping, both, False, False, marks=pytest.mark.long),
    ],
)
@each_rank(3, transport="auto")
def test_blocks_compute_what_others_do(
    make: Callable[[], nn.Module], inside: Inside, bf16: bool, reshard: bool
) -> None:
    """With micro-batches, clipping, dropout, running statistics; and what DDP computes.

    Bit for bit where the same kernels run again. What is compiled may add up in another order.
    """
    options = {"precision": BF16 if bf16 else None, "reshard_after_forward": reshard}
    plain, replica = sharded_and_replica(make, **options, units="blocks")
    with fresh_compiler() as stats:
        model = sharded(inside, make, **options)
        graphs: list[int] = []
        losses = train_in_micro_batches(model, after=lambda step: graphs.append(stats["unique_graphs"]))
    assert graphs[1] == graphs[2]  # nothing is compiled after the second step
    rounding = 5e-2 if bf16 else 1e-5
    off = {"rtol": rounding, "atol": rounding} if graphs[2] else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(losses, train_in_micro_batches(plain), **off)
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    torch.testing.assert_close(*whole, **off)
    assert losses == pytest.approx(train_in_micro_batches(replica), rel=rounding)
    assert_same_parameters(model, replica, rounding)


def test_more_kinds_of_blocks_are_compiled_than_torch_does_by_itself() -> None:
    layers = [nn.Sequential(nn.Linear(8 + i, 9 + i), nn.Tanh()) for i in range(10)]
    model = Parts(lambda self, x: self.layers(x), layers=nn.Sequential(*map(Called, layers)))
    with fresh_compiler() as stats:
        compile_blocks(model, CPU, backend="eager")
        model(torch.ones(2, 8))
        assert stats["unique_graphs"] == len(layers)


class Called(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton comes with CUDA")
def test_inductor_needs_triton_on_a_gpu() -> None:
    """`test_train.py` has the CPU, where it needs a compiler."""
    with pytest.raises(UserError, match=r"^parallel\.compile=true for cuda needs Triton"):
        require_inductor(torch.device("cuda"))


def test_what_changes_before_it_is_computed_again_is_refused() -> None:
    def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.linear(x)

    x = torch.randn(3, 4)
    for buffer in (True, False):
        block = Parts(counts if buffer else lambda self, x: self.linear(x), linear=nn.Linear(4, 4))
        block.register_buffer("count", torch.zeros(()))
        model = nn.Sequential(block, nn.Linear(4, 4))
        checkpoint_blocks(model)
        shardtrain.shard(model)
        loss = model(x).sum()
        if not buffer:
            x.add_(1)
        # Torch notices inputs that are arguments of their own.
        message = "buffers of block 0 changed in place after it began" if buffer else "inplace operation"
        with pytest.raises(ValueError if buffer else RuntimeError, match=message):
            loss.backward()
        with torch.no_grad():
            model(x)


def test_models_without_blocks() -> None:
    for key, change in {"compile": compiled, "activation_checkpoint": checkpoint_blocks}.items():
        with pytest.raises(UserError, match=f"parallel.{key}=true: the model has no block"):
            change(nn.Linear(2, 2))


@each_rank(2)
def test_torch_s_own_checkpointing_and_compilation_before_shard() -> None:
    """The same results, and state under the names that the model has without."""

    def torch_s_own(model: nn.Module) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))

    plain, _ = sharded_and_replica()
    with fresh_compiler():
        model = sharded(torch_s_own, units=[Block])
        train(model, sgd(model), 3)
    train(plain, sgd(plain), 3)
    whole = [shardtrain.full_state_dict(each) for each in (model, plain)]
    for name in whole[0]:
        if "running" not in name and "batches" not in name:  # torch counts a batch again
            torch.testing.assert_close(whole[0][name], whole[1][name])  # compiled code may round otherwise
    shardtrain.load_full_state_dict(model, whole[1])
    assert all(map(torch.equal, shardtrain.full_state_dict(model).values(), whole[1].values()))


def tangents(net: nn.Module, number: int) -> None:
    """A step with the output and its derivative along a direction."""
    x, _ = images(number, n=2)
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.sin())))
        (slope.square().mean() + value.square().mean()).backward()


class Smooth(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 7), nn.Tanh(), nn.LayerNorm(7))


@pytest.mark.long
@each_rank(1, 3)
def test_dual_numbers() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), Smooth(75), Smooth(7), nn.Linear(7, 5))

    like_a_replica(net, tangents, units=lambda _, module: isinstance(module, Smooth))


def train_in_micro_batches(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train three clipped steps of two micro-batches; return this rank's losses."""
    if isinstance(model, DistributedDataParallel):
        no_sync = model.no_sync
        clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    else:
        no_sync, clip = (partial(f, model) for f in (shardtrain.no_sync, shardtrain.clip_grad_norm_))
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        for micro in range(2):
            with no_sync() if micro == 0 else contextlib.nullcontext():
                loss = classify(model, 2 * step + micro)
                (loss / 2).backward()
            losses.append(loss.item())
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


class ShapedBlock(nn.Module):
    """Filters of which sizes of 1 leave some strides open."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.point = nn.Conv2d(6, 1, 1)
        self.single = nn.Conv2d(1, 1, 1)
        self.many = nn.Conv2d(1, 6, 3, padding=1)
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.single(self.point(self.norm(self.wide(x)).relu()))
        return x + self.depth(self.many(inside))


@each_rank(1, 2)
def test_several_forwards_inside_one_autocast() -> None:
    """Autocast keeps casts of weights, with their nodes, until its outermost block ends."""
    results = []
    for wrap in (lambda model: model, lambda model: shard(model, units=[nn.Linear])):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(5, 7)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = model(x + 1).float()
            for _ in range(2):
                F.mse_loss(model(x).float(), target).backward()
                model[2](torch.ones(2, 9)).float().sum().backward()
        optimizer.step()
        with torch.no_grad():
            results.append(model(x))
    torch.testing.assert_close(*results, atol=0.02, rtol=0)


def strides_seen(order: torch.memory_format, **options: Any) -> list[list[tuple[Any, ...]]]:
    """Return shapes and strides in each call of compiled blocks, of the plain model without options."""
    calls = list[list[tuple[Any, ...]]]()

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim == 4]
            calls.append(sorted([(*tensor.shape, *tensor.stride()) for tensor in tensors]))
            return graph(*args)

        return call

    torch.manual_seed(0)
    model = nn.Sequential(ShapedBlock(), ShapedBlock()).to(memory_format=order)
    for block in model:
        block.forward = torch.compile(block.forward, backend=backend)
    if options:
        shard(model, units=[ShapedBlock], **options)
    for size in (1, 1):  # a single pixel leaves strides of images open, too; two calls: the first compiles
        x = torch.randn(3, 6, size, size).to(memory_format=order)
        with torch.autocast("cpu", torch.bfloat16, enabled=not options):
            model(x).float().square().mean().backward()
    return calls


@pytest.mark.parametrize(
    "order", [pytest.param(torch.contiguous_format, marks=pytest.mark.long), torch.channels_last]
)
@each_rank(2, transport="auto")
def test_a_compiled_block_sees_filters_with_the_strides_of_the_plain_model(
    order: torch.memory_format,
) -> None:
    """Compilers and libraries choose kernels, and expect gradients, by them."""
    with fresh_compiler():
        plain = strides_seen(order)
    with fresh_compiler():
        assert strides_seen(order, precision=Precision(torch.bfloat16)) == plain


@pytest.mark.parametrize(
    ("device", "size", "stride"),
    [("cuda", 1, (6, 1, 6, 6)), ("cuda", 2, (24, 4, 2, 1)), ("cpu", 1, (6, 1, 1, 1))],
)
def test_images_of_a_single_pixel_come_to_compiled_blocks_of_a_gpu_in_one_order(
    device: str, size: int, stride: tuple[int, ...]
) -> None:
    """Inductor asserts channels_last of gradients that cuDNN returns in the order of the images."""
    seen = set[tuple[int, ...]]()

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.update(arg.stride() for arg in args if torch.is_tensor(arg) and arg.shape[:1] == (3,))
            return graph(*args)

        return call

    torch.manual_seed(0)
    model = nn.Sequential(ShapedBlock(), ShapedBlock())
    plain = copy.deepcopy(model)
    image = torch.randn(3, 6, size, size, requires_grad=True)
    expected = torch.autograd.grad(plain(image).square().mean(), [image, *plain.parameters()])
    with fresh_compiler():
        compile_blocks(model, torch.device(device), backend=backend)
        gradients = torch.autograd.grad(model(image).square().mean(), [image, *model.parameters()])
    assert seen == {stride}
    torch.testing.assert_close(gradients, expected)
