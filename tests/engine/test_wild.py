"""Models and loops of well-known packages, as people write them, against a replica averaged by hand.

They need ``pip install -e ".[wild]"``. Models come from configurations: nothing is downloaded.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import chain, count, pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import shardtrain

from behaviours.training import Sam
from pool import each_rank
from small import Parts, average_gradients, shard

WILD = ["transformers", "accelerate", "timm", "peft", "torchmetrics"]
MISSING = [name for name in WILD if find_spec(name) is None]
pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(MISSING), reason=f'pip install -e ".[wild]": {", ".join(MISSING)} missing'),
]
STEPS = range(3)
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


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


def follow(target: nn.Module, source: nn.Module, momentum: float = 0.9) -> None:
    """Move a momentum encoder towards its source, as MoCo, BYOL and diffusion do."""
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.mul_(momentum).add_(theirs, alpha=1 - momentum)


def photos(n: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(n, 3, size, size)


def dcgan(wrap: Wrap, sync: Sync) -> list[Any]:
    up = nn.ConvTranspose2d
    generator = wrap(
        nn.Sequential(
            nn.Sequential(up(9, 21, 4, bias=False), nn.BatchNorm2d(21), nn.ReLU(True)),
            nn.Sequential(up(21, 11, 4, 2, 1, bias=False), nn.BatchNorm2d(11), nn.ReLU(True)),
            nn.Sequential(up(11, 3, 4, 2, 1), nn.Tanh()),
        )
    )
    down = [spectral_norm(nn.Conv2d(a, b, 4, 2, 1)) for a, b in ((3, 11), (11, 21))]
    critic = wrap(nn.Sequential(down[0], nn.LeakyReLU(0.2, True), down[1], nn.Flatten(), nn.Linear(336, 1)))
    for_critic = adamw(critic)
    for_generator = adamw(generator)
    for step in STEPS:
        seed(step)
        made = generator(torch.randn(4, 9, 1, 1))
        loss = F.softplus(-critic(photos(4, 16))).mean() + F.softplus(critic(made.detach())).mean()
        update(for_critic, loss, sync, critic)
        update(for_generator, F.softplus(-critic(made)).mean(), sync, generator)
    return [generator, critic]


def moco(wrap: Wrap, sync: Sync) -> list[Any]:
    query = mlp(13, 31, 31, 7)
    key = wrap(copy.deepcopy(query).requires_grad_(False))
    query = wrap(query)
    queue = F.normalize(torch.randn(7, 19), dim=0)

    def loss() -> torch.Tensor:
        nonlocal queue
        x = torch.randn(4, 13)
        q = F.normalize(query(x), dim=1)
        follow(key, query)
        with torch.no_grad():
            k = F.normalize(key(x + 0.1), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.07
        queue = torch.cat([k.T, queue], dim=1)[:, :19]
        return F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))

    return [*train(query, loss, sync), key]


def clip(wrap: Wrap, sync: Sync) -> list[Any]:
    """Compare with the features of all ranks, gathered with gradients; clamp the scale after each step."""
    from torch.distributed.nn.functional import all_gather

    def forward(self: Any, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)

    text = nn.Sequential(nn.Embedding(53, 11), nn.Flatten(), mlp(55, 31, 7))
    model = wrap(Parts(forward, image=mlp(13, 31, 7), text=text, logit_scale=nn.Parameter(torch.tensor(2.6))))

    def loss() -> torch.Tensor:
        image, text = model(torch.randn(4, 13), torch.randint(53, (4, 5)))
        logits = model.logit_scale.exp() * image @ torch.cat(all_gather(text)).T
        return F.cross_entropy(logits, torch.arange(4) + 4 * dist.get_rank())

    return train(model, loss, sync, after=lambda: model.logit_scale.data.clamp_(0, 4.6))


def recurrent(wrap: Wrap, sync: Sync) -> list[Any]:
    """The root is called 400 times before one backward."""
    model = wrap(nn.LSTMCell(3, 11))

    def loss() -> torch.Tensor:
        state = (torch.zeros(2, 11),) * 2
        for x in torch.randn(400, 2, 3):
            state = model(x, state)
        return state[0].square().mean()

    return train(model, loss, sync, steps=2)


def diffusion(wrap: Wrap, sync: Sync) -> list[Any]:
    """Train a denoiser; sample from it, guided by a classifier."""
    parts = {"time": mlp(1, 17, 13), "label": nn.Embedding(5, 13), "body": mlp(13, 31, 31, 13)}
    denoiser = Parts(lambda self, x, t, y: self.body(x + self.time(t) + self.label(y)), **parts)
    model = wrap(denoiser)
    classifier = wrap(mlp(13, 31, 5))
    optimizer = adamw(model)
    for_classifier = adamw(classifier)
    for step in STEPS:
        seed(step)
        x = torch.randn(4, 13)
        t = torch.rand(4, 1)
        y = torch.randint(5, (4,))
        noise = torch.randn(4, 13)
        update(optimizer, F.mse_loss(model(x * (1 - t) + noise * t, t, y), noise), sync, model)
        update(for_classifier, F.cross_entropy(classifier(x), y), sync, classifier)
    for t in (0.9, 0.5, 0.1):
        at = x.detach().requires_grad_()
        chosen = classifier(at).log_softmax(1)[torch.arange(4), y].sum()
        (slope,) = torch.autograd.grad(chosen, at)
        with torch.no_grad():
            x = x - 0.1 * model(x, torch.full((4, 1), t), y) + 0.1 * slope
    return [model, classifier, x]


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


def generation(wrap: Wrap, sync: Sync) -> list[Any]:
    """Policy gradient on text of the model's own, with gradient checkpointing."""
    import transformers

    sizes = {"hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 5}
    config = transformers.LlamaConfig(**sizes, vocab_size=53, pad_token_id=0, eos_token_id=None)
    model = wrap(transformers.LlamaForCausalLM(config))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss() -> torch.Tensor:
        model.eval()
        ids = model.generate(torch.randint(53, (2, 4)), max_new_tokens=5, do_sample=True)
        model.train()
        policy = Categorical(logits=model(input_ids=ids, use_cache=False).logits[:, :-1])
        return -(policy.log_prob(ids[:, 1:]) * torch.randn(2, 1)).mean()

    return train(model, loss, sync)


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


def sam(wrap: Wrap, sync: Sync) -> list[Any]:
    model = wrap(mlp(13, 31, 31, 7))
    optimizer = Sam(model.parameters(), torch.optim.SGD)
    x = torch.randn(4, 13)

    def closure() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        sync(model)

    for _ in STEPS:
        closure()
        optimizer.step(closure)
    return [model]


LOOPS = [dcgan, moco, clip, recurrent, diffusion, lora, generation, timm_recipe, trainer, sam]
# Under spectral norm a call uses a weight twice, and uses of several calls are added up in another order.
# Norms of SAM and of the Trainer's clipping are added up piece by piece; without clipping its bits are equal.
ROUNDED = (dcgan, sam, trainer)


@pytest.mark.parametrize("loop", LOOPS)
@each_rank(2, transport="auto")
def test_loops(loop: Loop) -> None:
    require_as_replicas(loop, tolerance=1e-6 if loop in ROUNDED else 0.0)


# models: equal bit for bit


def tokens(**more: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 11))
    return {"input_ids": ids, "labels": ids, **more}


