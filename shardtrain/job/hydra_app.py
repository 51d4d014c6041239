"""Compose the configuration of a command line by Hydra, with this program's own messages.

Hydra only composes: it makes no directory, configures no logging and starts no job. The few flags are read
here. Only rank 0 prints the output of `--help` and `--cfg job`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

import hydra
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

import shardtrain
from shardtrain.job.schema import Frozen, UserError, checked, flat, not_valid, path_of, plain_file, reading

if TYPE_CHECKING:
    from shardtrain.job.config import Config

RESOLVER = re.compile(r"\$\{[^{}]*:")  # ${oc.env:HOME}, but not ${train.epochs}
KEY = re.compile(r"( *)(?:(\w+):)?[^#]*(#.*)?")  # a line of YAML: indentation, key, comment


def printed(arguments: Sequence[str]) -> bool:
    """Print what a flag asks for, without torch; return whether there was one. `compose` reports mistakes."""
    with contextlib.suppress(UserError):
        if split(arguments)[0].printing:
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
    if missing := [str(path) for path in own_folders if not path.is_dir()]:
        raise UserError(f"--config-dir: there is no folder {missing[0]}")
    folders = [folder, *own_folders]
    choices = {(file.parent.name, file.stem) for each in folders for file in each.glob("*/*.yaml")}
    groups = {*ConfigStore.instance().repo, *(group for group, _ in choices)}
    for file in (file for each in own_folders for file in sorted(each.rglob("*.yaml"))):
        _check_own_file(file, known=file.parent.name in ("model", *os.listdir(folder)))
    _register_resolvers(folders, choices)
    section = overrides.pop(0) if flags.help and overrides and "=" not in overrides[0] else ""
    keys = [text.partition("=")[0].lstrip("+") for text in overrides]
    if keys.count("recipe") > 1:
        texts = [text for text, key in zip(overrides, keys, strict=True) if key == "recipe"]
        raise UserError(f"{' '.join(texts)}: choose one recipe; a recipe's defaults list may name another")
    if "train.loss._target_" in keys:
        overrides, keys = ["train.loss={}", *overrides], ["train.loss", *keys]  # in place of a name
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
            config = hydra.compose("config", texts, return_hydra_config=flags.help)
            if config.get("allow"):
                raise UserError(f"allow={config.allow}: the command line alone says whose code may run")
            if "sched.warmup_epochs" in keys:
                warmup, epochs = config.sched.warmup_epochs, config.train.epochs
                if float(warmup) > float(epochs or 0):
                    found = f"sched.warmup_epochs={warmup}"
                    raise UserError(f"{found}: longer than the run, train.epochs={epochs}")
            config.merge_with_dotlist([text.lstrip("+") for text in allow])
            text = described(config, folders, section) if flags.help else OmegaConf.to_yaml(config)
            if flags.shell_completion == "query=bash":
                BashCompletion(GlobalHydra.instance().config_loader()).query("config")
                return None
    except UserError:
        raise
    except Exception as error:  # nothing but parsers runs here
        raise _explain(error) from None
    if flags.printing and speak:
        installing = flags.shell_completion == "install=bash"
        print((folder / "completion.bash").read_text() if installing else text)
    return None if flags.printing else config


def _as_hydra_takes_it(override: str, groups: Collection[str]) -> str:
    """Return ``override`` in the form in which Hydra sets any key; the schema refuses unknown ones later."""
    key = override.partition("=")[0].lstrip("+~")
    if key.partition(".")[0].partition("/")[0] == "hydra":
        raise UserError(f"{override}: Hydra only composes here; run.name and run.dir say where a run writes")
    if override.startswith("+recipe="):  # the defaults list has it, before debug=…
        return override[1:]
    as_it_is = key in groups or override[:1] in ("+", "~") or "/" in key or "@" in key
    return override if as_it_is else f"++{override}"


def load_yaml(path: Path) -> Any:
    """Read a user's YAML file. Raises UserError if that fails."""
    with reading(str(path), "expected a YAML file of keys"):
        return OmegaConf.load(plain_file(path))


def _check_own_file(path: Path, known: bool) -> None:
    """Raise UserError for a user's file that cannot be read, or has a resolver, whose result would be stored.

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
    register("recipes", lambda: recipe_table(folders))


def read_config(arguments: Sequence[str], speak: bool) -> Config | None:
    """Return the training program's configuration for ``arguments``; None if a flag asks for output."""
    raw = compose(arguments, speak=speak)
    return None if raw is None else from_hydra(raw)


def split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the overrides. Raises UserError for an unknown flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job")
    parser.add_argument("--shell-completion", "-sc", nargs="?", const="")
    parser.add_argument("--config-dir", "-cd", nargs="?", const="", action="append", default=[])
    with reading("the flags", "see --help", argparse.ArgumentError):
        flags, overrides = parser.parse_known_args(arguments)
    flags.printing = flags.help or flags.cfg is not None or flags.shell_completion is not None
    for text in overrides:
        if text.startswith("-"):
            valid = "--help, -h, --cfg, -c, --shell-completion, -sc, --config-dir, -cd, -m"
            key = text.lstrip("-").partition("=")[0]
            raise UserError(f"unknown flag {text}; keys go without dashes: {key}=VALUE (valid: {valid})")
    return flags, overrides


