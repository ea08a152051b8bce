"""Forms of public training scripts, written anew: as they are, with Accelerate, and with grappe.Loop.

The forms are those of the scripts in benchmarks/unedited.toml that differ most; docs/from-a-script.md has three others.
"""

from __future__ import annotations

import dataclasses
import difflib

HEAD = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
"""
Edit = tuple[str, str]
ACCELERATOR: Edit = ("import torch\n", "import torch\nfrom accelerate import Accelerator\n")
GRAPPE: Edit = ("import torch\n", "import torch\nimport grappe\n")
LOOP: Edit = (
    "\nfor epoch in range(",
    "\nmodel, optimizer = loop.parallelize(model, optimizer)\nfor epoch in loop.epochs(",
)
BACKWARD: Edit = ("loss.backward()", "accelerator.backward(loss)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A script, and what is replaced in it."""

    script: str
    accelerate: tuple[Edit, ...]
    grappe: tuple[Edit, ...]

    def text(self, library: str = "") -> str:
        """Returns the script with a library; "" for as it is."""
        text = HEAD + self.script
        edits = {"": (), "accelerate": (ACCELERATOR, *self.accelerate), "grappe": (GRAPPE, *self.grappe)}[library]
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        return text


def lines_changed(plain: str, other: str) -> int:
    """Counts the lines of `other` that `plain` does not have, indentation aside."""
    lines = ([line.strip() for line in text.splitlines()] for text in (plain, other))
    return sum(line.startswith("+ ") and bool(line[2:]) for line in difflib.ndiff(*lines))


FORMS = {
    # A summed loss with noise: a variational autoencoder.
    "vae": Form(
        script="""
images = torch.rand(90, 12)
encoder, decoder = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 12), nn.Sigmoid())
model = nn.ModuleList([encoder, decoder])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(images), 32, shuffle=True)
for epoch in range(2):
    total = 0.0
    for (real,) in loader:
        optimizer.zero_grad()
        mean, spread = encoder(real).chunk(2, 1)
        output = decoder(mean + torch.randn_like(spread) * spread.exp())
        kept = F.binary_cross_entropy(output, real, reduction="sum")
        loss = kept - 0.5 * torch.sum(1 + 2 * spread - mean**2 - (2 * spread).exp())
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(epoch, total / len(images))
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\nencoder, decoder, optimizer, loader = "
             "accelerator.prepare(encoder, decoder, optimizer, loader)\nfor epoch"),
            BACKWARD,
            ("loss.item()", "accelerator.reduce(loss.detach()).item()"),
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            ("loader = DataLoader(TensorDataset(images), 32, shuffle=True)", "loop = grappe.Loop()"),
            LOOP,
            ("in loader:", "in loop.batches(TensorDataset(images), 32):"),
        ),
    ),
    # No loader: each step has the whole data set.
    "whole": Form(
        script="""
inputs, targets = torch.randn(15, 1), torch.randn(15, 1)
model = nn.Linear(1, 1)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(20):
    loss = criterion(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 5 == 4:
        print(epoch, loss.item())
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\nloader = DataLoader(TensorDataset(inputs, targets), 15)\n"
             "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor epoch"),
            ("    loss = ", "    inputs, targets = next(iter(loader))\n    loss = "),
            BACKWARD,
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            ("\nfor epoch", "\nloop = grappe.Loop()\nmodel, optimizer = loop.parallelize(model, optimizer)\nfor epoch"),
        ),
    ),
    # Several networks, each with its optimizer, in one loop: a comparison of optimizers.
    "several": Form(
        script="""
data = TensorDataset(torch.randn(60, 1), torch.randn(60, 1))
nets = [nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(3)]
makers = [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam]
optimizers = [maker(net.parameters(), lr=0.01) for maker, net in zip(makers, nets)]
criterion = nn.MSELoss()
loader = DataLoader(data, 16, shuffle=True)
for epoch in range(2):
    for inputs, targets in loader:
        losses = []
        for net, optimizer in zip(nets, optimizers):
            loss = criterion(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(epoch, *losses)
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\nloader = accelerator.prepare(loader)\n"
             "nets = [accelerator.prepare(net) for net in nets]\n"
             "optimizers = [accelerator.prepare(each) for each in optimizers]\nfor epoch"),
            BACKWARD,
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            ("loader = DataLoader(data, 16, shuffle=True)\nfor epoch in range(2)",
             "loop = grappe.Loop()\nfor pair in zip(nets, optimizers):\n    loop.parallelize(*pair)\n"
             "for epoch in loop.epochs(2)"),
            ("in loader:", "in loop.batches(data, 16):"),
        ),
    ),
    # A class that trains for a number of steps, by next(iterator).
    "trainer": Form(
        script="""
class Trainer:
    def __init__(self, model, data):
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def run(self, steps):
        loader = DataLoader(self.data, 16, shuffle=True)
        iterator = iter(loader)
        for step in range(steps):
            try:
                tokens, following = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                tokens, following = next(iterator)
            loss = F.cross_entropy(self.model(tokens), following)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if step % 3 == 0:
                print(step, loss.item())


data = TensorDataset(torch.randint(0, 9, (70,)), torch.randint(0, 9, (70,)))
Trainer(nn.Sequential(nn.Embedding(9, 16), nn.Dropout(0.1), nn.Linear(16, 9)), data).run(12)
""",
        accelerate=(
            ("        iterator = iter(loader)\n        for", "        accelerator = Accelerator()\n"
             "        self.model, self.optimizer, loader = accelerator.prepare(self.model, self.optimizer, loader)\n"
             "        iterator = iter(loader)\n        for"),
            BACKWARD,
            ("torch.nn.utils.clip", "accelerator.clip"),
            ("print(step", "accelerator.print(step"),
        ),
        grappe=(
            ("        loader = DataLoader(self.data, 16, shuffle=True)\n        iterator = iter(loader)\n"
             "        for step in range(steps):\n            try:\n                tokens, following = next(iterator)\n"
             "            except StopIteration:\n                iterator = iter(loader)\n"
             "                tokens, following = next(iterator)\n",
             "        loop.parallelize(self.model, self.optimizer)\n"
             "        for step, (tokens, following) in zip(range(steps), loop.batches(self.data, 16,"
             " epochs=steps)):\n"),
            ("\n\nclass", "\nloop = grappe.Loop()\n\nclass"),
        ),
    ),
    # Windows of a text that the loop draws itself, accumulated gradients, a rate that it sets.
    "windows": Form(
        script="""
text = torch.randint(0, 9, (400,))


def get_batch():
    places = torch.randint(len(text) - 8, (12,))
    return torch.stack([text[i : i + 8] for i in places]), torch.stack([text[i + 1 : i + 9] for i in places])


model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
    total = 0.0
    for _ in range(2):
        tokens, following = get_batch()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, total)
