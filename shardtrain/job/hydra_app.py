"""Compose the configuration of a command line by Hydra, with this program's own messages.

Hydra only composes: it makes no directory, configures no logging and starts no job. The few flags are read
here. Only rank 0 prints the output of `--help`, `--version` and `--cfg job`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from shardtrain import __version__
from shardtrain.job.errors import UserError, not_valid, path_of, reading
from shardtrain.job.format import write_any_text
from shardtrain.job.help import choice_table, described, load_yaml
from shardtrain.job.record import Record, laid_over, record_of
from shardtrain.job.record import completed as completed_record
from shardtrain.job.schema import flat

# Groups whose files have different keys; each of the program's files has a dataclass in `job/config.py`.
CHOSEN = ("data", "optim", "sched")
DESCRIBING = ("--help", "-h", "--version")  # flags that a program with keys of its own answers by itself
OWN = "own"  # the file of a group of which the command line sets `_target_`
# Keys whose values are texts, also where Hydra would read a number: 1e3, 1_000, true.
TEXTS = ("run.name", "run.dir", "resume", "data.root", "data.table", "model.weights")
NUMBER_LIKE = re.compile(r"[\w.+-]+")
HYDRA_QUIET = {"output_subdir": None, "run": {"dir": "."}, "job": {"name": "shardtrain", "chdir": False}}
COMPOSES = "Hydra only composes here; run.name and run.dir say where a run writes"
SWEPT = "hydra.sweeper.params."
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

    ``folder`` holds the program's `config.yaml` and its groups; the default is the training program's, whose
    configuration is that of the run which the command continues, scores or starts from, if there is one.
    Returns None if a flag asks for output, which is printed if ``speak``. Raises UserError for mistakes.
    """
    if split(arguments)[0].version:
        if speak:
            print(f"shardtrain {__version__}")
        return None
    if folder is not None:
        return _compose(arguments, speak, folder, record=None)
    with program_configs() as own:
        return _compose(arguments, speak, own, record_of(arguments))


def _compose(arguments: Sequence[str], speak: bool, folder: Path, record: Record | None) -> DictConfig | None:
    flags, words = split(arguments)
    sources = Sources.of(folder, flags.config_dir)
    _require_no_bare_group(words, sources.groups)
    _require_one_recipe(words)
    _check_own_files([(key_of(word), word.partition("=")[2]) for word in words], sources)
    with explained():
        if record is None or flags.help:
            composed = _composed(sources, words)
        else:
            composed = _composed_over(record, sources, [word for word in words if key_of(word) != "config"])
        _check_own_files(composed.choices.items(), sources)
        text = _text(composed, sources, flags) if flags.printing else ""
        _note_choices(composed, sources.folders)
    if flags.printing and speak:
        print(text)
    return None if flags.printing else composed.config


class Sources(NamedTuple):
    """Hold where files of groups are: the program's folder and the user's, and the groups that there are."""

    folders: list[Path]
    groups: set[str]

    @staticmethod
    def of(folder: Path, config_dirs: Sequence[str]) -> Sources:
        """Look through the folders, and register what files ask for. Raises UserError for wrong ones."""
        own_folders = [path_of("--config-dir", text).absolute() for text in config_dirs]
        if missing := [str(path) for path in own_folders if not os.path.isdir(path)]:
            raise UserError(f"--config-dir: there is no folder {missing[0]}")
        folders = [folder, *own_folders]
        files = chain.from_iterable(each.glob("*/*.yaml") for each in folders)
        choices = {(file.parent.name, file.stem) for file in files}
        _register_resolvers(folders, choices)
        return Sources(folders, {*ConfigStore.instance().repo, *(group for group, _ in choices)})

    @property
    def search_path(self) -> str:
        """The override that names the user's folders."""
        own_folders = ",".join(f'"file://{path}"' for path in self.folders[1:])
        return f"hydra.searchpath=[{own_folders}]"


class Composed(NamedTuple):
    """Hold a configuration, and the keys of Hydra, which have its choices."""

    config: DictConfig
    hydra: DictConfig

    @property
    def choices(self) -> dict[str, str]:
        """The file of each group."""
        return dict(self.hydra.runtime.choices)


