"""Read data sets of Hugging Face's, and WebDataset's tar files (``<key>.jpg`` and ``<key>.cls``)."""

import datasets
from torchvision.transforms import v2


class Rows:
    def __init__(self, rows, image_size, image="image", label="label"):
        self.rows, self.image, self.label = rows, image, label
        self.resize = v2.Resize((image_size, image_size))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return self.resize(row[self.image].convert("RGB")), row[self.label]


def hub(path: str, image_size: int):
    parts = datasets.load_dataset(path)
    return Rows(parts["train"], image_size), Rows(parts["validation"], image_size)


def tars(root: str, image_size: int):
    files = {"train": f"{root}/train-*.tar", "val": f"{root}/val-*.tar"}
    parts = datasets.load_dataset("webdataset", data_files=files)
    return tuple(Rows(parts[part], image_size, "jpg", "cls") for part in files)
