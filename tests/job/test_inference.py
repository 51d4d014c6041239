"""What an answer needs travels with the weights, and plain torch reads it, too."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import shardtrain
from shardtrain import data
from shardtrain.config.errors import UserError
from shardtrain.config.schema import typed
from shardtrain.job.build import completed
from shardtrain.job.inference import Inference, inference_of
from shardtrain.job.model import model_notes, plain_model

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
    head, trains = model_notes(model, config.model, resumed=False)
    assert head == "model.reset_head: fc is new, all else is from x.pth"
    assert trains == "model.freeze: 5,130 of 11,172,810 parameters are trained"
    assert model_notes(model, config.model, resumed=True) == [trains]
    config, _, model, _ = trained(composed("model=resnet18"), on="meta")
    assert model_notes(model, config.model, resumed=False) == []


def exported(inference: Inference, model: torch.nn.Module, folder: Path) -> Path:
    """Write what an export writes."""
    save_file(model.state_dict(), folder / "x.safetensors")
    (folder / "x.safetensors.json").write_text(json.dumps(asdict(inference)))
    return folder / "x.safetensors"


def answers(inference: Inference, model: torch.nn.Module, image: Path, folder: Path) -> tuple[str, Any]:
    """Return the class of ``image`` and its logits, as `load_exported` has them."""
    loaded, prepare, classes = shardtrain.load_exported(exported(inference, model, folder))
    logits = loaded(prepare(Image.open(image)))
    return classes[int(logits.argmax())], logits


def plain_answer(file: Path, image: Path) -> str:
    """Return the class of ``image`` that docs/example/classify.py prints, in a process of its own."""
    program = (Path(__file__).parents[2] / "docs/example/classify.py").read_text()
    program += "\nassert not [name for name in sys.modules if name.startswith('shardtrain')]"
    done = subprocess.run(
        [sys.executable, "-c", program, file, image], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@torch.no_grad()
def test_an_export_answers_as_the_evaluation_does(tmp_path: Path) -> None:
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
    assert name == inference.classes[int(expected.argmax())] == plain_answer(tmp_path / "x.safetensors", file)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["resnet18", "vit_cifar", pytest.param("mobilenet_v3_small", marks=pytest.mark.long)]
)
def test_an_export_answers_for_small_grey_images_resized(tmp_path: Path, name: str) -> None:
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
    if name != "vit_cifar":
        assert "shardtrain" not in json.dumps(asdict(inference))
        assert plain_answer(tmp_path / "x.safetensors", tmp_path / "digit.png") == printed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": "os.system", "keywords": {"command": "touch planted"}}, r"only builders in .* are calle"),
        ({"target": "mymodels.build"}, r"unless the command has allow=\[mymodels\]"),
        ({"changes": {"conv1": {"layer": "Linear"}}}, r"x.safetensors.json: 'Linear'; expected what shardtr"),
        ({"keywords": {"classes": 3}}, r"x.safetensors.json: .*; expected what shardtrain.export writes"),
        ({"keywords": {"num_classes": 11}}, r"x.safetensors does not fit the model: fc.weight has shape"),
    ],
)
def test_a_record_runs_no_code_and_fits_its_weights(tmp_path: Path, change: Any, told: str) -> None:
    """Names in it are looked up in a few packages, and those of `allow`."""
    _, _, model, inference = trained(composed("model=resnet18", "data=digits"))
    file = exported(replace(inference, model=replace(inference.model, **change)), model, tmp_path)
    with pytest.raises(UserError, match=told):
        shardtrain.load_exported(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, f"{file.name}.json"]


def test_a_model_of_ones_own_is_read_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ownmodels.py").write_text(
        "from torch import nn\n"
        "def build(num_classes: int, width: int = 3) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))\n"
    )
    keys = ("model._target_=ownmodels.build", "model.width=4", "data=digits")
    _, images, model, inference = trained(composed(*keys, "allow=[ownmodels]"))
    file = exported(inference, model, tmp_path)
    loaded, prepare, classes = shardtrain.load_exported(file, allow=["ownmodels"])
    pixels, _ = images.val[[0]]
    image = Image.fromarray(pixels[0, 0].numpy())
    with torch.no_grad():
        assert torch.equal(loaded(prepare(image)), model(prepare(image)))
    assert classes == inference.classes
    with pytest.raises(UserError, match=r"unless the command has allow=\[ownmodels\]"):
        shardtrain.load_exported(file)
