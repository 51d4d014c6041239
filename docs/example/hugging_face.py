"""A Hugging Face model, sharded by its layers, and saved by save_pretrained: pip install transformers"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardtrain
from shardtrain import comm

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=101, n_positions=32)
model = shardtrain.shard(GPT2LMHeadModel(config))  # finds GPT2Block; from_pretrained works as well
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + comm.rank())  # other data on each rank
for step in range(3):
    tokens = torch.randint(101, (4, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
whole = shardtrain.full_state_dict(model, rank0_only=True)
if comm.rank() == 0:
    plain = GPT2LMHeadModel(config)
    plain.load_state_dict(whole)
    plain.save_pretrained("gpt2-tiny")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
