"""Train on two or more processes, as your own first script might, without any code of this guide.

torchrun --standalone --nproc-per-node 2 diagnosing-errors/stranger.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, vocab=256, width=128):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.tokens(ids))[0])


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 256, (2**14, 65)))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
net = DDP(Net())
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(100):
    loader.sampler.set_epoch(epoch)
    for i, (ids,) in enumerate(loader):
        out = net(ids[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0 and i % 50 == 0:
            print(f"epoch {epoch} batch {i} loss {mean.item():.3f}", flush=True)
dist.destroy_process_group()