def labelled() -> dict[str, torch.Tensor]:
    return {"pixel_values": photos(), "labels": torch.randint(2, (3,))}


def pairs() -> dict[str, Any]:
    return {"input_ids": tokens()["input_ids"], "pixel_values": photos(2), "return_loss": True}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 9, 40), "labels": tokens()["labels"]}


def sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 999), "labels": torch.randint(2, (2,))}


def text(**more: Any) -> dict[str, Any]:
    """Return a language model's sizes, which no world size divides; heads are even where positions rotate."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 5, "max_position_embeddings": 31, "decoder_start_token_id": 1}
    return {**sizes, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **more}


def grouped(**more: Any) -> dict[str, Any]:
    return text(num_key_value_heads=1, head_dim=6, **more)


def sounds(**more: Any) -> dict[str, Any]:
    convolutions = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "mask_time_prob": 0.0}
    positions = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 3}
    return text(**convolutions, **positions, num_feat_extract_layers=2, classifier_proj_size=7, **more)


def translator(**more: Any) -> dict[str, Any]:
    heads = {"encoder_attention_heads": 5, "decoder_attention_heads": 5, "encoder_layers": 2}
    return text(**heads, decoder_layers=2, encoder_ffn_dim=37, decoder_ffn_dim=37, **more)


def picture(**more: Any) -> dict[str, Any]:
    return text(**{"image_size": 32, "patch_size": 8, **more})


# class: its configuration and its batch
TRANSFORMERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "GPT2LMHeadModel": (text(n_embd=28, n_layer=3, n_head=4), tokens),
    "LlamaForCausalLM": (grouped(tie_word_embeddings=True), tokens),
    "Gemma2ForCausalLM": (grouped(), tokens),
    # grouped products want rows of a multiple of 16 bytes
    "MixtralForCausalLM": (grouped(hidden_size=28, intermediate_size=36, num_local_experts=3), tokens),
    "GPTNeoXForCausalLM": (text(), tokens),
    "OPTForCausalLM": (text(ffn_dim=37, word_embed_proj_dim=30), tokens),
    "BloomForCausalLM": (text(n_layer=2, n_head=5), tokens),
    "MambaForCausalLM": (text(state_size=5), tokens),
    "BertForMaskedLM": (text(), tokens),
    "AlbertForMaskedLM": (text(embedding_size=7), tokens),
    "DebertaV2ForMaskedLM": (text(relative_attention=True, pos_att_type=["p2c", "c2p"]), tokens),
    "T5ForConditionalGeneration": (text(d_kv=7, d_ff=37, num_heads=4), tokens),
    "BartForConditionalGeneration": (translator(), tokens),
    "WhisperForConditionalGeneration": (
        translator(num_mel_bins=9, max_source_positions=20, max_target_positions=31),
        speech,
    ),
    "Wav2Vec2ForSequenceClassification": (sounds(layerdrop=0.0), sound),
    "ViTForImageClassification": (picture(), labelled),
    "ViTMAEForPreTraining": (
        picture(decoder_hidden_size=28, decoder_num_hidden_layers=2, decoder_num_attention_heads=4),
        lambda: {"pixel_values": photos()},
    ),
    "SwinForImageClassification": (
        {"image_size": 32, "embed_dim": 15, "depths": [2, 2], "num_heads": [3, 3], "window_size": 4},
        labelled,
    ),
    "ConvNextForImageClassification": ({"hidden_sizes": [7, 9, 11, 13], "depths": [1, 1, 2, 1]}, labelled),
    "SegformerForImageClassification": (
        {"hidden_sizes": [7, 10, 14, 21], "num_attention_heads": [1, 2, 2, 3], "depths": [1, 1, 1, 1]},
        labelled,
    ),
    "CLIPModel": ({"text_config": text(), "vision_config": picture(), "projection_dim": 15}, pairs),
}

# names in timm.models, and arguments of some
TIMM = ["test_resnet", "test_vit", "test_efficientnet", "test_convnext", "test_nfnet", "test_byobnet"]
TIMM += ["test_mambaout", "mobilenetv3_small_050", "regnetx_002", "ghostnet_050", "mobilevit_xxs"]
TIMM_SIZES: dict[str, dict[str, Any]] = {
    "MlpMixer": {"img_size": 32, "patch_size": 8, "embed_dim": 27, "num_blocks": 3},
    "MetaFormer": {"dims": (7, 9, 11, 13), "depths": (1, 1, 2, 1)},
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


@pytest.mark.parametrize("name", [*TIMM, *TIMM_SIZES])
@each_rank(2, transport="auto")
def test_timm(name: str) -> None:
    import timm.models

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(photos()), torch.randint(11, (3,)))

    compare(lambda: getattr(timm.models, name)(num_classes=11, **TIMM_SIZES.get(name, {})), loss)
