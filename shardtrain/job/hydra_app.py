"""Command line → configuration, by Hydra, with the style of this program's own messages.

Hydra runs here as a function from arguments to a configuration: it makes no directory, configures no
logging and starts no job. What it prints for `--help` or `--cfg job` appears on rank 0 alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import shardtrain
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.schema import Frozen, UserError, checked, not_valid

FOLDER_FLAGS = ("--config-dir", "-cd")
VALUED_FLAGS = (*FOLDER_FLAGS, "--cfg", "-c", "--package", "-p")


def compose(arguments: Sequence[str], *, speak: bool = True, folder: Path | None = None) -> DictConfig | None:
    """Return the configuration that ``arguments`` (without the program's name) ask for.

    ``folder`` holds the program's `config.yaml` and its groups; the training program's is the default.
    None when they asked for something to be printed instead, which is done where ``speak`` is true.
    """
    if folder is None:
        with program_configs() as own:
            return compose(arguments, speak=speak, folder=own)
    flags, overrides = split(arguments)
    folders = [folder, *(Path(text) for flag, text in pairwise(flags) if flag in FOLDER_FLAGS)]
    _register_resolvers(folders)
    groups = {
        *ConfigStore.instance().repo,
        *(path.parent.name for each in folders for path in each.glob("*/*.yaml")),
    }
    arguments = [*flags, *(_as_hydra_takes_it(text, groups) for text in overrides)]
    composed: list[DictConfig] = []
    errors = io.StringIO()
    main = hydra.main(version_base="1.3", config_path=str(folder), config_name="config")(composed.append)
    try:
        if not flags:  # Hydra's own program would compose twice
            with hydra.initialize_config_dir(str(folder), version_base="1.3"):
                return hydra.compose("config", arguments)
        output = contextlib.nullcontext() if speak else contextlib.redirect_stdout(io.StringIO())
        with _hydra_as_a_function(arguments), contextlib.redirect_stderr(errors), output:
            main()
    except SystemExit as leaving:
        if leaving.code:
            raise UserError(errors.getvalue().strip().rpartition("error: ")[2]) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _explain(error) from None
    return composed[0] if composed else None


def _as_hydra_takes_it(override: str, groups: Collection[str]) -> str:
    """Return ``override`` so that it sets any key; the schema refuses unknown ones, with the nearest name."""
    key = override.partition("=")[0]
    if key == "+recipe":  # the defaults list has a place for it, so that debug=… comes after it
        return override[1:]
    as_it_is = key in groups or key[:1] in ("+", "~") or "/" in key or "@" in key
    return override if as_it_is else f"++{override}"


def _register_resolvers(folders: Sequence[Path]) -> None:
    """Define what `config.yaml` takes from the files in ``folders``."""

    def own_or_none(group: str, name: str) -> str:
        """Return the option of ``group`` with this name, or `none` where no file has it."""
        return name if any((folder / group / f"{name}.yaml").is_file() for folder in folders) else "none"

    OmegaConf.register_new_resolver("recipes", lambda: recipe_table(folders), replace=True)
    OmegaConf.register_new_resolver("own_or_none", own_or_none, replace=True)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags with their values, and the overrides. Hydra reads them in this order only."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, text in zip(["", *arguments], arguments, strict=False):
        value = before in VALUED_FLAGS or (before in ("--info", "-i") and "=" not in text)
        (flags if value or text.startswith("-") else overrides).append(text)
    return flags, overrides


def read_beside(
    cls: type[Frozen], arguments: Sequence[str], *, speak: bool, folder: Path
) -> tuple[Frozen, Config] | None:
    """Return a program's own configuration, a ``cls`` in ``folder``, and the training program's.

    For a program that takes the keys of both. None when something was to be printed instead.
    """
    own = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    mine = [text for text in arguments if text.split("=")[0] in own or text in ("--help", "-h")]
    keys = compose(mine, speak=speak, folder=folder)
    config = compose([text for text in arguments if text not in mine], speak=speak) if keys else None
    return None if keys is None or config is None else (checked(keys, cls), from_hydra(config))


@contextlib.contextmanager
def program_configs() -> Iterator[Path]:
    """Give the training program's folder, and let Hydra know the models that it leaves out."""
    folder = config_folder()
    with importlib.import_module("shardtrain.configs").registered():
        yield folder


def config_folder() -> Path:
    """Return the folder of the config groups: beside the package in a checkout, else in the package."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "configs").is_dir() and str(checkout) not in shardtrain.__path__:
        shardtrain.__path__.append(str(checkout))  # comes before another checkout that is installed
    configs = importlib.import_module("shardtrain.configs")
    assert configs.__file__ is not None
    return Path(configs.__file__).resolve().parent


@contextlib.contextmanager
def _hydra_as_a_function(arguments: Sequence[str]) -> Iterator[None]:
    """Let Hydra read ``arguments`` as `sys.argv`, and raise instead of printing and leaving."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()
        del os.environ["HYDRA_FULL_ERROR"]
        os.environ.update(environment)


def _explain(error: Exception) -> UserError:
    """Return one line in place of Hydra's message, with the nearest valid name."""
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override).removeprefix("++"))
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).strip("/").rpartition("/")
        return not_valid(f"unknown {group} {choice!r}", choice, sorted(error.options))
    causes = [str(each).split("\n", 1)[0] for each in (error, error.__cause__) if each]
    return UserError(re.sub(r"(^|[ '])\+\+", r"\1", ": ".join(causes)))


def unreadable(override: str) -> UserError:
    """Return the error of an override that does not parse."""
    return UserError(
        f"cannot read {override!r}: expected key=value, special characters quoted: 'key=\"value\"'"
    )


def recipe_table(folders: Iterable[Path]) -> str:
    """Return a line for each recipe in ``folders``: name, published accuracy, first line of its card."""
    rows = []
    for file in sorted(file for folder in folders for file in (folder / "recipe").glob("*.yaml")):
        accuracy = OmegaConf.select(OmegaConf.load(file), "reference.accuracy")
        comments = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
        title = next((text for text in comments if text and not text.startswith("@package")), "")
        rows.append((file.stem, "" if accuracy is None else f"{accuracy:.2f} %", title))
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {claim:>7}  {title}".rstrip() for name, claim, title in rows)
