"""Models from transformers, timm and torchvision train as a replica averaged by hand does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pool import each_rank
from wild import MARKS, require_as_replicas, train

pytestmark = MARKS
VOCABULARY = 53


def tokens(**more: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 11))
    return {"input_ids": ids, "labels": ids, **more}


def images(size: int = 32, n: int = 3) -> torch.Tensor:
    return torch.randn(n, 3, size, size)


def classified_images() -> dict[str, torch.Tensor]:
    return {"pixel_values": images(), "labels": torch.randint(2, (3,))}


def pairs() -> dict[str, Any]:
    return {"input_ids": tokens()["input_ids"], "pixel_values": images(n=2), "return_loss": True}


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
    "Qwen3ForCausalLM": (grouped(), tokens),
    "Gemma2ForCausalLM": (grouped(), tokens),
    # grouped products want rows of a multiple of 16 bytes
    "MixtralForCausalLM": (grouped(hidden_size=28, intermediate_size=36, num_local_experts=3), tokens),
    "GPTNeoXForCausalLM": (text(), tokens),
    "OPTForCausalLM": (text(ffn_dim=37, word_embed_proj_dim=30), tokens),
    "BloomForCausalLM": (text(n_layer=2, n_head=5), tokens),
    "MambaForCausalLM": (text(state_size=5), tokens),
    "BertForMaskedLM": (text(), tokens),
    "RobertaForMaskedLM": (text(), tokens),
    "DistilBertForMaskedLM": (text(dim=30, hidden_dim=37, n_layers=2, n_heads=5), tokens),
    "AlbertForMaskedLM": (text(embedding_size=7), tokens),
    "ElectraForMaskedLM": (text(embedding_size=7), tokens),
    "DebertaV2ForMaskedLM": (text(relative_attention=True, pos_att_type=["p2c", "c2p"]), tokens),
    "T5ForConditionalGeneration": (text(d_kv=7, d_ff=37, num_heads=4), tokens),
    "BartForConditionalGeneration": (translator(), tokens),
    "WhisperForConditionalGeneration": (
        translator(num_mel_bins=9, max_source_positions=20, max_target_positions=31),
        speech,
    ),
    "Wav2Vec2ForSequenceClassification": (sounds(layerdrop=0.0), sound),
    "ViTForImageClassification": (picture(), classified_images),
    "ViTMAEForPreTraining": (
        picture(decoder_hidden_size=28, decoder_num_hidden_layers=2, decoder_num_attention_heads=4),
        lambda: {"pixel_values": images()},
    ),
    "Dinov2ForImageClassification": (picture(), classified_images),
    "SwinForImageClassification": (
        {"image_size": 32, "embed_dim": 15, "depths": [2, 2], "num_heads": [3, 3], "window_size": 4},
        classified_images,
    ),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [7, 9, 11, 13], "depths": [1, 1, 2, 1]},
        classified_images,
    ),
    "SegformerForImageClassification": (
        {"hidden_sizes": [7, 10, 14, 21], "num_attention_heads": [1, 2, 2, 3], "depths": [1, 1, 1, 1]},
        classified_images,
    ),
    "CLIPModel": ({"text_config": text(), "vision_config": picture(), "projection_dim": 15}, pairs),
    "SiglipModel": ({"text_config": text(projection_size=30), "vision_config": picture()}, pairs),
}

# name in timm.models: its arguments
TIMM: dict[str, dict[str, Any]] = {
    "test_resnet": {},
    "test_vit": {},
    "test_efficientnet": {},
    "test_convnext": {},
    "test_nfnet": {},
    "test_byobnet": {},
    "test_mambaout": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "ghostnet_050": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 28, "depth": 3, "num_heads": 4},
    "MlpMixer": {"img_size": 32, "patch_size": 8, "embed_dim": 27, "num_blocks": 3},
    "MetaFormer": {"dims": (7, 9, 11, 13), "depths": (1, 1, 2, 1)},
    "mobilevit_xxs": {},
}


def detection(model: nn.Module) -> torch.Tensor:
    at = torch.rand(2, 2) * 40
    target = {"boxes": torch.cat([at, at + 15], dim=1), "labels": torch.tensor([1, 2])}
    return sum(model(list(images(64, n=2)), [target, target]).values())


def segmentation(model: nn.Module) -> torch.Tensor:
    out = model(images(64, n=2))
    return sum(F.cross_entropy(part, torch.randint(5, (2, 64, 64))) for part in out.values())


def with_auxiliary_heads(model: nn.Module) -> torch.Tensor:
    out = model(images(64))
    return sum(F.cross_entropy(part, torch.tensor([0, 1, 2])) for part in out)


DETECTOR = {"weights_backbone": None, "min_size": 64, "max_size": 96}
# name: keywords and loss
TORCHVISION: dict[str, tuple[dict[str, Any], Callable[[nn.Module], torch.Tensor]]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": (DETECTOR, detection),
    "ssdlite320_mobilenet_v3_large": ({"weights_backbone": None}, detection),
    "lraspp_mobilenet_v3_large": ({"weights_backbone": None}, segmentation),
    "googlenet": ({"aux_logits": True, "init_weights": False}, with_auxiliary_heads),
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


@pytest.mark.parametrize("name", TIMM)
@each_rank(2, transport="auto")
def test_timm(name: str) -> None:
    import timm.models

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(images()), torch.randint(11, (3,)))

    compare(lambda: getattr(timm.models, name)(num_classes=11, **TIMM[name]), loss)


@pytest.mark.parametrize("name", TORCHVISION)
@each_rank(2, transport="auto")
def test_torchvision(name: str) -> None:
    import torchvision

    options, loss = TORCHVISION[name]
    compare(lambda: torchvision.models.get_model(name, weights=None, num_classes=5, **options), loss)
