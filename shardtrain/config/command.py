"""The command line: Hydra composes its configuration, once, with this program's own messages.

Hydra only composes: it makes no directory, configures no logging and starts no job. The few flags are read
here. Only rank 0 prints the output of `--help`, `--version` and `--cfg job`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from shardtrain import __version__
from shardtrain.config.config import Config
from shardtrain.config.errors import (
    UnknownKey,
    UserError,
    advice,
    not_valid,
    path_of,
    plain_file,
    program_configs,
    reading,
)
from shardtrain.config.format import write_any_text
from shardtrain.config.help import described, keys_in_words, load_yaml
from shardtrain.config.marks import MARKS
from shardtrain.config.schema import Frozen, checked, defaults_of

CONFIG = "config.yaml"  # in a run's directory: its configuration
# A user's own `_target_` in one of these groups takes the place of the group's usual file.
OWN_TARGETS = ("model", "data", "optim")
OWN = "own"
# What a command says itself, whatever the run's `config.yaml` has, from which it may be composed.
OF_THE_COMMAND: dict[str, Any] = {
    "allow": [],
    "config": None,
    "resume": "auto",
    "run": {"name": None, "dir": None},
}
EVERYTHING = {"": ""}  # the word that names every key, as `config=FILE` does
COMPOSES = "Hydra only composes here; run.name and run.dir say where a run writes"


class Composed(NamedTuple):
    """What Hydra composes of a command's words, unchecked; and these, by the key or group that each names."""

    values: DictConfig
    words: Mapping[str, str]


class Command(NamedTuple):
    """The checked configuration of a command, its words as of `Composed`, and a program's own keys."""

    config: Config
    words: Mapping[str, str]
    device: str
    threads: int | None
    keys: Any = None


class Program(NamedTuple):
    """A program's own keys, a dataclass, and what they stand beside."""

    keys: type | None = None
    with_training_keys: bool = True
    base_key: str = "config"  # the key that names the configuration on which the command builds


TRAIN = Program()


def read_command(arguments: Sequence[str], speak: bool = True, program: Program = TRAIN) -> Command | None:
    """Return the configuration for ``arguments``; None if a flag asks for output.

    Raises UserError for wrong names, types, ranges and combinations.
    """
    try:
        composed = compose(arguments, program, speak=speak)
        return None if composed is None else _checked(composed, program)
    except UnknownKey as error:
        last = error.key.rpartition(".")[2]
        elsewhere = [name for name in MARKS if "." in name and name.rpartition(".")[2] == last]
        text = advice(error.key, elsewhere)
        raise UserError(f"unknown key {error.key}; {text}" if text else str(error)) from None


def read_keys(cls: type[Frozen], arguments: Sequence[str], speak: bool) -> Frozen | None:
    """Return the keys of a program that has only those of ``cls``; None if a flag asks for output."""
    composed = compose(arguments, Program(cls, with_training_keys=False), speak=speak)
    return None if composed is None else checked(composed.values, cls)


def _checked(composed: Composed, program: Program) -> Command:
    values = composed.values
    keys: Any = None
    if program.keys is not None:
        names = [field.name for field in dataclasses.fields(program.keys)]
        keys = checked(DictConfig({name: values.pop(name) for name in names}), program.keys)
        values.update({name: OF_THE_COMMAND[name] for name in {*names} & {*OF_THE_COMMAND}})
    config = checked(values, Config)
    return Command(config, composed.words, config.device, config.threads, keys)


def printed(arguments: Sequence[str]) -> bool:
    """Print what a flag asks for, without torch; return whether there was one. `compose` reports mistakes."""
    with contextlib.suppress(UserError):
        if split(arguments)[0].printing:
            write_any_text()
            return compose(arguments, speak=os.environ.get("RANK", "0") == "0") is None
    return False


