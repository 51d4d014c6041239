"""Hydra's config groups: the YAML files here, what they say, and `model`, which is torchvision's own list."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from torchvision import models

from shardtrain.job.schema import not_valid

KEY = re.compile(r"( *)(?:(\w+):)?[^#]*(#.*)?")  # in a line of YAML: indentation, key, comment


@contextmanager
def registered() -> Iterator[None]:
    """Inside, `model=NAME` is valid for every classification model of torchvision and small transformers.

    Hydra's store is one for the whole process; other programs have keys of that name.
    """
    shared = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("models.yaml")))
    assert isinstance(shared, dict)
    for name in models.list_models(module=models):
        _store(name, "classifier", shared, name=name, stem="auto", zero_init_residual=False)
    _store("vit_cifar", "vit", shared, patch=4, layers=7, heads=12, width=384, mlp_width=384)
    try:
        yield
    finally:
        ConfigStore.instance().repo.pop("model")


# What to say of a key that other programs have, by its last part. Keys of another section need no entry.
_RANKS = "the launcher decides: torchrun --nproc-per-node N [--nnodes M]"
_MIXED = "did you mean parallel.precision=bf16?"
_RESUME = "did you mean resume=PATH?"
HINTS = {
    **dict.fromkeys(
        ("world", "world_size", "nproc", "gpus", "n_gpus", "num_gpus", "devices", "ranks"), _RANKS
    ),
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "local_rank", "master_addr", "master_port"), _RANKS),
    **dict.fromkeys(("amp", "use_amp", "fp16", "bf16", "half", "mixed_precision", "autocast"), _MIXED),
    **dict.fromkeys(("checkpoint_path", "ckpt", "ckpt_path", "resume_from", "load_from"), _RESUME),
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "did you mean optim.lr?"),
    **dict.fromkeys(("wd", "l2"), "did you mean optim.weight_decay?"),
    **dict.fromkeys(("bs", "batch", "batchsize", "global_batch_size"), "did you mean train.batch_size?"),
    **dict.fromkeys(("n_epochs", "num_epochs", "max_epochs"), "did you mean train.epochs?"),
    **dict.fromkeys(("steps", "num_steps", "max_iters", "iterations"), "did you mean train.max_steps?"),
    **dict.fromkeys(("num_workers", "n_workers"), "did you mean data.workers?"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps"), "did you mean train.accumulate?"),
    **dict.fromkeys(
        ("grad_clip", "clip", "max_grad_norm", "clip_norm"), "did you mean train.clip_grad_norm?"
    ),
    **dict.fromkeys(("warmup", "warmup_steps", "num_warmup_steps"), "did you mean sched.warmup_epochs?"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "did you mean sched=cosine?"),
    **dict.fromkeys(("optimizer", "opt"), "did you mean optim=sgd?"),
    **dict.fromkeys(("dataset", "dataset_name"), "did you mean data=digits?"),
    **dict.fromkeys(("data_dir", "data_path", "dataset_path", "datadir", "path"), "did you mean data.root?"),
    "root": "sets of files have data.root: data=imagefolder, cifar10, …",
    **dict.fromkeys(("arch", "architecture", "model_name", "backbone"), "did you mean model=resnet18?"),
    **dict.fromkeys(("pretrained", "init_from"), "did you mean model.weights=FILE?"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "log_dir", "logdir"), "did you mean run.dir?"),
    **dict.fromkeys(("name", "exp_name", "experiment"), "did you mean run.name?"),
    **dict.fromkeys(("save_every", "save_freq", "checkpoint_every"), "did you mean checkpoint.every_steps?"),
    **dict.fromkeys(
        ("fsdp", "sharding", "strategy"), "every model is sharded over all ranks; see --help parallel"
    ),
    **dict.fromkeys(("cpu_offload", "offload_params"), "did you mean parallel.offload?"),
    **dict.fromkeys(
        ("gradient_checkpointing", "grad_checkpoint"), "did you mean parallel.activation_checkpoint?"
    ),
    **dict.fromkeys(
        ("wandb", "use_wandb", "logger"), "TensorBoard alone is written; see monitor.tensorboard"
    ),
    **dict.fromkeys(("torch_compile", "compile_model"), "did you mean parallel.compile?"),
    **dict.fromkeys(("momentum_decay", "beta1", "beta2", "adam_beta1"), "did you mean optim.betas?"),
}


def _store(model: str, function: str, shared: Mapping[Any, Any], **keys: Any) -> None:
    node = {"_target_": f"shardtrain.recipes.models.{function}", **keys, **shared}
    ConfigStore.instance().store(group="model", name=model, node=node)


# What Hydra says of an override, by its first words, and what that means here.
REWORDED = {
    "Ambiguous value": "several values are several runs, which take -m; a list is [a,b]",
    "Sweep parameters": "several values are several runs, which take -m",
    "Could not append": "the key is there already: leave out the +",
}


def hint(key: str, config: DictConfig) -> str:
    """Return what to say of a ``key`` that there is not: where else one has its name, or what is meant."""
    last = key.rpartition(".")[2]
    found = [
        f"{name}.{last}"
        for name, section in config.items()
        if isinstance(section, DictConfig) and last in section
    ]
    return HINTS.get(last) or next((f"did you mean {each}?" for each in found if each != key), "")


def described(config: DictConfig, folders: Sequence[Path], section: str = "") -> str:
    """Return ``config``, with what the files in ``folders`` say of its keys; or one ``section`` alone."""
    OmegaConf.set_struct(config, False)
    around = config.pop("hydra").help
    if section and section not in config:
        raise not_valid(f"--help {section}: there is no such group", section, map(str, config))
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    chosen = {group.get("name") for group in config.values() if isinstance(group, DictConfig)}
    said: dict[str, str] = {}
    for file in sorted(files, key=lambda file: file.stem not in chosen):
        shared = {"images": "data.", "photos": "data.", "models": "model."}
        place = shared.get(file.stem, "") if file.parent in folders else f"{file.parent.name}."
        for key, comment in _keys(file.read_text()):
            said.setdefault(place + key, comment)
    text = OmegaConf.to_yaml(OmegaConf.create({section: config[section]}) if section else config)
    keys = zip(text.splitlines(), _keys(text), strict=True)
    described = "\n".join(f"{line:<38}  {said.get(key, '')}".rstrip() for line, (key, _) in keys)
    return described if section else f"{around.header}\n{described}\n\n{around.footer}"


def _keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield the key that each line of YAML sets, in full, and the comment behind it."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, name, comment = KEY.match(line).groups("")  # type: ignore[union-attr]
        above = [entry for entry in above if entry[0] < len(indent)] if name else above
        above += [(len(indent), name)] if name else []
        yield ".".join(each for _, each in above) if name else "", comment


def recipe_table(folders: Iterable[Path]) -> str:
    """Return a line for each recipe in ``folders``: name, published accuracy, first line of its card."""
    rows = []
    for file in sorted(file for folder in folders for file in (folder / "recipe").glob("*.yaml")):
        accuracy = OmegaConf.select(OmegaConf.load(file), "reference.accuracy")
        comments = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
        title = next((text for text in comments if text and not text.startswith("@package")), "")
        rows.append((file.stem, "" if accuracy is None else f"{accuracy:.2f} %", title))
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {claim:>7}  {title}".rstrip() for name, claim, title in rows)
