"""Fill a sharded model from .safetensors files, as on Hugging Face's hub; no rank holds the whole model."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torchvision
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from shardtrain import comm, full_state_dict, shard

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
plain = torchvision.models.resnet18(num_classes=10)  # stands for what was downloaded
folder = Path("pretrained")
if comm.rank() == 0:
    folder.mkdir(exist_ok=True)
    save_file(plain.state_dict(), folder / "model.safetensors")
torch.distributed.barrier()

with torch.device("meta"):  # no memory for values
    model = torchvision.models.resnet18(num_classes=10)
shard(model).to_empty(device="cpu")  # memory for this rank's shards
dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))

whole = full_state_dict(model)
assert all(value.equal(whole[name]) for name, value in plain.state_dict().items())
model(torch.randn(4, 3, 32, 32)).sum().backward()
print("loaded")
torch.distributed.destroy_process_group()