def from_hydra(raw: DictConfig) -> Config:
    """Return the frozen configuration. Raises UserError for wrong names, types, ranges and combinations."""
    from shardtrain.job.config import Config  # here, since it imports torch

    try:
        config = checked(raw, Config)
    except UserError as error:
        if not isinstance(error.__cause__, KeyError):
            raise
        key: str = error.__cause__.args[0]
        advice = hint(key, raw)
        raise UserError(f"unknown key {key}; {advice}" if advice else str(error)) from None
    of = config.reference and (config.reference.model, config.reference.data)
    ours = of == (config.model_name, config.data.name)
    return config if ours else dataclasses.replace(config, reference=None)


def hint(key: str, config: DictConfig) -> str:
    """Return advice for an unknown ``key``: a key of the same name elsewhere, or of the same meaning."""
    last = key.rpartition(".")[2]
    sections = {str(name): section for name, section in config.items() if isinstance(section, DictConfig)}
    elsewhere = [f"{name}.{last}" for name, section in sections.items() if last in section]
    meanings = [meaning for meaning, words in _hints("keys").items() if last in words.split()] + elsewhere
    return next((text if " " in text else f"did you mean {text}?" for text in meanings if text != key), "")


def _hints(section: str) -> dict[str, str]:
    file = Path(_configs().__file__).with_name("hints.yaml")
    return {str(key): str(text) for key, text in OmegaConf.select(OmegaConf.load(file), section).items()}


@dataclasses.dataclass(frozen=True)
class Beside(Generic[Frozen]):
    """Hold a program's own ``keys`` beside the training program's configuration."""

    keys: Frozen
    config: Config
    device: str
    threads: int | None


def read_beside(
    cls: type[Frozen], folder: Path, arguments: Sequence[str], speak: bool
) -> Beside[Frozen] | None:
    """Return a program's own keys, a ``cls`` from ``folder``, and the training program's; or None."""
    own = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    mine = [text for text in arguments if text.split("=")[0] in own or text in ("--help", "-h")]
    keys = compose(mine, speak=speak, folder=folder)
    config = read_config([text for text in arguments if text not in mine], speak) if keys else None
    if keys is None or config is None:
        return None
    return Beside(checked(keys, cls), config, config.device, config.threads)


def program_configs() -> AbstractContextManager[Path]:
    """Yield the training program's folder, with all of torchvision's models registered in Hydra."""
    return cast("AbstractContextManager[Path]", _configs().registered())


def _configs() -> Any:
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "configs").is_dir() and str(checkout) not in shardtrain.__path__:
        shardtrain.__path__.append(str(checkout))  # before an installed version
    return importlib.import_module("shardtrain.configs")


def _explain(error: Exception) -> UserError:
    """Return a one-line error for Hydra's, with the nearest valid name."""
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override).removeprefix("++"))
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).strip("/").rpartition("/")
        return not_valid(f"unknown {group} {choice!r}", choice, sorted(error.options))
    hint = next((hint for words, hint in _hints("hydra").items() if str(error).startswith(words)), "")
    causes = [str(each).split("\n", 1)[0] for each in (error, error.__cause__) if each]
    causes = [causes[0].rstrip("."), hint] if hint else causes
    return UserError(re.sub(r"(^|[ '])\+\+", r"\1", ": ".join(causes)))


def unreadable(override: str) -> UserError:
    """Return the error for an override that does not parse."""
    expected = "expected key=value without spaces, special characters quoted: 'key=\"value\"'"
    return UserError(f"cannot read {override!r}: {expected}")


def described(config: DictConfig, folders: Sequence[Path], section: str = "") -> str:
    """Return ``config``, or one ``section``, as text with the comments of the files that it is made of."""
    OmegaConf.set_struct(config, False)
    hydra_keys = config.pop("hydra")
    if section and section not in config:
        raise not_valid(f"--help {section}: there is no such group", section, map(str, config))
    said = _comments(folders, "config")
    for group, choice in hydra_keys.runtime.choices.items():
        files = ("models", "classifier") if group == "model" else (f"{group}/{choice}",)
        for file in files if group in config else ():
            said |= {f"{group}.{key}": comment for key, comment in _comments(folders, file).items()}
    text = OmegaConf.to_yaml(OmegaConf.create({section: config[section]}) if section else config)
    keys = zip(text.splitlines(), _keys(text), strict=True)
    described = "\n".join(f"{line:<38}  {said.get(key, '')}".rstrip() for line, (key, _) in keys)
    return described if section else f"{hydra_keys.help.header}\n{described}\n\n{hydra_keys.help.footer}"


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
    return said | {key: comment for key, comment in _keys(path.read_text()) if comment}


def _keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield the full key that each line of YAML sets, and its comment."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, name, comment = KEY.match(line).groups("")  # type: ignore[union-attr]
        above = [entry for entry in above if entry[0] < len(indent)] if name else above
        above += [(len(indent), name)] if name else []
        yield ".".join(each for _, each in above) if name else "", comment


def recipe_table(folders: Iterable[Path]) -> str:
    """Return one line per recipe in ``folders``: name, accuracy, first line of its comment."""
    rows = []
    for file in sorted(file for folder in folders for file in (folder / "recipe").glob("*.yaml")):
        said = OmegaConf.select(load_yaml(file), "reference")
        comments = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
        title = next((text for text in comments if text and not text.startswith("@package")), "")
        rows.append((file.stem, "" if said is None else f"{said.accuracy:.2f} % {said.kind}", title))
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {claim:<17}  {title}".rstrip() for name, claim, title in rows)
