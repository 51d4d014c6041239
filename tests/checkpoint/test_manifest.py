"""Generated nonsense in a manifest: it is taken, or is a mistake in one line that changes nothing."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardtrain
from shardtrain import checkpoint
from shardtrain.checkpoint.manifest import DIGEST_NAME, NAME, digest_line

NUMBERS = st.sampled_from([-1, 0, 2**31, 2**63, 10**30]) | st.integers() | st.floats()
JUNK = (
    NUMBERS | st.text("a0./:-_² ", max_size=9) | st.sampled_from([None, True, [], {}, [[]], ["a"], {"a": 1}])
)


@st.composite
def spoiled(draw: Any, tree: Any) -> Any:
    """Draw ``tree``, of dicts and lists, with junk in some place."""
    node = copy.deepcopy(tree)
    tree = node
    while True:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not node[key] or not isinstance(node[key], dict | list) or draw(st.integers(0, 3)) == 0:
            node[key] = draw(JUNK)
            return tree
        node = node[key]


def test_manifests(tmp_path: Path) -> None:
    model = shardtrain.shard(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path / "saved"
    checkpoint.save(folder, model, optimizer, extra={"a": [1, torch.ones(2)]})

    whole = json.loads((folder / NAME).read_text())

    def load(node: Any) -> None:
        (folder / NAME).write_text(json.dumps(node))
        (folder / DIGEST_NAME).write_text(digest_line(json.dumps(node)))
        model.weight.data.fill_(7)
        told = ""
        try:
            checkpoint.load(folder, model, optimizer)
        except ValueError as error:  # of which Damaged is a kind
            told = str(error)
        assert "\n" not in told
        assert bool(told) == bool((model.weight == 7).all())

    names = whole["optimizer"]["groups"][0]["names"]
    names[0], name = 1, names[0]
    load(whole)  # names of two kinds
    names[0] = name
    load({**whole, "tensors": {name: {} for name in whole["tensors"]}})
    settings(max_examples=40)(given(spoiled(whole))(load))()
