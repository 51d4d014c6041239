"""Names that were removed: each says what to use instead."""

import pytest

import shardtrain

REMOVED = {
    "compile_units": r"for block in shardtrain.blocks\(model\).values\(\): block.compile\(\)",
    "checkpoint_activations": r"call, before shard\(\), torch's apply_activation_checkpointing or ",
    "mean_over_samples": r"by \(this rank's samples \* ranks / samples of all ranks\) \(docs/",
    "load_weights": r"storage_reader=HuggingFaceStorageReader\(directory\)\), which reads .safetensors",
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_what_to_use_instead(name: str) -> None:
    message = rf"^shardtrain\.{name} was removed; .*{REMOVED[name]}"
    with pytest.raises(ValueError, match=message):
        getattr(shardtrain, name)
    with pytest.raises(ValueError, match=message):
        exec(f"from shardtrain import {name}")


@pytest.mark.parametrize("name", ["Flat", "Gradient"])
def test_what_moved_says_where_it_is(name: str) -> None:
    message = rf"^shardtrain\.comm\.{name} was moved; use shardtrain\.comm\.Vector$"
    with pytest.raises(ValueError, match=message):
        getattr(shardtrain.comm, name)
    with pytest.raises(ValueError, match=message):
        exec(f"from shardtrain.comm import {name}")


def test_other_names_are_unknown() -> None:
    assert not hasattr(shardtrain, "compile_unit")
    assert not hasattr(shardtrain.optim, "Muons")
