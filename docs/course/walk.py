"""Run one sharded step, and print what every rank holds at each point.

    torchrun --nproc-per-node 2 docs/course/walk.py

The model is a hidden layer and an output layer without biases, all numbers small enough to check by hand.
Nothing here is special: it is the loop of a script, with forward hooks that look at what parameters show.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import shardtrain
from shardtrain import comm


def small_model() -> nn.Sequential:
    """Return two layers with weights of 3×4 and 1×3, all of them 1, in fp64."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    for param in model.parameters():
        nn.init.ones_(param)
    return model


def tell(what: str, *lines: str) -> None:
    """Print every rank's lines on rank 0, in rank order. Collective."""
    texts = comm.gather_texts("\n".join(lines), comm.plain_transport())
    if comm.rank() == 0:
        print(f"\n{what}")
        for rank, text in enumerate(texts):
            for line in text.split("\n"):
                print(f"  rank {rank}  {line}")


def numbers(tensor: torch.Tensor | None) -> str:
    """Return a tensor's values as ``[1 1.5 2]``, nested for more dimensions."""
    if tensor is None:
        return "none"
    values = tensor.as_subclass(torch.Tensor).tolist()  # of a local shard, what it is here

    def text(value: list[object] | object) -> str:
        return f"[{' '.join(map(text, value))}]" if isinstance(value, list) else f"{value:g}"

    return text(values)


def held(model: nn.Module) -> list[str]:
    """Return one line per parameter: the values that it shows on this rank, and its gradient if any."""
    lines = []
    for name, param in model.named_parameters():
        grad = "" if param.grad is None else f"  gradient {numbers(param.grad)}"
        lines.append(f"{name} {numbers(param)}{grad}")
    return lines


def look_inside(model: nn.Sequential) -> list[str]:
    """Return a list that the next forward fills: what each layer's parameters show while it computes."""
    seen: list[str] = []
    for name, layer in model.named_children():

        def look(layer: nn.Module, _: object, name: str = name) -> None:
            # Those of other layers are this rank's shards, which nobody may use meanwhile.
            seen.append(f"inside {name}: " + ", ".join(held(layer)))

        layer.register_forward_pre_hook(look)
    return seen


def walk() -> None:
    model = shardtrain.shard(small_model(), units=[nn.Linear], transport="process_group")
    assert isinstance(model, nn.Sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = look_inside(model)
    tell("At rest every parameter shows this rank's local shard, perhaps an empty one.", *held(model))

    images = torch.full((1, 4), comm.rank() + 1, dtype=torch.float64)
    with comm.meter() as meter:
        loss = model(images).square().mean()
        loss.backward()
    tell("In forward a unit is gathered just before it computes, and released after.", *seen)
    tell(
        "Backward gathers again, and each owner gets the mean of all ranks' gradients.",
        *held(model),
        f"this rank's own loss {loss.item():g}",
        f"sent {dict(meter.bytes)} bytes in {dict(meter.calls)} collectives",
    )
    optimizer.step()
    tell("The optimizer updates the local shards; nothing is communicated.", *held(model))
    whole = shardtrain.full_state_dict(model)
    tell(
        "`full_state_dict` puts them together again, on every rank.",
        *(f"{name} {numbers(value)}" for name, value in whole.items()),
    )


@record
def main() -> None:
    if not dist.is_torchelastic_launched():
        walk()
        return
    dist.init_process_group("gloo")
    try:
        walk()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
