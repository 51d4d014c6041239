"""What inference needs beside the weights, written and read again.

An `Inference` is made once, when data and model are known. It goes into each checkpoint's manifest, into
result.json and, by `shardtrain.export`, as JSON into a file beside the exported weights, their card. It holds
numbers and names, no program: docs/example/classify.py is one that reads it without this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, path_of, plain_file, reading
from shardtrain.config.format import first_of
from shardtrain.config.schema import typed
from shardtrain.config.target import RECIPES, find_target, instantiate, keywords_of
from shardtrain.data.preprocessing import Preprocessing, numbered
from shardtrain.job.model import load_weights, read_weights, target_node
from shardtrain.launch.ranks import on_rank_0

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
TIMM = "timm.create_model"
# Of a convolution's keywords those that are its attributes.
CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
LAYERS = {"Conv2d": nn.Conv2d, "Identity": nn.Identity}  # that recipes put into a model of torchvision's


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """The call that builds the model: torchvision's own for its models, which needs no other package."""

    target: str
    keywords: dict[str, Any]
    changes: dict[str, Any]  # layers that are replaced afterwards, by place: {"layer": "Conv2d", keywords}


@dataclass(frozen=True, kw_only=True)
class Inference(Preprocessing):
    """What turns an image into the name of a class, beside the weights.

    ``classes`` has one name per output of the model.
    """

    model: ModelCall
    crop: int | None  # pixels per side of the centre that is cut out; None: nothing is cut off


def inference_of(config: Config, preprocessing: Preprocessing, model: nn.Module) -> Inference:
    """Return what answers of ``model``, unsharded, need. ``config``: completed from the data set."""
    own = vars(preprocessing)
    classes = preprocessing.classes
    outputs = int(config.model.get("num_classes") or len(classes))
    numbers = range(len(classes), outputs)  # outputs for classes that the data set does not have
    crop = None if preprocessing.resize is None else preprocessing.image_size
    call = call_of(config.model, model, config.allow)
    return Inference(**{**own, "classes": (*classes, *map(str, numbers))}, model=call, crop=crop)


def call_of(keys: Mapping[str, Any], model: nn.Module, allow: Sequence[str]) -> ModelCall:
    """Return the call that builds ``model``, of the config group ``keys``."""
    target = str(keys["_target_"])
    name = str(keys.get("name"))
    by_torchvision = name in models.list_models() and type(model).__module__.startswith(f"{models.__name__}.")
    if by_torchvision and target.startswith(f"{RECIPES}."):
        return _torchvision_call(name, model, int(keys["num_classes"]))
    function = find_target(target, "model", nn.Module, allow)
    keywords = keywords_of(target_node(keys), "model", function)
    if target == TIMM:  # weights of others are not needed under those of the run
        keywords.pop("pretrained", None)
    return ModelCall(target=target, keywords=keywords, changes={})


def _torchvision_call(name: str, model: nn.Module, classes: int) -> ModelCall:
    """Return torchvision's own call, with the layers in which ``model`` differs from its result."""
    keywords: dict[str, Any] = {"num_classes": classes}
    if isinstance(model, models.VisionTransformer):
        keywords["image_size"] = model.image_size
    if isinstance(model, models.GoogLeNet | models.Inception3):
        keywords |= {"aux_logits": False, "init_weights": False}
    with torch.device("meta"):
        usual = dict(models.get_model(name, weights=None, **keywords).named_modules())
    changes = {}
    for place, part in model.named_modules():
        is_layer = type(part).__module__.startswith("torch.nn.modules.") and not [*part.children()]
        if is_layer and repr(part) != repr(usual.get(place)):
            changes[place] = _keywords_of_layer(part)
    return ModelCall(target=f"{models.__name__}.{name}", keywords=keywords, changes=changes)


def _keywords_of_layer(part: nn.Module) -> dict[str, Any]:
    """Return the class of a layer and the keywords that build it."""
    name = type(part).__name__
    assert name in LAYERS, f"recipes put no {name} into a model of torchvision's"
    if not isinstance(part, nn.Conv2d):
        return {"layer": name}
    keywords: dict[str, Any] = {"bias": part.bias is not None}
    for key in CONVOLUTION:
        value = getattr(part, key)
        keywords[key] = [*value] if isinstance(value, tuple) else value  # as JSON has it
    return {"layer": name, **keywords}


