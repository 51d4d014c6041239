"""What an answer needs travels with the weights, and six lines without this package use it."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import models

from shardtrain.export.timm_folder import timm_config
from shardtrain.job import data
from shardtrain.job.build import completed
from shardtrain.job.inference import Inference, inference_of, program
from shardtrain.job.model import model_notes, plain_model
from shardtrain.job.schema import typed

from tiny import CPU, composed, write_folders


def trained(config: Any, on: str = "cpu") -> tuple[Any, data.DataSet, torch.nn.Module, Inference]:
    """Return the completed configuration, its images, an untrained model and what its answers need."""
    images = data.load(config.data, config.allow)
    config = completed(config, images)
    torch.manual_seed(0)
    with torch.device(on):
        model = plain_model(config.model, config.allow).eval()
    return config, images, model, inference_of(config, images.preprocessing, model)


@pytest.mark.long
def test_the_first_lines_say_what_the_keys_of_the_model_have_chosen() -> None:
    tuning = ("model.weights=x.pth", "model.reset_head=true", "model.freeze=[body]")
    config, _, model, _ = trained(composed("model=resnet18", *tuning), on="meta")
    small, head, trains = model_notes(model, config.model, resumed=False)
    assert small.startswith("model.stem=auto is small: a 3×3 convolution of stride 1, no pooling; ")
    assert head == "model.reset_head: fc is new, all else is from x.pth"
    assert trains == "model.freeze: 5,130 of 11,172,810 parameters are trained"
    assert model_notes(model, config.model, resumed=True) == [small, trains]
    for words, expected in (
        (("data.image_size=65",), ["model.stem=auto is standard, torchvision's own"]),
        (("model.stem=small",), []),
    ):
        config, _, model, _ = trained(composed("model=resnet18", *words), on="meta")
        assert model_notes(model, config.model, resumed=False) == expected


def answers(inference: Inference, model: torch.nn.Module, image: Path, folder: Path) -> tuple[str, Any]:
    """Run the program on ``image``; return what it prints, and its logits."""
    torch.save(model.state_dict(), folder / "x.pth")
    (folder / "x.json").write_text(json.dumps(asdict(inference)))
    lines = program(inference, folder / "x.pth", folder / "x.json", str(image))
    assert len(lines) == 6
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed, torch.no_grad():
        exec("\n".join(lines), scope)
        logits = scope["model"](scope["pixels"])
    return printed.getvalue().strip(), logits


@torch.no_grad()
def test_the_program_answers_as_the_evaluation_does(tmp_path: Path) -> None:
    write_folders(tmp_path)
    file = tmp_path / "val/class1/0.png"
    noise = torch.randint(0, 256, (70, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(file)
    composition = composed("model=resnet18", "data=imagefolder", "data.root=.", "data.image_size=8")
    sizes: dict[str, Any] = {"eval_size": 40, "interpolation": "bicubic"}
    photos: Any = replace(composition.data, root=str(tmp_path), **sizes)
    config, images, model, inference = trained(replace(composition, data=photos))
    assert (config.data.classes, config.data.resize) == (("class0", "class1"), 46)
    assert (inference.resize, inference.crop, inference.image_size) == (46, 40, 40)
    assert inference.mean == config.data.mean == pytest.approx((0.485, 0.456, 0.406), abs=1e-3)
    pixels, _ = images.val[[2]]
    expected = model(data.Prepare(images.preprocessing, config.data.side_in_eval, CPU)(pixels))
    name, logits = answers(inference, model, file, tmp_path)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert name == inference.classes[int(expected.argmax())]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["resnet18", "vit_cifar", pytest.param("mobilenet_v3_small", marks=pytest.mark.long)]
)
def test_the_program_answers_for_small_grey_images_resized(tmp_path: Path, name: str) -> None:
    sizes = ("model.layers=1", "model.heads=2", "model.width=8") if name == "vit_cifar" else ()
    keys = ("data=digits", "data.image_size=12", "data.mean=[0.1]", "model.num_classes=11")
    config, images, model, inference = trained(composed(f"model={name}", *keys, *sizes))
    assert (inference.channels, inference.resize, inference.crop) == (1, None, None)
    # the model has an output more than the data set has classes
    assert inference.classes == (*"0123456789", "10")
    pixels, _ = images.val[[5]]
    Image.fromarray(pixels[0, 0].numpy()).save(tmp_path / "digit.png")
    expected = model(data.Prepare(images.preprocessing, config.data.side_in_eval, CPU)(pixels))
    printed, logits = answers(inference, model, tmp_path / "digit.png", tmp_path)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert printed == str(int(expected.argmax()))
    assert typed(Inference, json.loads(json.dumps(asdict(inference))), "inference") == inference
    assert name == "vit_cifar" or "shardtrain" not in json.dumps(asdict(inference))


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit_b_32", "googlenet"])
def test_a_model_of_torchvisions_is_called_as_torchvision_does(name: str) -> None:
    config = composed(f"model={name}", "data=fake", "data.image_size=64")
    _, _, model, inference = trained(config, on="meta")
    assert inference.model.target == f"torchvision.models.{name}"
    assert inference.model.changes == {}
    with torch.device("meta"):
        plain = models.get_model(name, weights=None, **inference.model.keywords)
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    assert shapes == {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.long
def test_the_program_needs_no_package_of_this_project(tmp_path: Path) -> None:
    _, _, model, inference = trained(composed("model=resnet18", "data=digits"))
    torch.save(model.state_dict(), tmp_path / "x.pth")
    (tmp_path / "x.json").write_text(json.dumps(asdict(inference)))
    Image.new("L", (20, 30), 9).save(tmp_path / "image.png")
    lines = [
        *program(inference, Path("x.pth"), Path("x.json")),
        "import sys; print('shardtrain' in sys.modules)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, imported = done.stdout.split()
    assert name in inference.classes
    assert imported == "False"


def test_a_folder_of_timm_has_the_model_and_its_images(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    keys = ("model.model_name=resnet10t", "model.in_chans=1", "allow=[timm]", "data.image_size=32")
    _, _, model, inference = trained(composed("model._target_=timm.create_model", *keys))
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(timm_config(inference, model)))
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(images), model(images))
    how = timm.data.resolve_model_data_config(again)
    assert (how["input_size"], how["interpolation"], how["crop_mode"]) == ((1, 32, 32), "bilinear", "squash")
    assert tuple(how["mean"]) == inference.mean
    assert again.pretrained_cfg["label_names"] == [*inference.classes]
