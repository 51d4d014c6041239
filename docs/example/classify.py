"""Print the class of an image by an export of a torchvision model, without shardtrain: FILE IMAGE."""

import json
import pathlib
import sys

import safetensors.torch
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

file, image = sys.argv[1:]
card = json.loads(pathlib.Path(f"{file}.json").read_text())
call = card["model"]
model = torchvision.models.get_model(call["target"].rpartition(".")[2], **call["keywords"])
for place, keywords in call["changes"].items():
    model.set_submodule(place, getattr(torch.nn, keywords.pop("layer"))(**keywords))
model.load_state_dict(safetensors.torch.load_file(file))
how = v2.InterpolationMode(card["interpolation"])
steps = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(card["mean"], card["std"])]
if card["resize"] is None:
    steps = [*steps, v2.Resize([card["image_size"]] * 2, how)]
else:
    steps = [v2.Resize(card["resize"], how), v2.CenterCrop(card["crop"]), *steps]
mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[card["channels"]]
pixels = v2.Compose(steps)(Image.open(image).convert(mode))
print(card["classes"][int(model.eval()(pixels[None]).argmax())])
