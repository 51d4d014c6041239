"""Compose the configuration of a command line by Hydra, with this program's own messages.

Hydra only composes: it makes no directory, configures no logging and starts no job. The few flags are read
here. Only rank 0 prints the output of `--help` and `--cfg job`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from shardtrain.job.errors import UserError, not_valid, path_of, reading
from shardtrain.job.format import write_any_text
from shardtrain.job.help import choice_table, described, load_yaml
from shardtrain.job.schema import flat

# Groups whose files have different keys; each of the program's files has a dataclass in `job/config.py`.
CHOSEN = ("data", "optim", "sched")
# Keys whose values are texts, also where Hydra would read a number: 1e3, 1_000, true.
TEXTS = ("run.name", "run.dir", "resume", "data.root", "data.table", "model.weights")
NUMBER_LIKE = re.compile(r"[\w.+-]+")
RESOLVER = re.compile(r"\$\{[^{}]*:")  # ${oc.env:HOME}, but not ${train.epochs}


def printed(arguments: Sequence[str]) -> bool:
    """Print what a flag asks for, without torch; return whether there was one. `compose` reports mistakes."""
    with contextlib.suppress(UserError):
        if split(arguments)[0].printing:
            write_any_text()
            return compose(arguments, speak=os.environ.get("RANK", "0") == "0") is None
    return False


def compose(arguments: Sequence[str], *, speak: bool = True, folder: Path | None = None) -> DictConfig | None:
    """Return the configuration of ``arguments`` (without the program's name).

    ``folder`` holds the program's `config.yaml` and its groups; the default is the training program's.
    Returns None if a flag asks for output, which is printed if ``speak``. Raises UserError for mistakes.
    """
    if folder is None:
        with program_configs() as own:
            return compose(arguments, speak=speak, folder=own)
    flags, overrides = split(arguments)
    own_folders = [path_of("--config-dir", text).absolute() for text in flags.config_dir]
    if missing := [str(path) for path in own_folders if not os.path.isdir(path)]:
        raise UserError(f"--config-dir: there is no folder {missing[0]}")
    folders = [folder, *own_folders]
    choices = {(file.parent.name, file.stem) for each in folders for file in each.glob("*/*.yaml")}
    groups = {*ConfigStore.instance().repo, *(group for group, _ in choices)}
    for file in (file for each in own_folders for file in sorted(each.rglob("*.yaml"))):
        _check_own_file(file, known=file.parent.name in ("model", *os.listdir(folder)))
    _register_resolvers(folders, choices)
    _require_no_bare_group(overrides, groups)
    keys = [text.partition("=")[0].lstrip("+") for text in overrides]
    if keys.count("recipe") > 1:
        texts = [text for text, key in zip(overrides, keys, strict=True) if key == "recipe"]
        raise UserError(f"{' '.join(texts)}: choose one recipe; a recipe's defaults list may name another")
    if "train.loss._target_" in keys:
        # In place of a name.
        overrides = ["train.loss={}", *overrides]
        keys = ["train.loss", *keys]
    allow = [text for text, key in zip(overrides, keys, strict=True) if key == "allow"]
    texts = [_as_hydra_takes_it(text, groups) for text in overrides if text not in allow]
    texts += [
        f"{name}=own"
        for name in ("model", "data", "optim")
        if f"{name}._target_" in keys and name not in keys
    ]
    searched = ",".join(f'"file://{path}"' for path in own_folders)
    texts.append(f"hydra.searchpath=[{searched}]")
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            config = hydra.compose("config", texts, return_hydra_config=True)
            if config.get("allow"):
                raise UserError(f"allow={config.allow}: the command line alone says whose code may run")
            if "sched.warmup_epochs" in keys:
                _require_short(config.sched.warmup_epochs, config.train.epochs)
            config.merge_with_dotlist([text.lstrip("+") for text in allow])
            OmegaConf.set_struct(config, False)
            hydra_keys = config.pop("hydra")
            if flags.help:
                sections = flags.groups or [""]
                text = "\n\n".join(described(config, hydra_keys, folders, each) for each in sections)
            else:
                text = OmegaConf.to_yaml(config)
            _note_choices(config, hydra_keys.runtime.choices, folders)
    except UserError:
        raise
    except Exception as error:  # nothing but parsers runs here
        raise _explain(error) from None
    if flags.printing and speak:
        print(text)
    return None if flags.printing else config


def _require_no_bare_group(overrides: Sequence[str], groups: Collection[str]) -> None:
    """Raise UserError for a word that is a group's name."""
    for word in overrides:
        if word in groups:
            raise UserError(
                f"cannot read {word!r}: {word}=NAME chooses from this group, {word}.KEY=VALUE sets a key, "
                f"--help {word} lists the keys"
            )


def _require_short(warmup: Any, epochs: Any) -> None:
    are_numbers = isinstance(warmup, int | float) and isinstance(epochs, int | float)
    if are_numbers and warmup > epochs:  # the schema refuses others
        raise UserError(f"sched.warmup_epochs={warmup}: longer than the run, train.epochs={epochs}")


def _note_choices(config: DictConfig, choices: Mapping[str, str], folders: Sequence[Path]) -> None:
    """Set ``name`` in the sections whose keys depend on the file that was chosen, for the schema."""
    for group in CHOSEN:
        section = config.get(group)
        if isinstance(section, DictConfig):
            if "name" in section:
                require_current(f"{group}.name")
            section["name"] = _origin(group, choices[group], folders)


def _origin(group: str, choice: str, folders: Sequence[Path]) -> str:
    """Return the program's file on which a user's file ``choice`` builds, or ``choice`` itself."""
    path = next((path for each in folders if (path := each / group / f"{choice}.yaml").is_file()), None)
    if path is None or path.parent.parent == folders[0]:
        return choice
    for entry in load_yaml(path).get("defaults", []):
        if isinstance(entry, str) and entry[0] not in "/_":
            return _origin(group, entry.partition("@")[0], folders)
    return choice


def _as_hydra_takes_it(override: str, groups: Collection[str]) -> str:
    """Return ``override`` in the form in which Hydra sets any key; the schema refuses unknown ones later."""
    key = override.partition("=")[0].lstrip("+~")
    if key.partition(".")[0].partition("/")[0] == "hydra":
        raise UserError(f"{override}: Hydra only composes here; run.name and run.dir say where a run writes")
    if override.startswith("+recipe="):  # the defaults list has it, before debug=…
        return override[1:]
    value = override.partition("=")[2]
    if key in TEXTS and value != "null" and NUMBER_LIKE.fullmatch(value):
        override = f"{override.partition('=')[0]}='{value}'"
    as_it_is = key in groups or override[:1] in ("+", "~") or "/" in key or "@" in key
    return override if as_it_is else f"++{override}"


def _check_own_file(path: Path, known: bool) -> None:
    """Raise UserError unless a user's file can be read, and has no resolver: its result would be stored.

    ``known``: whether it is in one of the program's groups. Other files need not be configurations.
    """
    try:
        keys = flat(OmegaConf.to_container(load_yaml(path)))  # here, as Hydra's message has several lines
    except UserError:
        if known:
            raise
        return
    for key, value in keys.items():
        if RESOLVER.search(str(value)):
            raise UserError(
                f"{path}: {key}={value} reads something else than keys; set {key} on the command line"
            )


def _register_resolvers(folders: Sequence[Path], choices: Collection[tuple[str, str]]) -> None:
    """Register what `config.yaml` asks of the files in ``folders``. ``choices``: their groups and names."""
    register = partial(OmegaConf.register_new_resolver, replace=True)
    register("own_or_none", lambda group, name: name if (group, name) in choices else "none")
    register("bf16_or_fp32", lambda: importlib.import_module("shardtrain.device").fastest_precision())
    register("recipes", lambda: choice_table(folders, "recipe"))


def split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the overrides. Raises UserError for an unknown flag.

    With `--help` words in any place are the groups that it describes.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job"])
    parser.add_argument("--config-dir", "-cd", nargs="?", const="", action="append", default=[])
    with reading("the flags", "see --help", argparse.ArgumentError):
        flags, overrides = parser.parse_known_args(arguments)
    flags.printing = flags.help or flags.cfg is not None
    flags.groups = [text for text in overrides if flags.help and re.fullmatch(r"\w[\w.]*", text)]
    overrides = [text for text in overrides if text not in flags.groups]
    for text in overrides:
        if text.startswith("-"):
            valid = "--help, -h, --cfg, -c, --config-dir, -cd, -m"
            require_current(text)
            key = text.lstrip("-").partition("=")[0]
            raise UserError(f"unknown flag {text}; keys go without dashes: {key}=VALUE (valid: {valid})")
    return flags, overrides


def require_current(name: str) -> None:
    """Raise UserError if ``name``, as in `hints.yaml`, has gone. The message says what to use instead."""
    instead = hints("gone").get(name)
    if instead is not None:
        raise UserError(f"{name} has gone: {instead}")


def hints(section: str) -> dict[str, str]:
    file = Path(_configs().__file__).with_name("hints.yaml")
    return {str(key): str(text) for key, text in OmegaConf.select(OmegaConf.load(file), section).items()}


def program_configs() -> AbstractContextManager[Path]:
    """Yield the training program's folder, with all of torchvision's models registered in Hydra."""
    return cast("AbstractContextManager[Path]", _configs().registered())


def _configs() -> Any:
    return importlib.import_module("shardtrain.configs")


def _explain(error: Exception) -> UserError:
    """Return a one-line error for Hydra's, with the nearest valid name."""
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override).removeprefix("++"))
    if isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).strip("/").rpartition("/")
        require_current(f"{group}={choice}" if group else choice)
        meant = hints("groups").get(group.partition("/")[0])
        if meant is not None:
            return UserError(f"unknown {group} {choice!r}: {meant}")
    if isinstance(error, MissingConfigException) and error.options is not None:
        return not_valid(f"unknown {group} {choice!r}", choice, sorted(error.options))
    hint = next((hint for words, hint in hints("hydra").items() if str(error).startswith(words)), "")
    causes = [str(each).split("\n", 1)[0] for each in (error, error.__cause__) if each]
    causes = [causes[0].rstrip("."), hint] if hint else causes
    return UserError(re.sub(r"(^|[ '])\+\+", r"\1", ": ".join(causes)))


def unreadable(override: str) -> UserError:
    """Return the error for an override that does not parse."""
    expected = "expected key=value without spaces, special characters quoted: 'key=\"value\"'"
    return UserError(f"cannot read {override!r}: {expected}")
