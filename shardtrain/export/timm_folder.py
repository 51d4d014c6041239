"""Describe an exported model as timm does, so that ``timm.create_model("local-dir:FOLDER")`` builds it.

Its own file, since the format is another package's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardtrain.job.inference import Inference

# What timm knows of a model beside its weights: names of layers and sizes.
OF_THE_MODEL = ("fixed_input_size", "pool_size", "first_conv", "classifier")


def timm_config(inference: Inference, model: nn.Module) -> dict[str, Any]:
    """Return the content of timm's `config.json`. ``model``: timm's, unsharded."""
    args = dict(inference.model.keywords)
    known: Any = getattr(model, "pretrained_cfg", {})
    side = inference.image_size
    return {
        "architecture": args.pop("model_name").partition(".")[0],
        "num_classes": args.pop("num_classes"),
        "label_names": [*inference.classes],
        "model_args": args,
        "pretrained_cfg": {
            **{key: known[key] for key in OF_THE_MODEL if key in known},
            "input_size": [inference.channels, side, side],
            "interpolation": inference.interpolation,
            "crop_pct": 1.0 if inference.resize is None else side / inference.resize,
            "crop_mode": "squash" if inference.resize is None else "center",
            "mean": [*inference.mean],
            "std": [*inference.std],
            "custom_load": False,
        },
    }
