"""Images in folders: `root/train/<class>/<image>` and `root/val/<class>/<image>`, like ImageNet's.

It is an own file because torchvision's transforms, which it needs, take a second to import.
"""

from __future__ import annotations

from pathlib import Path

from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS

from shardtrain.job.config import ImageFolder
from shardtrain.job.data.batches import DataSet
from shardtrain.job.data.photos import pictures
from shardtrain.job.schema import UserError


class Files:
    """One of the two parts."""

    def __init__(self, found: datasets.ImageFolder) -> None:
        self.paths: list[str] = [path for path, _ in found.samples]
        self.labels: list[int] = found.targets

    def __getitem__(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


def image_folder(config: ImageFolder) -> DataSet:
    train, val = (_find(config, part) for part in ("train", "val"))
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"data.root={config.root}: train and val differ in the classes {', '.join(odd[:5])}")
    return pictures(config, Files(train), Files(val), len(train.classes))


def _find(config: ImageFolder, part: str) -> datasets.ImageFolder:
    root = Path(config.root).expanduser()
    advice = _advice(root, part)
    if advice:
        raise UserError(f"data.root={config.root}: {advice}")
    try:
        return datasets.ImageFolder(str(root / part))
    except FileNotFoundError as error:  # a class without images
        raise UserError(f"data.root={config.root}: {error}") from None


def _advice(root: Path, part: str) -> str:
    """Return what to do about a part that is missing, or not sorted into classes; "" where all is well."""
    if not (root / part).is_dir():
        missing = f"there is no folder {(root / part).absolute()}; expected {part}/<class>/<image> in it"
        return f"{missing}{_instead(root, part)}"
    entries = list((root / part).iterdir())
    if any(entry.is_dir() for entry in entries):
        return ""
    images = sum(_is_image(entry) for entry in entries)
    return (
        f"{part} holds {images} images, but no folders; sort them into {part}/<class>/<image>, with the same "
        "classes as the other part"
    )


def _instead(root: Path, part: str) -> str:
    """Return what was found that may have been meant."""
    if not root.is_dir():
        return ""
    for below in ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "imagenet", "images"):
        if (root / below / part).is_dir():
            return f"; there is one in data.root={root / below}"
    inside = sorted(root.iterdir())
    if any(entry.suffix in (".tar", ".zip", ".tgz", ".gz") for entry in inside):
        archive = next(entry.name for entry in inside if entry.suffix in (".tar", ".zip", ".tgz", ".gz"))
        return f"; {archive} there has to be unpacked first (tar files of WebDataset: data=webdataset)"
    if any(_is_image(entry) for folder in inside if folder.is_dir() for entry in folder.iterdir()):
        return f"; {root} seems to be one part itself: give the folder that has train and val"
    names = ", ".join(entry.name for entry in inside[:5])
    return f"; found there: {names}" if names else "; the folder is empty"


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMG_EXTENSIONS
