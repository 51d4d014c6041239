"""Models and loops of well-known packages, as people write them, against a replica averaged by hand.

They need ``pip install -e ".[wild]"``. Models come from configurations: nothing is downloaded.
"""

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import chain, count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain

from pool import each_rank
from small import average_gradients, shard

WILD = ["transformers", "accelerate", "timm", "peft", "torchmetrics"]
MISSING = [name for name in WILD if find_spec(name) is None]
pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(MISSING), reason=f'pip install -e ".[wild]": {", ".join(MISSING)} missing'),
]
VOCABULARY = 53

Wrap = Callable[[nn.Module], Any]
Sync = Callable[[nn.Module], None]
Loop = Callable[[Wrap, Sync], list[Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def seed(step: int) -> None:
    """Seed what this rank draws in this step: its batch, its dropout masks."""
    torch.manual_seed(1000 * step + dist.get_rank())
    np.random.seed(1000 * step + dist.get_rank())  # timm's mixup


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, sync: Sync, model: nn.Module) -> None:
    optimizer.zero_grad()
    loss.backward()
    sync(model)
    optimizer.step()


def train(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    sync: Sync,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Return the model after some steps, and its losses; ``after`` runs after each."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(steps):
        seed(step)
        losses.append(loss())
        update(optimizer, losses[-1], sync, model)
        after()
    assert losses[-1] != losses[0], "nothing was learnt"
    return [model, torch.stack(losses).detach()]


def run(loop: Loop, wrap: Wrap, sync: Sync) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        torch.manual_seed(0)
        return loop(wrap, sync)


def require_as_replicas(loop: Loop, tolerance: float = 0.0) -> None:
    """Run ``loop`` with replicas averaged by hand, and sharded over each transport; require equal results.

    ``loop`` takes what wraps a model and what runs after its backward, and returns models and values. Of
    models, parameters and buffers are compared: those of this rank, that is, of its batches.
    """
    replicas = run(loop, lambda model: model, average_gradients)
    for transport in ("process_group", "shared_memory"):
        models = run(loop, partial(shard, transport=transport), lambda _: None)  # gradients are means already
        for model, replica in zip(models, replicas, strict=True):
            ours = {"": model}
            theirs = {"": replica}
            if isinstance(model, nn.Module):
                ours = {**shardtrain.full_state_dict(model), **dict(model.named_buffers())}
                theirs = dict(chain(replica.named_parameters(), replica.named_buffers()))
            torch.testing.assert_close(
                {name: ours[name].detach() for name in theirs}, theirs, rtol=tolerance, atol=tolerance
            )


# loops


def photos(n: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(n, 3, size, size)


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 53, "n_embd": 28, "n_layer": 2, "n_head": 4, "n_positions": 31}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def lora(wrap: Wrap, sync: Sync) -> list[Any]:
    import peft
    import transformers

    options = peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.1)
    model = wrap(peft.get_peft_model(gpt2(), options)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 1, 5)

    def loss() -> torch.Tensor:
        ids = torch.randint(53, (2, 9))
        return model(input_ids=ids, labels=ids).loss

    return train(model, loss, sync, optimizer=optimizer, after=schedule.step)


def trainer(wrap: Wrap, sync: Sync) -> list[Any]:
    """Hugging Face's Trainer, clipping as it does, kept from wrapping the model in DDP."""
    import transformers
    from accelerate.state import AcceleratorState

    class Trainer(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **_: model

        def training_step(self, model: nn.Module, *batch: Any) -> torch.Tensor:
            loss = super().training_step(model, *batch)
            sync(model)
            return loss

    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(53, (12, 9))]
    environment = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # of the group that is there already
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "max_grad_norm": 0.1}
        options = transformers.TrainingArguments(folder, use_cpu=True, **sizes, **quiet)
        model = wrap(gpt2())
        try:
            Trainer(model, options, train_dataset=data).train()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return [model]


def timm_recipe(wrap: Wrap, sync: Sync) -> list[Any]:
    """timm's groups without decay by dimensions, schedule and mixup; torchmetrics over all ranks."""
    import timm
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from torchmetrics.classification import MulticlassAccuracy

    model = wrap(timm.create_model("test_vit", num_classes=5, img_size=32))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.3, layer_decay=0.7)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=1)
    mixup = timm.data.Mixup(num_classes=5)
    accuracy = MulticlassAccuracy(5)
    steps = count(1)

    def loss() -> torch.Tensor:
        y = torch.randint(5, (4,))
        x, mixed = mixup(photos(4), y)
        out = model(x)
        accuracy.update(out, y)
        return SoftTargetCrossEntropy()(out, mixed)

    def after() -> None:
        schedule.step(next(steps))

    return [*train(model, loss, sync, optimizer=optimizer, after=after), accuracy.compute()]


LOOPS = [lora, timm_recipe, trainer]


@pytest.mark.parametrize("loop", LOOPS)
@each_rank(2, transport="auto")
def test_loops(loop: Loop) -> None:
    # Norms of the Trainer's clipping are added up piece by piece; without clipping its bits are equal.
    require_as_replicas(loop, tolerance=1e-6 if loop is trainer else 0.0)


# models: equal bit for bit


def tokens(**more: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 11))
    return {"input_ids": ids, "labels": ids, **more}


def text(**more: Any) -> dict[str, Any]:
    """Return a language model's sizes, which no world size divides; heads are even where positions rotate."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 5, "max_position_embeddings": 31, "decoder_start_token_id": 1}
    return {**sizes, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **more}


def grouped(**more: Any) -> dict[str, Any]:
    return text(num_key_value_heads=1, head_dim=6, **more)


# class: its configuration and its batch, one row per way to build a model
TRANSFORMERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "GPT2LMHeadModel": (text(n_embd=28, n_layer=3, n_head=4), tokens),
    "LlamaForCausalLM": (grouped(tie_word_embeddings=True), tokens),
    # grouped products want rows of a multiple of 16 bytes
    "MixtralForCausalLM": (grouped(hidden_size=28, intermediate_size=36, num_local_experts=3), tokens),
    "MambaForCausalLM": (text(state_size=5), tokens),
    "AlbertForMaskedLM": (text(embedding_size=7), tokens),
    "T5ForConditionalGeneration": (text(d_kv=7, d_ff=37, num_heads=4), tokens),
}


def compare(make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]) -> None:
    def loop(wrap: Any, sync: Any) -> list[Any]:
        model = wrap(make())
        return train(model, lambda: loss(model), sync)

    require_as_replicas(loop)


@pytest.mark.parametrize("name", TRANSFORMERS)
@each_rank(2, transport="auto")
def test_transformers(name: str) -> None:
    import transformers

    options, batch = TRANSFORMERS[name]
    kind = getattr(transformers, name)
    compare(lambda: kind(kind.config_class(**options)), lambda model: model(**batch()).loss)
