"""What `--help` says of the recipes, and what a shell needs to complete a command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

# Hydra says what may follow, but its own script for bash knows programs that are files or commands, not `-m`.
# Words that are complete have recipe=… for +recipe=…, as the defaults list does.
COMPLETION = r"""
_shardtrain() {
  [[ $COMP_LINE == *"-m shardtrain.train "* ]] || return
  local python=$1 before="${COMP_LINE% *} " choices
  [[ $python == *python* ]] || python=python
  before=${before#*-m shardtrain.train }
  choices=$(COMP_LINE="shardtrain ${before//+recipe=/recipe=}${COMP_LINE##* }" \
    "$python" -m shardtrain.train -sc query=bash 2>/dev/null)
  COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _shardtrain python python3 torchrun
"""


def recipe_table(folders: Iterable[Path]) -> str:
    """One line for each recipe of the config `folders`: name, published accuracy, first line of its card."""
    files = sorted(file for folder in folders for file in (folder / "recipe").glob("*.yaml"))
    width = max((len(file.stem) for file in files), default=0)
    return "\n".join(
        f"  {file.stem:<{width}}  {_accuracy(file):>7}  {_title(file)}".rstrip() for file in files
    )


def _title(recipe: Path) -> str:
    """Its first comment that is no directive of Hydra's."""
    comments = [line.lstrip("# ") for line in recipe.read_text().splitlines() if line.startswith("#")]
    return next((text for text in comments if text and not text.startswith("@package")), "")


def _accuracy(recipe: Path) -> str:
    """What its `reference` claims, if it has one."""
    config = OmegaConf.load(recipe)
    assert isinstance(config, DictConfig)
    accuracy = OmegaConf.select(config, "reference.accuracy")
    return "" if accuracy is None else f"{accuracy:.2f} %"