""",
        accelerate=(
            ("\nfor step", "\naccelerator = Accelerator(gradient_accumulation_steps=2)\n"
             "model, optimizer = accelerator.prepare(model, optimizer)\n"
             "torch.manual_seed(accelerator.process_index)\nfor step"),
            BACKWARD,
            ("torch.nn.utils.clip", "accelerator.clip"),
            ("print(step", "accelerator.print(step"),
        ),
        grappe=(
            ("\nfor step", "\nloop = grappe.Loop()\nmodel, optimizer = loop.parallelize(model, optimizer)\nfor step"),
        ),
    ),
    # A plateau schedule that follows an evaluation, with batch normalisation: segmentation.
    "plateau": Form(
        script="""
images, masks = torch.randn(40, 3, 8, 8), torch.randint(0, 2, (40, 8, 8))
train, validation = TensorDataset(images[:30], masks[:30]), TensorDataset(images[30:], masks[30:])
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
criterion = nn.CrossEntropyLoss()
loader, other_loader = DataLoader(train, 8, shuffle=True), DataLoader(validation, 8)
for epoch in range(3):
    model.train()
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    score = 0.0
    with torch.no_grad():
        for inputs, targets in other_loader:
            score += (model(inputs).argmax(1) == targets).float().mean((1, 2)).sum().item()
    score /= len(validation)
    schedule.step(score)
    print(epoch, score, optimizer.param_groups[0]["lr"])
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\nmodel = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
             "model, optimizer, loader, other_loader = accelerator.prepare(model, optimizer, loader, other_loader)\n"
             "for epoch"),
            BACKWARD,
            ("            score +=", "            output, targets = accelerator.gather_for_metrics((model(inputs), "
             "targets))\n            score +="),
            ("(model(inputs).argmax", "(output.argmax"),
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            LOOP,
            ("loader, other_loader = DataLoader(train, 8, shuffle=True), ", "loop, other_loader = grappe.Loop(), "),
            ("in loader:", "in loop.batches(train, 8):"),
        ),
    ),
    # A penalty on the gradient of the critic, which trains five times as often: WGAN-GP.
    "penalty": Form(
        script="""
images = torch.rand(96, 6)
generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
step_g, step_c = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, critic))
loader = DataLoader(TensorDataset(images), 16, shuffle=True)
for number, (real,) in enumerate(loader):
    step_c.zero_grad()
    fake = generator(torch.randn(len(real), 4))
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake.detach()).requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    penalty = (slope.norm(2, 1) - 1) ** 2
    loss = (critic(fake.detach())[:, 0] - critic(real)[:, 0] + 10 * penalty).mean()
    loss.backward()
    step_c.step()
    if number % 3 == 0:
        step_g.zero_grad()
        other = -critic(fake).mean()
        other.backward()
        step_g.step()
        print(number, loss.item(), other.item())
""",
        accelerate=(
            ("\nfor number", "\naccelerator = Accelerator()\ngenerator, critic, step_g, step_c, loader = "
             "accelerator.prepare(generator, critic, step_g, step_c, loader)\nfor number"),
            BACKWARD,
            ("other.backward()", "accelerator.backward(other)"),
            ("print(number", "accelerator.print(number"),
        ),
        grappe=(
            ("loader = DataLoader(TensorDataset(images), 16, shuffle=True)\n",
             "loop = grappe.Loop()\nloop.parallelize(generator, step_g)\nloop.parallelize(critic, step_c)\n"),
            ("enumerate(loader)", "enumerate(loop.batches(TensorDataset(images), 16))"),
        ),
    ),
    # A third optimizer over two models: InfoGAN.
    "shared": Form(
        script="""
import itertools
images = torch.rand(48, 6)
generator, critic = nn.Linear(4, 6), nn.Linear(6, 5)
step_g, step_c = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, critic))
step_both = torch.optim.Adam(itertools.chain(generator.parameters(), critic.parameters()), lr=0.01)
criterion = nn.MSELoss()
loader = DataLoader(TensorDataset(images), 16, shuffle=True)
for epoch in range(2):
    for (real,) in loader:
        step_g.zero_grad()
        code = torch.randn(len(real), 4)
        loss = criterion(critic(generator(code))[:, 0], torch.ones(len(real)))
        loss.backward()
        step_g.step()
        step_c.zero_grad()
        fake = criterion(critic(generator(code).detach())[:, 0], torch.zeros(len(real)))
        fake.backward()
        step_c.step()
        step_both.zero_grad()
        info = criterion(critic(generator(code))[:, 1:], code)
        info.backward()
        step_both.step()
    print(epoch, loss.item(), fake.item(), info.item())
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\ngenerator, critic, loader = accelerator.prepare("
             "generator, critic, loader)\nstep_g, step_c, step_both = accelerator.prepare(step_g, step_c, step_both)\n"
             "for epoch"),
            BACKWARD,
            ("fake.backward()", "accelerator.backward(fake)"),
            ("info.backward()", "accelerator.backward(info)"),
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            ("loader = DataLoader(TensorDataset(images), 16, shuffle=True)\nfor epoch in range(",
             "loop, both = grappe.Loop(), nn.ModuleList([generator, critic])\nfor each in (step_g, step_c,"
             " step_both):\n    loop.parallelize(both, each)\nfor epoch in loop.epochs("),
            ("in loader:", "in loop.batches(TensorDataset(images), 16):"),
        ),
    ),
    # Data that are drawn anew in each step.
    "drawn": Form(
        script="""
weight = torch.randn(4, 1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    inputs = torch.randn(32, 1) ** torch.arange(1, 5)
    optimizer.zero_grad()
    loss = F.smooth_l1_loss(model(inputs), inputs @ weight)
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(step, loss.item())
""",
        accelerate=(
            ("\nfor step", "\naccelerator = Accelerator()\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
             "torch.manual_seed(accelerator.process_index)\nfor step"),
            BACKWARD,
            ("print(step", "accelerator.print(step"),
        ),
        grappe=(
            ("\nfor step", "\nloop = grappe.Loop()\nmodel, optimizer = loop.parallelize(model, optimizer)\nfor step"),
        ),
    ),
    # Pairs of samples that the data set draws, and weights that are clipped after each step.
    "pairs": Form(
        script="""
class Pairs(torch.utils.data.Dataset):
    def __init__(self):
        self.points, self.labels = torch.randn(50, 6), torch.arange(50) % 5

    def __len__(self):
        return 50

    def __getitem__(self, index):
        other = int(torch.randint(0, 50, ()))
        return self.points[index], self.points[other], (self.labels[index] == self.labels[other]).float()


net, head = nn.Linear(6, 8), nn.Sequential(nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))
model = nn.ModuleList([net, head])
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
criterion = nn.BCELoss()
loader = DataLoader(Pairs(), 16, shuffle=True)
for epoch in range(2):
    for first, second, same in loader:
        optimizer.zero_grad()
        loss = criterion(head(torch.cat([net(first), net(second)], 1)), same)
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
    print(epoch, loss.item())
""",
        accelerate=(
            ("\nfor epoch", "\naccelerator = Accelerator()\nnet, head, optimizer, loader = "
             "accelerator.prepare(net, head, optimizer, loader)\nfor epoch"),
            BACKWARD,
            ("print(epoch", "accelerator.print(epoch"),
        ),
        grappe=(
            LOOP,
            ("loader = DataLoader(Pairs(), 16, shuffle=True)", "loop, pairs = grappe.Loop(), Pairs()"),
            ("in loader:", "in loop.batches(pairs, 16):"),
        ),
    ),
}  # fmt: skip