def compose(arguments: Sequence[str], program: Program = TRAIN, *, speak: bool = True) -> Composed | None:
    """Return the configuration of ``arguments``; None for a flag, whose output ``speak`` prints.

    Raises UserError for mistakes.
    """
    flags, words = split(arguments)
    if flags.version:
        text = f"shardtrain {__version__}"
    elif flags.help and program.keys is not None:
        text = keys_in_words(str(sys.modules[program.keys.__module__].__doc__), program.keys)
    else:
        folders = [program_configs().FOLDER, *map(_own_folder, flags.config_dir)]
        config = _composed(words, program, folders)
        if not flags.printing:
            OmegaConf.set_struct(config.values, False)
            config.values.pop("hydra")
            return config
        text = _text(config.values, flags, folders)
    if speak:
        print(text)
    return None


def _composed(words: Sequence[str], program: Program, folders: Sequence[Path]) -> Composed:
    """Let Hydra compose the program's configuration, and check what no key may say."""
    groups = program_configs().groups_in(folders) if program.with_training_keys else set()
    with explained(groups):
        overrides = OverridesParser.create().parse_overrides([*words])
    named = {each.key_or_group: str(each.input_line) for each in overrides}
    for override in overrides:
        if override.is_hydra_override():
            raise UserError(f"{override.input_line}: {COMPOSES}")
    recipes = [str(each.input_line) for each in overrides if each.key_or_group == "recipe"]
    if len(recipes) > 1:
        raise UserError(f"{' '.join(recipes)}: choose one recipe; a recipe's defaults list may name another")
    own_targets = [group for group in OWN_TARGETS if f"{group}._target_" in named and group not in named]
    base = _base_of(overrides, program.base_key)
    primary = _primary(program, folders, base, {*named, *own_targets} & groups)
    # The place of a recipe in the defaults list is before that of `debug`.
    texts = [word[1:] if word.startswith("+recipe=") else word for word in words]
    texts += [f"{group}={OWN}" for group in own_targets]
    with (
        explained(groups, [*map(str, primary)]),
        program_configs().registered(primary) as name,
        hydra.initialize_config_dir(str(folders[0]), version_base="1.3"),
    ):
        config = hydra.compose(name, texts, return_hydra_config=True)
    if config.get("allow") and "allow" not in named:
        raise UserError(f"allow={config.allow}: the command line alone says whose code may run")
    return Composed(config, named if base is None else {**named, **EVERYTHING})


def _primary(
    program: Program, folders: Sequence[Path], base: Mapping[str, Any] | None, chosen: set[str]
) -> DictConfig:
    """Return the configuration with which Hydra begins: `config.yaml`, or the ``base`` of the command."""
    values: Any = OmegaConf.create()
    if base is not None:
        if "recipe" in chosen:
            raise UserError("recipe: config=FILE has all keys already; leave out one of the two")
        # A group that the command chooses takes the place of the base's section.
        values = OmegaConf.create({key: value for key, value in base.items() if key not in chosen})
        values.defaults = [
            "_self_",
            *({group: None} for group in program_configs().groups_in(folders) - {"recipe"}),
        ]
    elif program.with_training_keys:
        values = OmegaConf.merge(load_yaml(folders[0] / CONFIG), defaults_of(Config))
    if program.keys is not None:
        values = OmegaConf.merge(values, defaults_of(program.keys))
    values.setdefault("hydra", {})["searchpath"] = [f"file://{folder}" for folder in folders[1:]]
    return cast(DictConfig, values)


def _base_of(overrides: Sequence[Override], key: str) -> dict[str, Any] | None:
    """Return the configuration that the word ``key`` names: a run's `config.yaml`, or for `run` a run."""
    values = [str(each.value()) for each in overrides if each.key_or_group == key]
    if not values:
        return None
    path = path_of(key, values[-1])
    return read_base(path if key == "config" else require_run(path), f"{key}={values[-1]}")


def read_base(path: Path, where: str) -> dict[str, Any]:
    """Return the configuration in ``path``, a run's `config.yaml` or a checkpoint's manifest."""
    with reading(where, f"expected the {CONFIG} of a run"):
        text = plain_file(path).read_text(encoding="utf-8")
        if path.suffix == ".json":
            own = dict(json.loads(text)["facts"]["config"])
        else:
            own = as_values(OmegaConf.create(text))
    require_version(own.pop("version", None), where)
    return {**own, **OF_THE_COMMAND}


def as_values(config: Any) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config)
    return dict(values)