def built(call: ModelCall, allow: Sequence[str] = ()) -> nn.Module:
    """Build a model by its ``call``. Raises UserError unless an allowed package defines what is called."""
    package, _, name = call.target.rpartition(".")
    if package != models.__name__ or name not in models.list_models():
        made: nn.Module = instantiate({"_target_": call.target, **call.keywords}, "model", nn.Module, allow)
        return made
    model: nn.Module = models.get_model(name, weights=None, **call.keywords)
    for place, layer in call.changes.items():
        keywords = dict(layer)
        model.set_submodule(place, LAYERS[keywords.pop("layer")](**keywords))
    return model


def load_exported(
    file: str | Path, allow: Sequence[str] = ()
) -> tuple[nn.Module, Callable[[Image.Image], Tensor], tuple[str, ...]]:
    """Return what `shardtrain.load_exported` does."""
    path = Path(file)
    with reading(f"{path}.json", "expected what shardtrain.export writes beside weights"):
        card = typed(Inference, json.loads(plain_file(Path(f"{path}.json")).read_text(encoding="utf-8")), "")
        model = built(card.model, allow)
    load_weights(model, read_weights(path), path)
    transform = transform_of(card)

    def prepare(image: Image.Image) -> Tensor:
        return transform(image.convert(mode_of(card)))[None]

    return model.eval(), prepare, card.classes


def mode_of(inference: Inference) -> str:
    """Return Pillow's mode of images of that number of channels. Raises UserError where it has none."""
    if inference.channels not in MODES:
        raise UserError(
            f"the run's images have {inference.channels} channels; files have {', '.join(map(str, MODES))}"
        )
    return MODES[inference.channels]


def transform_of(inference: Inference) -> Callable[[Image.Image], Tensor]:
    """Return torchvision's transforms that turn an image of Pillow into the model's input."""
    from torchvision.transforms import v2  # here, since it takes a second to import

    how = v2.InterpolationMode(inference.interpolation)
    pixels = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([*inference.mean], [*inference.std]),
    ]
    if inference.resize is None:
        side = inference.image_size
        steps = [*pixels, v2.Resize([side, side], how)]
    else:
        steps = [v2.Resize(inference.resize, how), v2.CenterCrop(inference.crop), *pixels]
    return v2.Compose(steps)  # type: ignore[no-any-return]


def as_on_card(config: Config, own: Preprocessing, data_set: str) -> tuple[Preprocessing, list[str]]:
    """Return ``own`` with the classes, mean and std of the card of `model.weights`; and lines that say so.

    Keys of the command, and names that the ``data_set`` has, come first; other classes are refused. Without a
    card ``own`` is returned as it is. Collective. Raises UserError for a card that cannot be read.
    """
    weights = config.model.get("weights")
    card = _card(str(weights)) if weights is not None else None
    if card is None:
        return own, []
    changes: dict[str, Any] = {}
    if not config.model.get("reset_head", False):
        changes["classes"] = _classes(card, own.classes, data_set, f"{weights}.json")
    notes = []
    for name in ("mean", "std"):
        on_card = getattr(card, name)
        if getattr(config.data, name) is None and card.channels == own.channels:
            changes[name] = on_card
            values = ",".join(f"{value:.4g}" for value in on_card)
            notes.append(f"data.{name}=[{values}] is taken from {weights}.json")
    return replace(own, **changes), notes


def _card(weights: str) -> Inference | None:
    """Return rank 0's card of the file ``weights``; None if it has none. Collective."""
    file = Path(f"{path_of('model.weights', weights)}.json")

    def read() -> Any:
        if file.is_file():
            with reading(str(file), "expected what shardtrain.export writes beside weights"):
                values = json.loads(plain_file(file).read_text(encoding="utf-8"))
                # Other programs' files have such names, too.
                if isinstance(values, Mapping) and "classes" in values:
                    typed(Inference, values, "")
                    return values
        return None

    card: Inference | None = typed(Inference | None, on_rank_0(read), "")
    return card


def _classes(card: Inference, own: tuple[str, ...], data_set: str, source: str) -> tuple[str, ...]:
    """Return the classes of the card for a data set without names of its own. Raises UserError for others."""
    count = len(own)
    on_card = card.classes[:count]
    if own in (on_card, numbered(count)) and len(on_card) == count:
        return on_card
    if on_card == numbered(len(on_card)) or len(on_card) < count:
        return own  # names that say nothing; a head of another size is refused by the weights
    own_names = first_of([f"{number}: {name}" for number, name in enumerate(own)])
    raise UserError(
        f"{source}: its classes are {first_of([*on_card])}, and those of {data_set} are {own_names}; "
        "model.reset_head=true makes the last layer anew"
    )