def _composed(sources: Sources, words: Sequence[str], name: str = "config") -> Composed:
    """Let Hydra compose the file ``name``.yaml, the command's ``words`` laid over it.

    Raises UserError for what words, or files that they name, may not set.
    """
    keys = [key_of(word) for word in words]
    allow = [word for word in words if key_of(word) == "allow"]
    texts = [_as_hydra_takes_it(word, sources.groups) for word in words if word not in allow]
    if "train.loss._target_" in keys and "train.loss" not in keys and name == "config":
        texts.insert(0, "++train.loss={}")  # in place of a name
    for group in ("model", "data", "optim"):
        if f"{group}._target_" in keys and group not in keys and name == "config":
            texts.append(f"{group}={OWN}")
    with hydra.initialize_config_dir(str(sources.folders[0]), version_base="1.3"):
        config = hydra.compose(name, [*texts, sources.search_path], return_hydra_config=True)
    if config.get("allow"):
        raise UserError(f"allow={config.allow}: the command line alone says whose code may run")
    if "sched.warmup_epochs" in keys:
        _require_short(config.sched.warmup_epochs, config.train.epochs)
    config.merge_with_dotlist([word.lstrip("+") for word in allow])
    OmegaConf.set_struct(config, False)
    return Composed(config, config.pop("hydra"))


def _composed_over(record: Record, sources: Sources, words: Sequence[str]) -> Composed:
    """Return a run's configuration with the command's ``words`` laid over it, key by key.

    A word that names a group's file replaces the section only if the run has another file's.
    """
    choosing = [word for word in words if key_of(word) in sources.groups]
    targets = [word for word in words if key_of(word).endswith("._target_")]
    setting = [word for word in words if word not in choosing]
    names = [f"{group}={record.values[group]['name']}" for group in CHOSEN if "name" in record.values[group]]
    usual = _with_names(_composed(sources, names), sources)
    gone = hints("gone").keys() - {f"{group}.name" for group in CHOSEN}  # which the group's choice sets now
    values = completed_record(record.values, usual.config, gone)
    if choosing or targets:
        fresh = _with_names(_composed(sources, [*choosing, *targets]), sources)
        files = [f"{group}={file}" for group, file in fresh.choices.items() if _has_section(group, fresh)]
        plain = _with_names(_composed(sources, [*files, *targets]), sources)
        chosen = _chosen_sections(choosing, targets, fresh, values)
        values = laid_over(values, fresh.config, plain.config, chosen, evaluates=record.evaluates)
    ConfigStore.instance().store(name="record", node={**values, "hydra": HYDRA_QUIET})
    try:
        return _composed(sources, setting, "record")
    finally:
        ConfigStore.instance().repo.pop("record.yaml", None)


def _has_section(group: str, composed: Composed) -> bool:
    return group in composed.config and group not in ("recipe", "debug")


def _chosen_sections(
    choosing: Sequence[str], targets: Sequence[str], fresh: Composed, values: Mapping[str, Any]
) -> list[str]:
    """Return the sections whose file the command names: by a word of its own, or by a recipe."""
    named = {key_of(word) for word in choosing} | {key_of(word).rpartition(".")[0] for word in targets}
    if "recipe" in named:
        named |= {*CHOSEN, "model"}
    other_data = "data" in named and fresh.config.data.get("name") != values["data"].get("name")
    if other_data:
        named.add("augment")  # whose file is that of the data set, unless a word names one
    return sorted(named)


def _with_names(composed: Composed, sources: Sources) -> Composed:
    _note_choices(composed, sources.folders)
    return composed


def key_of(word: str) -> str:
    """Return the key or the group that a word of the command line sets."""
    return word.partition("=")[0].lstrip("+~")


def _text(composed: Composed, sources: Sources, flags: argparse.Namespace) -> str:
    """Return what `--help` or `--cfg job` prints."""
    if not flags.help:
        return OmegaConf.to_yaml(composed.config)
    sections = flags.groups or [""]
    return "\n\n".join(described(composed.config, composed.hydra, sources.folders, each) for each in sections)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what Hydra and the parsers raise inside into a UserError; nothing else runs there."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _explain(error) from None


def _require_one_recipe(words: Sequence[str]) -> None:
    texts = [word for word in words if key_of(word) == "recipe"]
    if len(texts) > 1:
        raise UserError(f"{' '.join(texts)}: choose one recipe; a recipe's defaults list may name another")


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


def _note_choices(composed: Composed, folders: Sequence[Path]) -> None:
    """Set ``name`` in the sections whose keys depend on the file that was chosen, for the schema.

    A run's record has names already; there a word that sets one is refused before.
    """
    for group in CHOSEN:
        section = composed.config.get(group)
        if isinstance(section, DictConfig) and group in composed.choices:
            if "name" in section:
                require_current(f"{group}.name")
            section["name"] = _origin(group, composed.choices[group], folders)


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
        raise UserError(f"{override}: {COMPOSES}")
    if override.startswith("+recipe="):  # the defaults list has it, before debug=…
        return override[1:]
    value = override.partition("=")[2]
    if key in TEXTS and value != "null" and NUMBER_LIKE.fullmatch(value):
        override = f"{override.partition('=')[0]}='{value}'"
    as_it_is = key in groups or override[:1] in ("+", "~") or "/" in key or "@" in key
    return override if as_it_is else f"++{override}"


