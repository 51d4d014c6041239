"""The rows that shardtrain refuses, and what its messages say: regular expressions."""

CANNOT = r"cannot step on a sharded model: .*use shard\(..., layout='whole'\)"
CLOSED = (
    r"blocks.1\.\S+ was used \({}\) in forward outside of a call of blocks.1, .* change it, between steps"
)
REFUSED = {
    "Adafactor": f"Adafactor {CANNOT}",
    "Muon": f"Muon {CANNOT}",
    "LARS in a warm-up that begins with a learning rate of 0": f"Lars {CANNOT}",
    "Torch's `GradScaler`, where one rank's gradients overflow": "by shardtrain.GradScaler",
    "Pruning after wrapping": "topk of head.weight, a parameter at rest, would see",
    "`layer.bias = None` after wrapping": "head.bias is no longer where",
    "A module attached after wrapping": "parameters attached after shard",
    "The parent reads a unit's weight": r"blocks.0.inside.weight was used \(linear\) in forward outside .*: "
    "call the module, or choose units=",
    "A momentum encoder updated inside forward": CLOSED.format("mul_"),
    "A penalty on parameters in the same backward": " of blocks.0.inside.weight, a parameter at rest, would ",
    "An embedding with `max_norm`": "^ValueError: 0.weight changed while 0 was whole",
    "`jvp`": "a sharded model cannot run inside grad, vjp, jacrev, jvp or jacfwd of torch.func",
    "Double backward": "double backward .* is not supported",
    "`autograd.grad` over parameters": "autograd.grad over parameters of a sharded model",
    "`torch.save(model.state_dict())` (`save_pretrained`), loaded into a plain model": "pickle of 0.weight "
    r"\(torch.save\) would see this rank's piece alone: save shardtrain.full_state_dict",
    "`get_model_state_dict(full_state_dict=True)`": "equal of 0.weight would see this rank's piece alone: .* "
    r"\.full_tensor\(\) for the whole tensor",
    "Loading a full state dict without a key: nothing is loaded": "nothing was loaded: head.bias is missing",
    "Loading a full state dict in float64: nothing is loaded": "nothing was loaded: head.bias is torch.f",
    "Models that differ between ranks": r"to shard differs between ranks: rank [12] has weight \(\d+, 5\) "
    r"torch.float32 .* where rank 0 has weight \(7, 5\)",
    "Ranks that run units in another order": "rank 0 takes another path than ranks 1 and 2",
    "Unequal numbers of steps": "rank [12] has ended",
    "A rank that is stopped: the time-out of 2 s says so": "rank 1 does not answer",
}
