"""grappe launch of a script with files of its own: models/, a bar as wide as the terminal, the best weights saved."""

import os
import pty
import re
import sys
from pathlib import Path

import torch

from tests.commands import GRAPPE
from tests.warm import WarmProcess

FILES = {
    "models/__init__.py": "from .small import *\n",
    "models/small.py": """
import torch.nn as nn

class Small(nn.Module):
    def __init__(self):
        super(Small, self).__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.linear = nn.Linear(4 * 36, 10)

    def forward(self, x):
        out = self.features(x)
        return self.linear(out.view(out.size(0), -1))
""",
    "utils.py": """
import os, sys

_, term_width = os.popen('stty size', 'r').read().split()
term_width = int(term_width)

def progress_bar(current, total, msg=None):
    sys.stdout.write('=' * current + '>' + '.' * (total - current - 1) + ' ' + msg)
    for i in range(term_width - total - len(msg)):
        sys.stdout.write(' ')
    sys.stdout.write(' %d/%d ' % (current + 1, total))
    sys.stdout.write('\\r' if current < total - 1 else '\\n')
    sys.stdout.flush()
""",
    "main.py": """
import os
import torch, torch.nn as nn, torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from models import *
from utils import progress_bar

torch.manual_seed(0)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
best_acc = 0
x, y = torch.randn(50, 3, 8, 8), torch.randint(0, 10, (50,))
trainloader = DataLoader(TensorDataset(x[:30], y[:30]), 12, shuffle=True, num_workers=1)
testloader = DataLoader(TensorDataset(x[30:], y[30:]), 10)
net = Small().to(device)
if device == 'cuda':
    net = nn.DataParallel(net)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

def run(loader, trains):
    net.train(trains)
    loss_sum = correct = total = 0
    for batch_idx, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_sum += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        progress_bar(batch_idx, len(loader), 'Loss: %.4f | Acc: %.3f%% (%d/%d)'
                     % (loss_sum / (batch_idx + 1), 100. * correct / total, correct, total))
    return 100. * correct / total

def test(epoch):
    global best_acc
    with torch.no_grad():
        acc = run(testloader, False)
    if acc >= best_acc:
        print('Saving..')
        os.makedirs('checkpoint', exist_ok=True)
        torch.save({'net': net.state_dict(), 'acc': acc, 'epoch': epoch}, './checkpoint/ckpt.pth')
        best_acc = acc

for epoch in range(2):
    print('\\nEpoch: %d' % epoch)
    run(trainloader, True)
    test(epoch)
    scheduler.step()
""",
}


def on_a_terminal(folder: Path, *command: str) -> str:
    """Runs a command on a pseudo-terminal; returns what it showed."""
    terminal, other = pty.openpty()
    started = WarmProcess(command, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True)
    os.close(other)
    shown = b""
    while True:
        try:
            got = os.read(terminal, 4096)
        except OSError:  # the terminal is closed
            break
        if not got:
            break
        shown += got
    os.close(terminal)
    assert started.wait() == 0, shown.decode()
    return shown.decode()


def test_a_script_with_a_tree_of_files_prints_and_saves_what_one_process_does(tmp_path: Path) -> None:
    lines, saved = {}, {}
    for name, words in {"plain": [], "launched": ["launch", "--plan", "replicate=2,batchnorm=sync,threads=1"]}.items():
        for file, text in FILES.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        shown = on_a_terminal(tmp_path / name, *([GRAPPE, *words] if words else [sys.executable]), "main.py")
        assert "whole batches" not in shown
        assert re.findall(r"starting 2 processes …(.{4})", shown) == (["\r\033[K"] if words else [])
        lines[name] = re.findall(r"Loss: .*?\)|Epoch: \d|Saving", shown)
        saved[name] = torch.load(tmp_path / name / "checkpoint" / "ckpt.pth")
    assert lines["launched"] == lines["plain"] and len(lines["plain"]) >= 2 * (1 + 3 + 2)
    assert saved["launched"]["epoch"] == saved["plain"]["epoch"]
    for name, tensor in saved["plain"]["net"].items():
        assert torch.allclose(saved["launched"]["net"][name], tensor, rtol=1e-4, atol=1e-6), name