def _check_own_files(choices: Iterable[tuple[str, object]], sources: Sources) -> None:
    """Raise UserError for a chosen file of the user's that cannot be read or has what is not composed here.

    ``choices``: groups and names of their files. What a file's defaults list names is chosen, too.
    """
    left = [*choices]
    known = set()
    while left:
        group, name = left.pop()
        if not isinstance(name, str) or (group, name) in known:
            continue
        known.add((group, name))
        if group == "data":  # which chooses an augmentation of its name
            left.append(("augment", name))
        own = Path(group, f"{name}.yaml")
        places = [folder / own for folder in sources.folders]
        path = next((place for place in places if place.is_file()), None)
        if path not in (None, places[0]):
            left += _check_own_file(path, group)


def _check_own_file(path: Path, group: str) -> list[tuple[str, object]]:
    """Return the groups and names of files in the defaults list of a user's file.

    Raises UserError for one that cannot be read, has a resolver, whose result would be stored, or keys of
    Hydra, which have no effect.
    """
    values = OmegaConf.to_container(load_yaml(path))  # here, as Hydra's message has several lines
    for key, value in flat(values).items():
        if RESOLVER.search(str(value)):
            raise UserError(
                f"{path}: {key}={value} reads something else than keys; set {key} on the command line"
            )
        if key.startswith(SWEPT):
            word = f"{key.removeprefix(SWEPT)}={value}"
            raise UserError(f"{path}: {key}: Hydra only composes here; -m {word} on the command line sweeps")
        if key.startswith("hydra."):
            raise UserError(f"{path}: {key}={value}: {COMPOSES}")
    entries = values.get("defaults", []) if isinstance(values, dict) else []
    named = [*chain.from_iterable(_named(entry, group) for entry in entries)]
    for other, name in named:
        if other.partition("/")[0] == "hydra":
            raise UserError(f"{path}: its defaults list has {other}: {name}: {COMPOSES}")
    return named


def _named(entry: object, group: str) -> list[tuple[str, object]]:
    """Return the groups and names of the files that an ``entry`` of a defaults list in ``group`` names."""
    if isinstance(entry, str):
        name = entry.partition("@")[0]
        return [("", name[1:]) if name[:1] == "/" else (group, name)]
    named: list[tuple[str, object]] = []
    for key, names in entry.items() if isinstance(entry, dict) else ():
        place = str(key).split()[-1].partition("@")[0]  # after `override` or `optional`
        place = place[1:] if place[:1] == "/" else f"{group}/{place}"
        named += [(place, name) for name in (names if isinstance(names, list) else [names])]
    return named


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
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", nargs="?", const="job", choices=["job"])
    parser.add_argument("--config-dir", "-cd", nargs="?", const="", action="append", default=[])
    with reading("the flags", "see --help", argparse.ArgumentError):
        flags, overrides = parser.parse_known_args(arguments)
    flags.printing = flags.help or flags.version or flags.cfg is not None
    flags.groups = [text for text in overrides if flags.help and re.fullmatch(r"\w[\w.]*", text)]
    overrides = [text for text in overrides if text not in flags.groups]
    for text in overrides:
        if text.startswith("-"):
            valid = "--help, -h, --version, --cfg, -c, --config-dir, -cd, -m"
            require_current(text.partition("=")[0])
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
        files = sorted(option for option in error.options if option != OWN)
        if OWN in error.options and "." in choice:
            package = choice.partition(".")[0]
            allow = f' "allow=[{package}]"'
            return UserError(f"unknown {group} {choice!r}; did you mean {group}._target_={choice}{allow}?")
        own = [f"{group}._target_=PACKAGE.NAME"] if OWN in error.options else []
        return not_valid(f"unknown {group} {choice!r}", choice, files + own)
    hint = next((hint for words, hint in hints("hydra").items() if str(error).startswith(words)), "")
    causes = [str(each).split("\n", 1)[0] for each in (error, error.__cause__) if each]
    causes = [causes[0].rstrip("."), hint] if hint else causes
    return UserError(re.sub(r"(^|[ '])\+\+", r"\1", ": ".join(causes)))


def unreadable(override: str) -> UserError:
    """Return the error for an override that does not parse."""
    expected = "expected key=value without spaces, special characters quoted: 'key=\"value\"'"
    return UserError(f"cannot read {override!r}: {expected}")
