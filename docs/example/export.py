"""Write a sharded model's weights as one file that stock torchvision loads."""

import pathlib

import torch
import torchvision
from safetensors.torch import load_file, save_file

import shardtrain
from shardtrain import comm

torch.distributed.init_process_group("gloo")
model = shardtrain.shard(torchvision.models.resnet18(num_classes=10))
model(torch.randn(4, 3, 32, 32)).sum().backward()
shardtrain.average_buffers(model)  # BatchNorm's statistics, which each rank has of its own data

whole = shardtrain.full_state_dict(model, rank0_only=True)  # called on all ranks, whole on rank 0
if comm.rank() == 0:
    save_file(whole, "resnet18.safetensors")
    plain = torchvision.models.resnet18(num_classes=10)  # no shardtrain from here on
    plain.load_state_dict(load_file("resnet18.safetensors"))
    mebibytes = pathlib.Path("resnet18.safetensors").stat().st_size / 2**20
    print(f"resnet18.safetensors: {mebibytes:.1f} MiB")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
