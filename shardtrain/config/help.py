"""The help: a configuration with the comments of its files, and the choices of its groups."""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from shardtrain.config.config import Config
from shardtrain.config.errors import not_valid, plain_file, program_configs, reading
from shardtrain.config.schema import choices_of, comments_of, defaults_of, kinds_of

WIDTH = 120  # columns
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
    table = choice_table(folders, section) if section in chosen else ""
    choices = f"{section}=NAME:\n{table}\n\n" if table else ""
    if section not in ("", *config):
        return choices.strip()
    said = comments_of(Config)
    for group in chosen.keys() & config.keys():
        said |= {f"{group}.{key}": text for key, text in _comments(folders, group, config[group]).items()}
    text = OmegaConf.to_yaml(OmegaConf.create({section: config[section]}) if section else config)
    return f"{choices}{_with_comments(text, said)}"


def keys_in_words(header: str, cls: type) -> str:
    """Return the help of a small program: its ``header``, and the keys of the dataclass ``cls``."""
    text = OmegaConf.to_yaml(OmegaConf.create(defaults_of(cls)))
    return f"{header.rstrip()}\n\n{_with_comments(text, comments_of(cls))}"


def _with_comments(text: str, said: Mapping[str, str]) -> str:
    """Return lines of YAML, each below what is ``said`` of its key."""
    lines: list[str] = []
    for line, (key, _) in zip(text.splitlines(), _keys(text), strict=True):
        start = line[: len(line) - len(line.lstrip())] + "# "
        comment = said.get(key, "").lstrip("# ")
        lines += textwrap.wrap(comment, WIDTH, initial_indent=start, subsequent_indent=start)
        lines.append(line)
    return "\n".join(lines)


def _comments(folders: Sequence[Path], group: str, section: Mapping[Any, Any]) -> dict[str, str]:
    """Return the comments of a group's keys: its dataclass's, or else those in the group's files."""
    if kind := group_choices(group).get(section.get("name", "default")):
        return comments_of(kind)
    said: dict[str, str] = {}
    for folder in folders:
        place = folder / ("common" if group == "model" else group)
        for file in filter(Path.is_file, place.glob("*.yaml")):
            said |= {key: text for key, text in _keys(file.read_text(errors="replace")) if key and text}
    return said


def group_choices(group: str) -> dict[str, Any]:
    """Return the dataclass of each choice from a group that has dataclasses."""
    return choices_of(kinds_of(typing.get_type_hints(Config).get(group)))


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
    kinds = group_choices(group)
    lines = {name: str(kind.__doc__).splitlines()[0] for name, kind in kinds.items() if name != "default"}
    for folder in folders:
        for file in filter(Path.is_file, (folder / group).glob("*.yaml")):
            text = file.read_text(errors="replace")
            comments = [line.strip("# ") for line in text.splitlines() if line.startswith("#")]
            lines.setdefault(file.stem, next((each for each in comments if each and each[0] != "@"), ""))
    width = max(map(len, lines), default=0)
    table: list[str] = []
    for name, line in sorted(lines.items()):
        row = f"  {name:<{width}}  {line}"
        table += textwrap.wrap(row, WIDTH, subsequent_indent=" " * (width + 4), break_on_hyphens=False)
    stored = ", ".join(program_configs().stored(group))
    return "\n".join(table + textwrap.wrap(stored, 100, initial_indent="  ", subsequent_indent="  "))
