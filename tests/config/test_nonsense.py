"""Generated nonsense: each piece of it is taken, or is a mistake in one line, and nothing changes on disk."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn

import shardtrain
from shardtrain import checkpoint
from shardtrain.checkpoint.manifest import DIGEST_NAME, NAME, digest_line
from shardtrain.config.config import Config
from shardtrain.config.help import load_yaml
from shardtrain.config.schema import checked
from shardtrain.job.model import read_weights

from tiny import composed

Each = Callable[[Any, Callable[[Any], object]], None]
NUMBERS = st.sampled_from([-1, 0, 2**31, 2**63, 10**30]) | st.integers() | st.floats()
JUNK = (
    NUMBERS | st.text("a0./:-_² ", max_size=9) | st.sampled_from([None, True, [], {}, [[]], ["a"], {"a": 1}])
)


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Each:
    """Call a function with values of a strategy, a few of them, with ``--long`` many."""
    count = 300 if request.config.getoption("--long") else 40
    options = settings(max_examples=count, suppress_health_check=[*HealthCheck])
    return lambda values, action: options(given(values)(lambda value: (action(value), None)[1]))()


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


def is_refused(action: Callable[..., object], *arguments: Any) -> bool:
    """Return whether ``action`` raises ValueError, of which UserError and Damaged are kinds, in one line."""
    try:
        action(*arguments)
    except ValueError as error:
        return "\n" not in str(error) or pytest.fail(str(error))
    return False


@pytest.mark.long
def test_configurations(each: Each) -> None:
    raw = json.loads(json.dumps(asdict(composed("+recipe=resnet"))))
    each(spoiled(raw), lambda node: is_refused(checked, OmegaConf.create(node), Config))


def test_manifests(each: Each, tmp_path: Path) -> None:
    model = shardtrain.shard(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path / "saved"
    checkpoint.save(folder, model, optimizer, extra={"a": [1, torch.ones(2)]})

    def load(node: Any) -> None:
        (folder / NAME).write_text(json.dumps(node))
        (folder / DIGEST_NAME).write_text(digest_line(json.dumps(node)))
        model.weight.data.fill_(7)
        refused = is_refused(checkpoint.load, folder, model, optimizer)
        assert refused == bool((model.weight == 7).all())

    each(spoiled(json.loads((folder / NAME).read_text())), load)


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.yaml", "x.pth", "x.safetensors"])
def test_files(each: Each, tmp_path: Path, name: str) -> None:
    """Cut, and with other bytes in a few places."""
    file = tmp_path / name
    state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    (tmp_path / "x.yaml").write_text("a: &a [1, '2', {b: c}]\nd: *a\n# e\nf:\n  g: \"${a}\"\n")
    torch.save(state, tmp_path / "x.pth")
    save_file(state, tmp_path / "x.safetensors")
    read = load_yaml if name == "x.yaml" else read_weights
    whole = file.read_bytes()
    others = {path.name for path in tmp_path.rglob("*")}

    def spoil(changes: tuple[int, list[tuple[int, int]]]) -> None:
        content = bytearray(whole)
        size, places = changes
        for place, byte in places:
            content[place % len(content)] = byte
        file.write_bytes(content[: size or len(content)])
        is_refused(read, file)
        assert others == {path.name for path in tmp_path.rglob("*")}

    places = st.tuples(st.integers(0, 2000), st.integers(0, 255))
    each(st.tuples(st.just(0) | st.integers(1, len(whole)), st.lists(places, max_size=9)), spoil)