def require_version(version: str | None, where: str) -> None:
    """Raise UserError unless a run of ``version`` can be read by this one."""
    if str(version).rpartition(".")[0] != __version__.rpartition(".")[0]:
        raise UserError(
            f"{where}: of shardtrain {version or '0.3.0 or older'}, and this is {__version__}: continue, "
            "score or export it with its own version"
        )


def require_run(path: Path) -> Path:
    """Return the file with the configuration of ``path``: a run, one of its checkpoints, or `RUN/best`."""
    with reading(f"run={path}", "expected one that can be read", OSError):
        folder = path.parent if path.name == "best" and not path.is_dir() else path
        file = next((each for name in (CONFIG, "manifest.json") if (each := folder / name).is_file()), None)
    if file is None:
        raise UserError(f"run={path}: neither a run with checkpoints nor a checkpoint of a run")
    return file


def _own_folder(text: str) -> Path:
    folder = path_of("--config-dir", text).absolute()
    if not os.path.isdir(folder):
        raise UserError(f"--config-dir: there is no folder {folder}")
    return folder


def _text(config: DictConfig, flags: argparse.Namespace, folders: Sequence[Path]) -> str:
    """Return what `--help` or `--cfg job` prints."""
    keys = config.hydra
    values = OmegaConf.masked_copy(config, [key for key in map(str, config) if key != "hydra"])
    if not flags.help:
        return OmegaConf.to_yaml(values)
    return "\n\n".join(described(values, keys, folders, each) for each in flags.groups or [""])


def split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the overrides. Raises UserError for an unknown flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job"])
    parser.add_argument("--config-dir", "-cd", nargs="?", const="", action="append", default=[])
    with reading("the flags", "see --help", argparse.ArgumentError):
        flags, overrides = parser.parse_known_args(arguments)
    flags.printing = flags.help or flags.version or flags.cfg is not None
    # With `--help` words in any place are the groups that it describes.
    flags.groups = [text for text in overrides if flags.help and re.fullmatch(r"\w[\w.]*", text)]
    overrides = [text for text in overrides if text not in flags.groups]
    for text in overrides:
        if text.startswith("-"):
            valid = "--help, -h, --version, --cfg, -c, --config-dir, -cd, -m"
            key = text.lstrip("-").partition("=")[0]
            raise UserError(f"unknown flag {text}; keys go without dashes: {key}=VALUE (valid: {valid})")
    return flags, overrides


@contextlib.contextmanager
def explained(groups: set[str], known: Sequence[str] = ()) -> Iterator[None]:
    """Turn what Hydra and the parsers raise inside into a UserError. ``known``: the keys at the top."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # nothing else runs inside
        raise _explain(error, groups, known) from None


def _explain(error: Exception, groups: set[str], known: Sequence[str]) -> UserError:
    """Return a one-line error for Hydra's, with the nearest valid name."""
    if isinstance(error, OverrideParseException):
        expected = "expected key=value without spaces, special characters quoted: 'key=\"value\"'"
        return UserError(f"cannot read {str(error.override)!r}: {expected}")
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(str(error.missing_cfg_file), error.options)
    key = str(error).partition("Could not override '")[2].partition("'")[0]
    if isinstance(error, ConfigCompositionException) and key:
        valid = [each for each in {*known, *groups} if each not in ("defaults", "hydra")]
        return UnknownKey(key, not_valid(f"unknown key {key}", key, sorted(valid)))
    if isinstance(error, RecursionError):
        too_deep = "a defaults list contains its own file, or values are nested too deeply"
        return UserError(f"maximum recursion depth exceeded: {too_deep}")
    return UserError(" ".join(str(error).split()))


def _unknown_choice(file: str, options: Sequence[str]) -> UserError:
    """Return the error for a ``file``, GROUP/NAME, that a group does not have."""
    group, _, choice = file.strip("/").rpartition("/")
    if OWN in options and "." in choice:
        allow = f' "allow=[{choice.partition(".")[0]}]"'
        return UserError(f"unknown {group} {choice!r}; did you mean {group}._target_={choice}{allow}?")
    own = [f"{group}._target_=PACKAGE.NAME"] if OWN in options else []
    files = sorted(option for option in options if option != OWN)
    return not_valid(f"unknown {group} {choice!r}", choice, files + own)
