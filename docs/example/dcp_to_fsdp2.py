"""Save by torch.distributed.checkpoint, and continue under FSDP2: the files are the same."""

import torch
import torch.distributed.checkpoint as dcp
import torchvision
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardtrain import average_buffers, full_state_dict, optimizer_state_dict, shard

torch.distributed.init_process_group("gloo")
ours = shard(torchvision.models.resnet18(num_classes=10))
optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
ours(torch.randn(4, 3, 32, 32)).sum().backward()
optimizer.step()

average_buffers(ours)  # BatchNorm's statistics: DCP stores those of one rank
state = {"model": ours.state_dict(), "optim": optimizer_state_dict(ours, optimizer)}
dcp.save(state, checkpoint_id="run/100")

dcp.load(state, checkpoint_id="run/100")  # back into the parameters and the optimizer's state, in place
optimizer.load_state_dict(state["optim"])  # learning rates and other options

mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
theirs = fully_shard(torchvision.models.resnet18(num_classes=10), mesh=mesh)
continued = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
model_state, optim_state = get_state_dict(theirs, continued)
dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id="run/100")
set_state_dict(theirs, continued, model_state_dict=model_state, optim_state_dict=optim_state)

whole = full_state_dict(ours)
assert all(param.full_tensor().equal(whole[name]) for name, param in theirs.named_parameters())
theirs(torch.randn(4, 3, 32, 32)).sum().backward()
continued.step()
print("FSDP2 continues from our checkpoint")
torch.distributed.destroy_process_group()
