"""Whole loops as people write them: as with replicas averaged by hand, or refused in one named line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm

import shardtrain

from pool import each_rank
from small import average_gradients, shard
from wild import MARKS, adamw, cases, require_same, seed

pytestmark = MARKS
Wrap = Callable[[nn.Module], nn.Module]
Sync = Callable[[nn.Module], None]
STEPS = range(3)


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, sync: Sync, model: nn.Module) -> None:
    optimizer.zero_grad()
    loss.backward()
    sync(model)
    optimizer.step()


def train(model: nn.Module, loss: Callable[[], torch.Tensor], sync: Sync, steps: int = 3) -> list[Any]:
    optimizer = adamw(model)
    for step in range(steps):
        seed(step)
        update(optimizer, loss(), sync, model)
    return [model]


def follow(target: nn.Module, source: nn.Module, momentum: float = 0.9) -> None:
    """Move a momentum encoder towards its source, as MoCo, BYOL and diffusion do."""
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.mul_(momentum).add_(theirs, alpha=1 - momentum)


def images(n: int = 4, size: int = 16) -> torch.Tensor:
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
    for_critic, for_generator = adamw(critic), adamw(generator)
    for step in STEPS:
        seed(step)
        made = generator(torch.randn(4, 9, 1, 1))
        loss = F.softplus(-critic(images())).mean() + F.softplus(critic(made.detach())).mean()
        update(for_critic, loss, sync, critic)
        update(for_generator, F.softplus(-critic(made)).mean(), sync, generator)
    return [generator, critic]


def moco(wrap: Wrap, sync: Sync) -> list[Any]:
    query = mlp(13, 31, 31, 7)
    key = wrap(copy.deepcopy(query).requires_grad_(False))
    query, queue = wrap(query), F.normalize(torch.ones(7, 19).cumsum(0).sin(), dim=0)
    optimizer = adamw(query)
    for step in STEPS:
        seed(step)
        x = torch.randn(4, 13)
        q = F.normalize(query(x), dim=1)
        follow(key, query)
        with torch.no_grad():
            k = F.normalize(key(x + 0.1), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.07
        update(optimizer, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)), sync, query)
        queue = torch.cat([k.T, queue], dim=1)[:, :19]
    return [query, key]


class MoCo(nn.Module):
    """As the authors wrote it: the momentum update is a part of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = mlp(13, 31, 7), mlp(13, 31, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        follow(self.encoder_k, self.encoder_q)
        return self.encoder_q(x) - self.encoder_k(x).detach()


def moco_in_forward(wrap: Wrap, sync: Sync) -> list[Any]:
    model = wrap(MoCo())
    return train(model, lambda: model(torch.randn(4, 13)).square().mean(), sync)


def byol(wrap: Wrap, sync: Sync) -> list[Any]:
    class Online(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.predictor = mlp(13, 31, 31, 7), mlp(7, 17, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(self.predictor(self.encoder(x)), dim=1)

    online = Online()
    target = wrap(copy.deepcopy(online.encoder))
    online = wrap(online)
    optimizer = adamw(online)
    for step in STEPS:
        seed(step)
        one, two = torch.randn(2, 4, 13)
        ahead = online(one), online(two)
        with torch.no_grad():
            behind = target(two), target(one)
        alike = [(a * F.normalize(b)).sum(1).mean() for a, b in zip(ahead, behind, strict=True)]
        update(optimizer, -sum(alike), sync, online)
        follow(target, online.encoder)
    return [online, target]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its authors' code does it."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()


def sam(wrap: Wrap, sync: Sync) -> list[Any]:
    model = wrap(mlp(13, 31, 31, 7))
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in STEPS:
        for act in (optimizer.first_step, optimizer.step):
            seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 13)).square().mean().backward()
            sync(model)
            act()
    return [model]


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (
            mlp(13, 31, 7),
            nn.Sequential(nn.Embedding(53, 11), nn.Flatten(), mlp(55, 31, 7)),
        )
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def clip(wrap: Wrap, sync: Sync) -> list[Any]:
    """Compare with the features of all ranks, gathered with gradients; clamp the scale after each step."""
    from torch.distributed.nn.functional import all_gather

    model = wrap(Clip())
    optimizer = adamw(model)
    labels = torch.arange(4) + 4 * dist.get_rank()
    for step in STEPS:
        seed(step)
        image, text = model(torch.randn(4, 13), torch.randint(53, (4, 5)))
        logits = model.logit_scale.exp() * image @ torch.cat(all_gather(text)).T
        update(optimizer, F.cross_entropy(logits, labels), sync, model)
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
    return [model]


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 28, 4, 4)
        self.transformer = nn.Transformer(28, 4, 2, 2, 37, batch_first=True)
        self.query_embed = nn.Embedding(100, 28)
        self.class_embed, self.bbox_embed = nn.Linear(28, 6), mlp(28, 28, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        memory = self.transformer.encoder(self.backbone(x).flatten(2).mT)
        h, out = self.query_embed.weight.expand(len(x), -1, -1), []
        for layer in self.transformer.decoder.layers:
            h = layer(h, memory)
            out.append({"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()})
        return {**out[-1], "aux_outputs": out[:-1]}


def detr(wrap: Wrap, sync: Sync) -> list[Any]:
    model = wrap(Detr())
    optimizer = adamw(model)
    for step in STEPS:
        seed(step)
        out, boxes, loss = model(images(2)), torch.rand(2, 3, 4), 0.0
        for part in (out, *out["aux_outputs"]):
            with torch.no_grad():
                match = torch.cdist(part["pred_boxes"], boxes, p=1).argmin(1)
            found = part["pred_boxes"].gather(1, match[..., None].expand(-1, -1, 4))
            loss = loss + F.l1_loss(found, boxes) + part["pred_logits"].logsumexp(-1).mean()
        update(optimizer, loss, sync, model)
    return [model]


def recurrent(wrap: Wrap, sync: Sync) -> list[Any]:
    """The root is called 400 times before one backward."""
    model = wrap(nn.LSTMCell(3, 11))

    def loss() -> torch.Tensor:
        h = c = torch.zeros(2, 11)
        for x in torch.randn(400, 2, 3):
            h, c = model(x, (h, c))
        return h.square().mean()

    return train(model, loss, sync)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 11), nn.Linear(11, 3)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(xs.shape[1], 11)
        return torch.stack([self.head(h := self.cell(x, h)) for x in xs])


def unrolled(wrap: Wrap, sync: Sync) -> list[Any]:
    model = wrap(Unrolled())

    def loss() -> torch.Tensor:
        xs = torch.randn(400, 2, 3)
        return F.mse_loss(model(xs)[:-1], xs[1:])

    return train(model, loss, sync)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.label = mlp(1, 17, 13), nn.Embedding(5, 13)
        self.body = mlp(13, 31, 31, 13)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.time(t) + self.label(y))


def diffusion(wrap: Wrap, sync: Sync) -> list[Any]:
    """Train with torch's AveragedModel and clipping; sample from the average, guided by a classifier."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, classifier = wrap(Denoiser()), wrap(mlp(13, 31, 5))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    clip_norm = shardtrain.clip_grad_norm_ if sync is nothing else clip_grad_norm_
    optimizer, for_classifier = adamw(model), adamw(classifier)
    for step in STEPS:
        seed(step)
        x, t, y, noise = torch.randn(4, 13), torch.rand(4, 1), torch.randint(5, (4,)), torch.randn(4, 13)
        optimizer.zero_grad()
        F.mse_loss(model(x * (1 - t) + noise * t, t, y), noise).backward()
        sync(model)
        clip_norm(model if sync is nothing else model.parameters(), 0.1)
        optimizer.step()
        ema.update_parameters(model)
        update(for_classifier, F.cross_entropy(classifier(x), y), sync, classifier)
    for t in (0.9, 0.5, 0.1):
        at = x.detach().requires_grad_()
        chosen = classifier(at).log_softmax(1)[torch.arange(4), y].sum()
        (slope,) = torch.autograd.grad(chosen, at)
        with torch.no_grad():
            x = x - 0.1 * ema(x, torch.full((4, 1), t), y) + 0.1 * slope
    return [model, ema.module, classifier, x]


def lora(wrap: Wrap, sync: Sync) -> list[Any]:
    import peft
    import transformers

    sizes = transformers.GPT2Config(
        vocab_size=53, n_embd=28, n_layer=3, n_head=4, n_positions=31, eos_token_id=1
    )
    base = transformers.GPT2LMHeadModel(sizes)
    options = peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.1)
    model = wrap(peft.get_peft_model(base, options))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 1, 5)
    for step in STEPS:
        seed(step)
        ids = torch.randint(53, (2, 9))
        update(optimizer, model(input_ids=ids, labels=ids).loss, sync, model)
        schedule.step()
    return [model]


def generation(wrap: Wrap, sync: Sync) -> list[Any]:
    """Policy gradient on text of the model's own, with gradient checkpointing."""
    import transformers

    sizes = {"hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 5}
    config = transformers.LlamaConfig(**sizes, vocab_size=53, pad_token_id=0, eos_token_id=None)
    model = wrap(transformers.LlamaForCausalLM(config))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = adamw(model)
    for step in STEPS:
        seed(step)
        model.eval()
        ids = model.generate(torch.randint(53, (2, 4)), max_new_tokens=5, do_sample=True)
        model.train()
        policy = Categorical(logits=model(input_ids=ids, use_cache=False).logits[:, :-1])
        update(optimizer, -(policy.log_prob(ids[:, 1:]) * torch.randn(2, 1)).mean(), sync, model)
    return [model]


def distillation(wrap: Wrap, sync: Sync) -> list[Any]:
    teacher, student = wrap(mlp(13, 63, 63, 7).eval()), wrap(mlp(13, 31, 7))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 13)
        ours = student(x).log_softmax(1)
        with torch.inference_mode():
            theirs = teacher(x).softmax(1)
        return F.kl_div(ours, theirs.clone(), reduction="batchmean")

    return [*train(student, loss, sync), teacher]


def gradient_penalty(wrap: Wrap, sync: Sync) -> list[Any]:
    critic = wrap(mlp(13, 31, 31, 1))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 13, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return train(critic, loss, sync)


def timm_recipe(wrap: Wrap, sync: Sync) -> list[Any]:
    """timm's groups without decay by dimensions, schedule, mixup and EMA; torchmetrics over all ranks."""
    import timm
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from torchmetrics.classification import MulticlassAccuracy

    model = wrap(timm.create_model("test_vit", num_classes=5, img_size=32))
    ema = timm.utils.ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.3, layer_decay=0.7)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=3, warmup_epochs=1)
    mixup, accuracy = timm.data.Mixup(num_classes=5), MulticlassAccuracy(5)
    for step in STEPS:
        seed(step)
        y = torch.randint(5, (4,))
        x, mixed = mixup(images(4, 32), y)
        out = model(x)
        update(optimizer, SoftTargetCrossEntropy()(out, mixed), sync, model)
        accuracy.update(out, y)
        ema.update(model, step=step)
        schedule.step(step + 1)
    return [model, ema.module, accuracy.compute()]


