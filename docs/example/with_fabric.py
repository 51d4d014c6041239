"""Train a sharded model in a loop of Lightning Fabric's.

torchrun --nproc-per-node 2 with_fabric.py
"""

import lightning_fabric
import torch
import torchvision

import shardtrain

fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = shardtrain.shard(torchvision.models.squeezenet1_1(num_classes=10))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
data = torch.utils.data.TensorDataset(torch.randn(8, 3, 64, 64), torch.randint(10, (8,)))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2))
for images, labels in loader:
    fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
    shardtrain.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
