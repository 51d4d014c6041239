"""Train a sharded model in a loop of Hugging Face Accelerate's.

torchrun --nproc-per-node 2 with_accelerate.py
"""

import accelerate
import torch
import torchvision

import shardtrain

accelerator = accelerate.Accelerator(cpu=True)
model = shardtrain.shard(torchvision.models.squeezenet1_1(num_classes=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(8, 3, 64, 64), torch.randint(10, (8,)))
optimizer, loader = accelerator.prepare(optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for images, labels in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