def fine_tuning(wrap: Wrap, sync: Sync) -> list[Any]:
    """Train the head, then unfreeze the body into a group of its own; penalise weights in the loss."""
    model = mlp(13, 31, 31, 7)
    model[:2].requires_grad_(False)
    model = wrap(model)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    for step in STEPS:
        seed(step)
        if step == 1:
            model[:2].requires_grad_(True)
            optimizer.add_param_group({"params": model[:2].parameters(), "lr": 1e-3})
        penalty = 1e-2 * sum(p.square().sum() for p in model.parameters())
        update(optimizer, model(torch.randn(4, 13)).square().mean() + penalty, sync, model)
    return [model]


def layer_drop(wrap: Wrap, sync: Sync) -> list[Any]:
    """Each rank skips blocks of its own, as wav2vec 2.0 does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x if torch.rand(()) < 0.5 else block(x)
            return x + 0 * self.blocks[0](x)

    model = wrap(Net())
    return train(model, lambda: model(torch.randn(4, 13)).square().mean(), sync, steps=9)


LOOPS = [
    dcgan,
    moco,
    moco_in_forward,
    byol,
    sam,
    clip,
    detr,
    recurrent,
    unrolled,
    diffusion,
    lora,
    generation,
]
LOOPS += [distillation, gradient_penalty, timm_recipe, fine_tuning, layer_drop]
REFUSED = {
    "sam": "Sam cannot be tried on pieces of parameters",
    "gradient_penalty": r"double backward \(create_graph=True\) is not supported",
    "layer_drop": "ranks 0 and 1 take different paths: rank 0 is gathering blocks.0|rank . has ended",
}
BROKEN = {
    "fine_tuning": "a penalty on parameters in the same backward fails without a name",
}


def nothing(model: nn.Module) -> None:
    """Average nothing: a sharded model's gradients are means."""


@pytest.mark.parametrize("name", cases([loop.__name__ for loop in LOOPS], BROKEN))
@each_rank(2)
def test_loops(name: str) -> None:
    loop = globals()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        warnings.filterwarnings("error", message=".* cannot be tried on pieces")
        torch.manual_seed(0)
        replicas = loop(lambda model: model, average_gradients)
        torch.manual_seed(0)
        if name in REFUSED:
            with pytest.raises(Exception, match=REFUSED[name]):
                loop(shard, nothing)
            return
        models = loop(shard, nothing)
    for model, replica in zip(models, replicas, strict=True):
        if isinstance(model, torch.Tensor):
            torch.testing.assert_close(model, replica, rtol=0.0, atol=0.0)
        else:
            require_same(model, replica)
