"""pytorch-modelpar-pipelined-rpc.py of the Digital Research Alliance of Canada's PyTorch page: a pipeline of two stages."""

# ruff: noqa
# fmt: off
# Ported: torch.distributed.pipeline.sync.Pipe, and the RPC it needed, are gone. What torch has instead is
# torch.distributed.pipelining: its GPipe schedule is what Pipe did, with one process for each stage where Pipe drove two
# GPUs from one, and it runs forward, loss and backward in one call. Pipe recomputed activations by default; this does
# not, in the script's favour. No devices: CPUs alone. Added: the epoch's seconds are printed.
import os
import time

import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import torchvision
import torchvision.transforms as transforms
from torchvision.datasets import CIFAR10
from torch.utils.data import DataLoader

import argparse

parser = argparse.ArgumentParser(description='cifar10 classification models, single node model parallelism test')
parser.add_argument('--lr', default=0.1, help='')
parser.add_argument('--batch_size', type=int, default=512, help='')
parser.add_argument('--num_workers', type=int, default=0, help='')
parser.add_argument('--init_method', default='tcp://127.0.0.1:3456', type=str, help='')


def main():

    args = parser.parse_args()

    # Convolutional + pooling part of the model
    class ConvPart(nn.Module):

       def __init__(self):
          super(ConvPart, self).__init__()

          self.conv1 = nn.Conv2d(3, 6, 5)
          self.pool = nn.MaxPool2d(2, 2)
          self.conv2 = nn.Conv2d(6, 16, 5)
          self.relu = nn.ReLU()

       def forward(self, x):
          x = self.pool(self.relu(self.conv1(x)))
          x = self.pool(self.relu(self.conv2(x)))
          x = x.view(-1, 16 * 5 * 5)

          return x

    # Dense feedforward part of the model
    class MLPPart(nn.Module):

       def __init__(self):
          super(MLPPart, self).__init__()

          self.fc1 = nn.Linear(16 * 5 * 5, 120)
          self.fc2 = nn.Linear(120, 84)
          self.fc3 = nn.Linear(84, 10)
          self.relu = nn.ReLU()

       def forward(self, x):
          x = self.relu(self.fc1(x))
          x = self.relu(self.fc2(x))
          x = self.fc3(x)

          return x

    rank = int(os.environ.get("SLURM_PROCID"))
    torch.distributed.init_process_group(backend="gloo", init_method=args.init_method, world_size=2, rank=rank)

    net = ConvPart() if rank == 0 else MLPPart() # one part in each process

    criterion = nn.CrossEntropyLoss()

    stage = PipelineStage(net, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=32, loss_fn=criterion)
    optimizer = optim.SGD(net.parameters(), lr=args.lr)

    transform_train = transforms.Compose([transforms.ToTensor(),transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])

    dataset_train = CIFAR10(root='./data', train=True, download=False, transform=transform_train)

    train_loader = DataLoader(dataset_train, batch_size=args.batch_size, num_workers=args.num_workers)

    perf = []

    total_start = time.time()

    for batch_idx, (inputs, targets) in enumerate(train_loader):

       start = time.time()

       optimizer.zero_grad()
       losses = []
       if rank == 0:
          schedule.step(inputs)
       else:
          schedule.step(target=targets, losses=losses)
       optimizer.step()
       if rank == 1:
          print(f"Loss: {torch.stack(losses).mean().item()}")

       batch_time = time.time() - start

       images_per_sec = args.batch_size/batch_time

       perf.append(images_per_sec)

    total_time = time.time() - total_start
    print(f"seconds {total_time:.4f}")

if __name__=='__main__':
   main()
