"""Say what an answer needs beside the weights, and write it as a program without this package.

An `Inference` is made once, when data and model are known. It goes into each checkpoint's manifest, into
result.json and, by `shardtrain.export`, into a file beside the exported weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

from shardtrain.job.config import Config
from shardtrain.job.errors import UserError
from shardtrain.job.model import target_node
from shardtrain.job.preprocessing import Preprocessing
from shardtrain.job.target import RECIPES, find_target, keywords_of

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
TIMM = "timm.create_model"


@dataclass(frozen=True, kw_only=True)
class Call:
    """Hold the call that builds the model: torchvision's own for its models, which needs no other package."""

    target: str
    keywords: dict[str, Any]
    changes: dict[str, str]  # submodules that are replaced afterwards, by name: calls as Python writes them


@dataclass(frozen=True, kw_only=True)
class Inference(Preprocessing):
    """Hold what turns an image into the name of a class, beside the weights.

    ``classes`` has one name per output of the model.
    """

    model: Call
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


def call_of(keys: Mapping[str, Any], model: nn.Module, allow: Sequence[str]) -> Call:
    """Return the call that builds ``model``, of the config group ``keys``."""
    target = str(keys["_target_"])
    name = str(keys.get("name"))
    is_recipe = target.startswith(f"{RECIPES}.")
    if (
        is_recipe
        and type(model).__module__.startswith(f"{models.__name__}.")
        and name in models.list_models()
    ):
        return _torchvision_call(name, model, int(keys["num_classes"]))
    function = find_target(target, "model", nn.Module, allow)
    keywords = keywords_of(target_node(keys), "model", function)
    if target == TIMM:  # weights of others are not needed under those of the run
        keywords.pop("pretrained", None)
    return Call(target=target, keywords=keywords, changes={})


def _torchvision_call(name: str, model: nn.Module, classes: int) -> Call:
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
            changes[place] = f"torch.nn.{part!r}"
    return Call(target=f"torchvision.models.{name}", keywords=keywords, changes=changes)


def program(inference: Inference, weights: Path, card: Path, image: str = "image.png") -> list[str]:
    """Return six lines of Python that print the class of ``image``, without this package.

    weights: a file of an export, or a folder that timm loads. card: this `Inference` as JSON. Without lines
    if Pillow has no images of that number of channels.
    """
    mode = MODES.get(inference.channels)
    if mode is None:
        return []
    call = inference.model
    packages = ["json", "pathlib", "torch", "PIL.Image", "torchvision.transforms.v2 as v2"]
    packages.append(call.target.rpartition(".")[0])
    keywords = ", ".join(f"{key}={value!r}" for key, value in call.keywords.items())
    model = f"model = {call.target}({keywords})"
    for place, layer in call.changes.items():
        model += f"; model.set_submodule({place!r}, {layer})"
    state = f"torch.load({str(weights)!r}, weights_only=True)"
    if weights.suffix == ".safetensors":
        packages.append("safetensors.torch")
        state = f"safetensors.torch.load_file({str(weights)!r})"
    load = f"model.eval().load_state_dict({state})"
    if weights.is_dir():
        model = f"model = {TIMM}({f'local-dir:{weights}'!r}, pretrained=True)"
        load = "model.eval()"
    return [
        f"import {', '.join(packages)}",
        model,
        load,
        f"prepare = v2.Compose([{', '.join(_transforms(inference))}])",
        f"pixels = prepare(PIL.Image.open({image!r}).convert({mode!r}))[None]",
        f'print(json.loads(pathlib.Path({str(card)!r}).read_text())["classes"][int(model(pixels).argmax())])',
    ]


def mode_of(inference: Inference) -> str:
    """Return Pillow's mode of images of that number of channels. Raises UserError where it has none."""
    if inference.channels not in MODES:
        raise UserError(
            f"the run's images have {inference.channels} channels; files have {', '.join(map(str, MODES))}"
        )
    return MODES[inference.channels]


def transform_of(inference: Inference) -> Callable[[Image.Image], Tensor]:
    """Return the transforms that `program` has, from an image of Pillow to the model's input."""
    from torchvision.transforms import v2  # here, since it takes a second to import

    # The lines that a user gets are what runs here, so both give the same numbers.
    names = {"torch": torch, "v2": v2}
    return v2.Compose([eval(text, names) for text in _transforms(inference)])  # type: ignore[no-any-return]


def _transforms(inference: Inference) -> list[str]:
    """Write the calls of torchvision's transforms, which turn an image of Pillow into the model's input."""
    side = inference.image_size
    how = f"interpolation=v2.InterpolationMode.{inference.interpolation.upper()}"
    pixels = ["v2.PILToTensor()", "v2.ToDtype(torch.float32, scale=True)"]
    normal = f"v2.Normalize({[*inference.mean]}, {[*inference.std]})"
    if inference.resize is None:
        return [*pixels, normal, f"v2.Resize([{side}, {side}], {how})"]
    return [f"v2.Resize({inference.resize}, {how})", f"v2.CenterCrop({inference.crop})", *pixels, normal]
