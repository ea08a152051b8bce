"""A step of an unedited script on rows against DDP written by hand: `python -m benchmarks.rows_step --help`.

Both train the same model from the same loop on the same number of processes; narrow models, whose kernels cost
nothing, show what Python adds to a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import machine, spread, table

WARMUP, STEPS = 6, 30
MODELS = {
    "resnet18": "resnet18(64), images(128, 32)",
    "gpt": "GPT(256, 4, 4), tokens(16, 128)",
    "cnn": "cnn(), images(64, 28)",
    "narrow-resnet18": "resnet18(1), images(4, 8)",
    "narrow-gpt": "GPT(4, 4, 2), tokens(4, 8)",
    "narrow-vit": "ViT(4, 12, 2), images(4, 8)",
}
PLAIN = """
import json, sys, time
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(width):
    layers, channels = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for stage in range(4):
        for block in range(2):
            out = width * 2**stage
            layers.append(Residual(channels, out, 2 if stage and not block else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(self.ln1(x)).split(C, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, heads, True) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)).flatten(0, 1)


class ViT(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.ModuleList(Block(width, heads, False) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)[:, 0])


def images(rows, side):
    return torch.randn(rows * 4, 3, side, side), torch.randint(0, 10, (rows * 4,)), rows


def tokens(rows, length):
    text = torch.randint(0, 256, (rows * 4, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), rows


model, (inputs, targets, rows) = MODEL
dataset = torch.utils.data.TensorDataset(inputs, targets)
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
times = []
while len(times) < STEPS:
    for images, labels in loader:
        began = time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels.flatten()).backward()
        optimizer.step()
        ended = time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        times.append([after - before for before, after in zip(began, ended)])
with open(sys.argv[1], "w") as file:
    json.dump(times, file)
"""
ALONE = "loader = torch.utils.data.DataLoader(dataset, batch_size=rows, shuffle=True)\n"
BY_HAND = """
import os
import torch.distributed as dist

dist.init_process_group("gloo")
sampler = torch.utils.data.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=rows // dist.get_world_size(), sampler=sampler)
model = nn.parallel.DistributedDataParallel(model)
sys.argv[1] += os.environ["RANK"]
"""
HEAD = ("model", "way", "wall ms a step", "CPU ms a step", "wall, ratio to DDP", "CPU, ratio to DDP", "CPU ms over DDP")


def main() -> None:
    """Measures the models in turns and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows_step", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if none")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5, help="times that each way is started, one after the other")
    parser.add_argument("--keys", default="batchnorm=local", help="of the plan, beyond replicate; DDP has its own rows")
    options = parser.parse_args()
    print(f"{options.processes} processes, {options.turns} turns, {machine()}\n")
    rows = []
    for name in options.models or MODELS:
        taken: dict[str, list[tuple[float, float]]] = {"DDP by hand": [], "rows": []}
        for _ in range(options.turns):
            for way, turns in taken.items():
                turns.append(measured(name, way, options.processes, options.keys))
        rows += table_rows(name, taken)
    print(table(HEAD, rows))
    print(f"\nFrom {machine()}.")


def measured(name: str, way: str, processes: int, keys: str) -> tuple[float, float]:
    """Median wall and CPU seconds of a step of process 0."""
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        script = Path(folder) / "script.py"
        model = PLAIN.replace("MODEL", MODELS[name], 1)
        loop = LOOP.replace("STEPS", str(WARMUP + STEPS), 1)
        script.write_text(model + (ALONE if way == "rows" else BY_HAND) + loop)
        bin_folder = Path(sys.executable).parent
        plan = ",".join(filter(None, (f"replicate={processes}", keys)))
        command = (
            [str(bin_folder / "grappe"), "launch", "--plan", plan, str(script), "times"]
            if way == "rows"
            else [str(bin_folder / "torchrun"), f"--nproc-per-node={processes}", "--standalone", str(script), "times"]
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        (file,) = [each for each in Path(folder).glob("times*") if each.name in ("times", "times0")]
        steps = json.loads(file.read_text())[WARMUP:]
        wall, cpu = (spread([step[at] for step in steps]).median for at in (0, 1))
        return wall, cpu


def table_rows(name: str, taken: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """A row for each way; ratios are taken within a turn, then their median."""
    base = taken["DDP by hand"]
    rows = []
    for way, turns in taken.items():
        wall, cpu = ([turn[at] * 1e3 for turn in turns] for at in (0, 1))
        row = [name, way, spread(wall).text("{:.1f}"), spread(cpu).text("{:.1f}")]
        if turns is not base:
            row += [spread([a[at] / b[at] for a, b in zip(turns, base, strict=True)]).text("{:.3f}") for at in (0, 1)]
            row.append(spread([(a[1] - b[1]) * 1e3 for a, b in zip(turns, base, strict=True)]).text("{:.1f}"))
        rows.append(row + [""] * (len(HEAD) - len(row)))
    return rows


if __name__ == "__main__":
    main()
