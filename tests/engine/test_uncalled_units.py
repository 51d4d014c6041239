"""Parameters of units that no call has gathered, in a forward: each use of a value is refused by name."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain.pieces.parameter import PieceParameter

from behaviours.rows import Net, Unit, batch
from pool import each_rank
from small import average_gradients, like_a_replica, shard

USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "abs": lambda self, y: y * self.blocks[1].inside.weight.abs().mean(),
    "data": lambda self, y: y * self.blocks[1].inside.bias.data.mean(),
    "shape": lambda self, y: y * self.blocks[1].inside.weight.shape[1],
    "numel": lambda self, y: y * self.blocks[1].inside.weight.numel(),
    "linear": lambda self, y: F.linear(F.pad(y, (0, 4)), self.blocks[1].inside.weight),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use", USES)
@each_rank(2)
def test_a_parent_that_computes_with_a_closed_unit_s_parameter_is_refused(use: str, frozen: bool) -> None:
    """In training and evaluation, before and after the unit's own call; then a step is right."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.head(x if self.before else self.blocks[1](x))
        return USES[use](self, y) if self.uses else self.head(self.blocks[1](x))

    torch.manual_seed(0)
    plain = Net(root=forward)
    plain.blocks[1].requires_grad_(not frozen)
    plain.before = plain.uses = False
    model = shard(copy.deepcopy(plain), units=[Unit])
    model.uses = True
    message = rf"^blocks\.1\.inside\.\w+ was used \({use}\) in forward outside of a call of blocks\.1"
    for model.before in (False, True):
        for learns in (False, True):
            with torch.set_grad_enabled(learns), pytest.raises(ValueError, match=message):
                model(batch(0))
    model.uses = False
    assert all(isinstance(param, PieceParameter) for param in model.parameters())
    for net in (plain, model):
        net(batch(0)).square().mean().backward()
    average_gradients(plain)
    with shardtrain.unsharded(model, grads=True):
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        expected = [param.grad for param in plain.parameters() if param.grad is not None]
        torch.testing.assert_close(grads, expected)


@each_rank(2)
def test_a_unit_that_computes_with_another_one_s_parameter_is_refused() -> None:
    """Also after a backward inside of forward, in which all parameters have their own class."""

    def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inside(x)) * self.others[0].inside.weight.mean()

    def learns_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](self.stem(x))
        y.sum().backward()
        return self.blocks[1](y.detach())

    for root in (None, learns_inside):
        model = Net(unit=reads) if root is None else Net(unit=reads, root=root)
        model.blocks[0].others = [model.blocks[0]]
        model.blocks[1].others = [model.blocks[0]]
        message = r"^blocks\.0\.inside\.weight was used \(mean\) in forward outside of a call of blocks\.0"
        with pytest.raises(ValueError, match=message):
            shard(model, units=[Unit])(batch(0))


class Own(nn.Parameter):
    """A user's own class of parameters."""


@each_rank(2)
def test_what_tells_no_size_of_a_closed_unit_s_parameter_is_right() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters():
            assert isinstance(param, nn.Parameter)
            assert "Parameter" in repr(param)
            assert (param.dtype, param.device.type, param.requires_grad) == (torch.float32, "cpu", True)
            assert (param.is_leaf, param.grad, param.is_floating_point()) == (True, None, True)
            assert param.dim() > 0
        assert type(self.blocks[0].inside.weight).__name__ == "Own"
        return self.head(self.blocks[0](self.stem(x)))

    def make() -> nn.Module:
        net = Net(root=forward)
        net.blocks[0].inside.weight = Own(net.blocks[0].inside.weight.detach())
        return net

    model = like_a_replica(make, lambda net, step: net(batch(step)).square().mean().backward(), units=[Unit])
    at_rest = model.blocks[0].inside.weight
    assert isinstance(at_rest, Own)
    assert isinstance(at_rest, PieceParameter)
    assert type(at_rest).__name__ == "Own"


@each_rank(2)
def test_torch_s_encoder_computes_what_it_computes_unsharded() -> None:
    """It looks at parameters of its layers before it calls them: plain ones allow its fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    model = shard(copy.deepcopy(plain), units=[nn.TransformerEncoderLayer]).eval()
    padded = torch.arange(5).expand(3, 5) > torch.tensor([[4], [1], [2]])
    inputs = torch.randn(3, 5, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        ours = model(inputs, src_key_padding_mask=padded)
        expected = plain(inputs, src_key_padding_mask=padded)
    assert torch.equal(ours, expected)
    assert not expected[padded].any()
