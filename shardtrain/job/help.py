"""Print help: a configuration with the comments of its files, and the choices of its groups.

Its own file, since composing a configuration is another subject.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from shardtrain.job.errors import UserError, not_valid, plain_file, reading
from shardtrain.job.schema import defaults_of, help_of

WIDTH = 120  # columns
COMMENTS_AT = 40
EVERY_KEY = "all"  # in place of a group's name
KEY = re.compile(r"( *)(?:(\w+):)?[^#]*(#.*)?")  # a line of YAML: indentation, key, comment


def load_yaml(path: Path) -> Any:
    """Read a user's YAML file. Raises UserError if that fails."""
    with reading(str(path), "expected a YAML file of keys"):
        return OmegaConf.load(plain_file(path))


def described(config: DictConfig, hydra_keys: DictConfig, folders: Sequence[Path], section: str) -> str:
    """Return ``config``, or one ``section``, as text with the comments of the files that it is made of.

    Of a configuration with groups the header is enough, unless ``section`` asks for every key.
    """
    chosen = {group: choice for group, choice in hydra_keys.runtime.choices.items() if "/" not in group}
    if not section:
        return str(hydra_keys.help.header).rstrip()
    known = {**dict.fromkeys(map(str, config)), **chosen, EVERY_KEY: ""}
    if section == EVERY_KEY:
        section = ""
    if section and section not in known:
        raise not_valid(f"--help {section}: there is no such group", section, known)
    choices = f"{section}=NAME:\n{choice_table(folders, section)}\n\n" if section in chosen else ""
    if section not in ("", *config):
        return choices.strip()
    said = _comments(folders, "config")
    for group, choice in chosen.items():
        files = ("common/models", "common/classifier") if group == "model" else (f"{group}/{choice}",)
        for file in files if group in config else ():
            said |= {f"{group}.{key}": comment for key, comment in _comments(folders, file).items()}
    text = OmegaConf.to_yaml(OmegaConf.create({section: config[section]}) if section else config)
    return f"{choices}{_with_comments(text, said)}"


def keys_in_words(header: str, cls: type) -> str:
    """Return the help of a small program: its ``header``, and the keys of the dataclass ``cls``."""
    text = OmegaConf.to_yaml(OmegaConf.create(defaults_of(cls)))
    return f"{header.rstrip()}\n\n{_with_comments(text, help_of(cls))}"


def _with_comments(text: str, said: Mapping[str, str]) -> str:
    """Return lines of YAML with what is ``said`` of each key."""
    keys = zip(text.splitlines(), _keys(text), strict=True)
    return "\n".join(_commented(line, said.get(key, "")) for line, (key, _) in keys)


def _commented(line: str, comment: str) -> str:
    """Return a line of YAML and its comment, which continues on lines of its own if it is long."""
    start = max(COMMENTS_AT, len(line) + 2)
    texts = textwrap.wrap(comment.lstrip("# "), WIDTH - start - 2, break_on_hyphens=False)
    lines = [
        f"{line:<{start}}# {text}" for line, text in zip([line, *[""] * len(texts)], texts, strict=False)
    ]
    return "\n".join(lines) or line


def _comments(folders: Sequence[Path], name: str) -> dict[str, str]:
    """Return the comments of a file's keys, and of the files that its defaults list has in the same place."""
    path = next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)
    if path is None:
        return {}
    said: dict[str, str] = {}
    for entry in load_yaml(path).get("defaults", []) if name != "config" else ():
        if isinstance(entry, str) and entry != "_self_":
            other = entry.partition("@")[0]
            said |= _comments(folders, other[1:] if other[0] == "/" else f"{name.rpartition('/')[0]}/{other}")
    return said | {key: comment for key, comment in _keys(path.read_text()) if key and comment}


def _keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield the full key that each line of YAML sets, and its comment."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, name, comment = KEY.match(line).groups("")  # type: ignore[union-attr]
        above = [entry for entry in above if entry[0] < len(indent)] if name else above
        above += [(len(indent), name)] if name else []
        yield ".".join(each for _, each in above) if name else "", comment


def choice_table(folders: Iterable[Path], group: str) -> str:
    """Return a line per choice of ``group``: name, first line of its comment."""
    lines: dict[str, str] = {}
    for folder in folders:
        for file in sorted((folder / group).glob("*.yaml")):
            try:
                load_yaml(file)
            except UserError as error:
                lines.setdefault(file.stem, str(error))
                continue
            comments = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
            title = next((text for text in comments if text and not text.startswith("@package")), "")
            lines.setdefault(file.stem, title)
    width = max(map(len, lines), default=0)
    table: list[str] = []
    for name, line in lines.items():
        row = f"  {name:<{width}}  {line}"
        table += textwrap.wrap(row, WIDTH, subsequent_indent=" " * (width + 4), break_on_hyphens=False)
    stored = ", ".join(importlib.import_module("shardtrain.configs").stored(group))
    return "\n".join(table + textwrap.wrap(stored, 100, initial_indent="  ", subsequent_indent="  "))
