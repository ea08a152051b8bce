"""Small scripts for one process, in the forms of tutorials, that `grappe launch` must run on several as on one.

Each trains a few steps of uneven batches in fp64, prints, and leaves its weights in `weights`, a list of tensors.
"""

from __future__ import annotations

HEAD = """
import copy, math, random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3), np.random.seed(3), random.seed(3)
x, y = torch.randn(41, 1, 6, 6), torch.randint(0, 3, (41,))
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
"""

SCRIPTS = {
    "mnist: dropout, a schedule, an evaluation that counts": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(64, 3)
        self.dropout = nn.Dropout(0.25)

    def forward(self, images):
        return self.head(self.dropout(torch.flatten(F.relu(self.norm(self.conv(images))), 1)))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
for epoch in range(2):
    model.train()
    seen = right = 0
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        output = model(images)
        loss = F.cross_entropy(output, labels, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += labels.size(0)
        right += (output.argmax(1) == labels).sum().item()
        print(f"{epoch} [{number * len(images)}/{len(loader.dataset)}] {loss:.6f} {output[:6].std().item():.6f}")
    schedule.step()
    model.eval()
    with torch.no_grad():
        test = sum(F.cross_entropy(model(a), b, reduction="sum").item() for a, b in loader) / len(loader.dataset)
    print(f"{right}/{seen} test {test:.6f}")
weights = [*model.state_dict().values()]
""",
    "a data set whose module transforms its samples, in data workers, too": """
class Images(TensorDataset):
    transform = nn.Sequential(nn.Unflatten(0, (3, 2)), nn.Softmax(2))

    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return self.transform(image.flatten(0, 1)), label

model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for workers in (0, 1):
    for images, labels in DataLoader(Images(x, y), 16, num_workers=workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "data workers that draw and count, whose batches the processes share out, and one that fails": """
class Photos(torch.utils.data.Dataset):
    def __init__(self, fails=-1):
        self.read, self.fails = 0, fails

    def __len__(self):
        return 47

    def __getitem__(self, number):
        if number == self.fails:
            raise ValueError("a damaged file")
        self.read += 1
        image = torch.randn(3, 24, 24) + self.read / 50 + random.random()
        return {"image": image, "bright": image > 1, "name": f"photo {number}"}, number % 3

layers = nn.Conv2d(3, 4, 5, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(196, 3)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loaders = [DataLoader(Photos(), 16, shuffle=True, num_workers=workers) for workers in (1, 3)]
loaders.append(DataLoader(Photos(), 16, num_workers=2, persistent_workers=True))
for loader in loaders:
    for epoch in range(2):
        for (photo, labels), _ in zip(loader, range(1 + 2 * (loader is not loaders[1]))):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(photo["image"] * photo["bright"]), labels)
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.6f} {photo['image'].sum().item():.4f} {labels.tolist()} {photo['name'][-1]}")
try:
    for photo, labels in DataLoader(Photos(fails=30), 8, num_workers=2):
        print(f"{photo['image'].mean().item():.5f}")
except ValueError as error:
    print("ended:", str(error).splitlines()[-1])
weights = [*model.parameters()]
""",
    "vae: a summed loss with noise": """
encoder, decoder = nn.Linear(36, 8), nn.Linear(4, 36)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
total = 0
for images, _ in loader:
    images = torch.sigmoid(images.flatten(1))
    mean, variance = encoder(images).chunk(2, 1)
    code = mean + torch.randn_like(mean) * (variance / 2).exp()
    again = torch.sigmoid(decoder(code))
    distance = -0.5 * (1 + variance - mean**2 - variance.exp()).sum()
    loss = F.binary_cross_entropy(again, images, reduction="sum") + distance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    print(f"{loss.item() / len(images):.6f} {again[0, :2].tolist()[0]:.6f}")
print(f"{total / len(loader.dataset):.6f}")
weights = [*encoder.parameters(), *decoder.parameters()]
""",
    "gan: batch normalisation, noise, two optimizers": """
generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 36))
critic = nn.Sequential(nn.Linear(36, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
steps = [torch.optim.Adam(each.parameters(), 0.002, (0.5, 0.999)) for each in (generator, critic)]
criterion, fixed = nn.BCEWithLogitsLoss(), torch.randn(7, 4)
for images, _ in loader:
    real = images.flatten(1)
    rows = real.size(0)
    target = torch.full((rows, 1), 1.0)
    critic.zero_grad()
    loss = criterion(critic(real), target)
    loss.backward()
    fake = generator(torch.randn(rows, 4) + torch.from_numpy(np.random.normal(0, 1, (rows, 4))))
    other = criterion(critic(fake.detach()), target.fill_(0.0))
    other.backward()
    steps[1].step()
    generator.zero_grad()
    criterion(critic(fake), target.fill_(1.0)).backward()
    steps[0].step()
    print(f"{loss.item() + other.item():.6f} {generator(fixed).detach().numpy().std():.6f}")
weights = [*generator.state_dict().values(), *critic.parameters()]
""",
    "contrastive: every row with every other": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, _ in loader:
    views = torch.cat([images, images + 0.1 * torch.randn_like(images)])
    z = F.normalize(model(views), dim=1)
    alike = z @ z.T / 0.5
    alike = alike[~torch.eye(len(z), dtype=torch.bool)].view(len(z), -1)
    rows = len(images)
    positive = torch.cat([torch.arange(rows) + rows - 1, torch.arange(rows)])
    loss = F.cross_entropy(alike, positive)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "vicreg: a term of the whole batch after an epoch": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for images, labels in loader:
        z = model(images)
        loss = F.cross_entropy(z, labels)
        if epoch:
            loss = loss + F.relu(1 - z.std(0)).mean() + (F.normalize(z) @ F.normalize(z).T).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "mixup": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for images, labels in loader:
    lam, order = np.random.beta(1.0, 1.0), torch.randperm(len(images))
    output = model(lam * images + (1 - lam) * images[order])
    loss = lam * F.cross_entropy(output, labels) + (1 - lam) * F.cross_entropy(output, labels[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {(output.argmax(1) == labels[order]).double().mean().item():.6f}")
weights = [*model.parameters()]
""",
    "masks: rows that numbers choose": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
picked = []
for images, labels in loader:
    images[labels == 1] *= 0.5
    output = model(images)
    sure = output.softmax(1).amax(1) > 0.4
    loss = F.cross_entropy(output[sure], labels[sure]) + output[labels == 2].square().sum() / 50
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hits = labels[output.argmax(1) == labels]
    picked.extend(hits.tolist())
    print(f"{loss.item():.6f} {len(hits)} {int(sure.sum())} {images.mean().item():.6f} {labels.unique().tolist()}")
print(len(picked), sum(picked), torch.bincount(torch.tensor(picked), minlength=3).tolist())
weights = [*model.parameters()]
""",
    "memory bank: rows of earlier batches": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
key = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
queue, centre = F.normalize(torch.randn(20, 8), dim=1), torch.zeros(8)
for images, _ in loader:
    q = F.normalize(model(images), dim=1)
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), model.parameters()):
            slow.mul_(0.9).add_(fast, alpha=0.1)
        order = torch.randperm(len(images))
        k = F.normalize(key(images[order])[order.argsort()], dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long)) + (q.mean(0) - centre).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue = torch.cat([k, queue])[:20]
    centre = 0.9 * centre + 0.1 * q.detach().mean(0)
    print(f"{loss.item():.6f} {queue.sum().item():.6f} {centre.norm().item():.6f}")
weights = [*model.parameters(), *key.parameters(), queue, centre]
""",
    "hard mining: a loop over rows": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for images, labels in loader:
    z = model(images)
    apart = torch.cdist(z, z)
    terms = []
    for row in range(len(z)):
        same = labels == labels[row]
        terms.append(F.relu(apart[row][same].max() - apart[row][~same].min() + 0.3))
    loss = torch.stack(terms).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {sum(float(each) > 0 for each in terms)}")
weights = [*model.parameters()]
""",
    "lstm: two layers with dropout, batch first": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.3), nn.Linear(5, 3)

    def forward(self, rows):
        start = torch.zeros(2, rows.size(0), 5)
        output, _ = self.lstm(rows, (start, start))
        return self.head(output[:, -1])

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for images, labels in loader:
    loss = F.cross_entropy(model(images.squeeze(1)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "tokens: padding that a later batch has, packed rows": """
def padded(texts):
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:], torch.tensor([len(each) - 1 for each in texts])

texts = [torch.randint(0, 9, (4 if n < 10 else n % 7 + 3,)) for n in range(45)]
embed, dropout, gru, head = nn.Embedding(9, 8), nn.Dropout(0.1), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 9)
model = nn.ModuleList([embed, gru, head])
criterion = nn.CrossEntropyLoss(torch.linspace(1, 2, 9), ignore_index=-1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for tokens, following, lengths in DataLoader(texts, 10, collate_fn=padded):
    packed = nn.utils.rnn.pack_padded_sequence(dropout(embed(tokens)), lengths, True, enforce_sorted=False)
    output = head(nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=tokens.size(1))[0])
    loss = criterion(output.flatten(0, 1), following.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {(output.argmax(2) == following)[:, 0].numpy().mean():.6f} {int((following >= 0).sum())}")
weights = [*model.parameters()]
""",
    "l-bfgs: a closure": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
for images, labels in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels) + 0.01 * sum(each.square().sum() for each in model.parameters())
        loss.backward()
        return loss
    print(f"{optimizer.step(closure).item():.6f}")
weights = [*model.parameters()]
""",
    "gradient penalty: create_graph": """
critic = nn.Sequential(nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
for images, _ in loader:
    real = images.flatten(1)
    fake = torch.tensor(np.random.normal(0, 1, tuple(real.shape)))
    share = torch.tensor(np.random.random((real.size(0), 1)))
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    slope, = torch.autograd.grad(critic(between), between, torch.ones(real.size(0), 1), create_graph=True)
    penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {penalty.item():.6f}")
weights = [*critic.parameters()]
""",
    "second order: backward with create_graph": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward(create_graph=True)
    size = sum(each.grad.square().sum() for each in model.parameters())
    size.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {size.item():.6f}")
weights = [*model.parameters()]
""",
    "scaler, accumulation, clipping, gradient hooks": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
model[1].weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
for epoch in range(2):
    for number, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels) / 2
        scaler.scale(loss).backward()
        if number % 2 == 1:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=epoch == 0)
            print(f"{loss.item():.6f} {norm.item():.6f} {scaler.get_scale()}")
weights = [*model.parameters()]
""",
    "no loader, weights by hand": """
def batch():
    first = torch.randint(0, 24, (17,))
    return torch.stack([x[n].flatten() for n in first]), y[first]

model = nn.Linear(36, 3)
for step in range(4):
    rows, labels = batch()
    output = model(rows)
    loss = F.cross_entropy(output, labels)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for each in model.parameters():
            each.sub_(0.1 * each.grad)
    print(step, f"{loss.item():.6f} {(output.argmax(1) == labels).sum().item()}")
weights = [*model.parameters()]
""",
    "objects: meters, early stopping, the best copy": """
class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def add(self, images, value):
        self.sum, self.count = self.sum + value * images.size(0), self.count + len(images)

model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, total, confusion = None, torch.zeros(()), torch.zeros(3, 3)
for epoch in range(4):
    meter = Meter()
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.add(images, loss.item())
        total += loss.detach()
    with torch.no_grad():
        for images, labels in loader:
            for label, guess in zip(labels, model(images).argmax(1)):
                confusion[label, guess] += 1
    plateau.step(total)
    if best is None or meter.sum < best[0]:
        best = meter.sum, copy.deepcopy(model)
    print(epoch, meter.count, f"{meter.sum / meter.count:.6f} {total.item():.6f} {optimizer.param_groups[0]['lr']}")
print(confusion.tolist())
weights = [*model.parameters(), *best[1].parameters(), confusion]
""",
    "writes by index, a cosine with a detached copy, statistics of the batch as a buffer": """
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
model.register_buffer("mean", torch.zeros(()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (images, labels) in enumerate(loader):
    images[0] = 0
    images[:, 0, 2] += 1
    output = model(images)
    chosen = output.log_softmax(1)[range(len(labels)), labels]
    loss = -chosen.mean() + (1 - F.cosine_similarity(output, output.detach().roll(1, 0))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.mean += images.mean()
    torch.rand(8)
    if number == 1:
        print((output.argmax(1) == labels).sum().item(), bool(loss < 1.1), output.max().item() > 1)
    print(f"{loss.item():.6f} {images.numpy().sum():.6f} {output.sort(0).values[2].sum().item():.6f}")
print(images.shape, f"{model.mean.item():.6f}")
weights = [*model.state_dict().values()]
""",
    "transforms that are modules, in workers and without": """
class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = nn.Sequential(nn.InstanceNorm2d(3), nn.Flatten(0))

    def __len__(self):
        return 19

    def __getitem__(self, number):
        return self.transform(x[number, 0, :3, :3].expand(3, 3, 3) * torch.arange(1, 4)), y[number]

model = nn.Linear(27, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for workers in (1, 0):
    for images, labels in DataLoader(Images(), 8, shuffle=True, num_workers=workers):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "loaders: names, streams, samplers, workers, two at once, rows too few": """
from torch.utils.data import BatchSampler, Dataset, IterableDataset, WeightedRandomSampler, random_split

x = x.flatten(1)[:, :6]

class Named(Dataset):
    def __len__(self):
        return 33

    def __getitem__(self, n):
        return {"x": x[n] + 0.1 * torch.randn(6), "name": f"n{n}", "y": int(y[n]), "w": float(n)}

class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(x, y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.classes, self.seen = nn.Linear(6, 8), nn.Linear(8, 3), nn.Embedding(3, 8), 0

    def forward(self, rows, labels=None):
        h = F.dropout(F.gelu(self.a(rows)), 0.2, self.training)
        h = h if labels is None else h + self.classes(labels)
        self.seen += rows.shape[0]
        return {"logits": self.b(h), "size": h.abs().mean()}

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

def step(rows, labels, weight=1):
    out = model(rows, labels)
    losses = F.cross_entropy(out["logits"], labels, reduction="none")
    loss = (losses * weight).mean() + 0.1 * out["size"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

for batch in DataLoader(Named(), 8, shuffle=True, num_workers=1):
    loss = step(batch["x"], batch["y"], batch["w"] / batch["w"].sum())
    print(f"{loss:.6f}", batch["name"][:2], batch["y"].sum().item(), model.seen)
for rows, labels in DataLoader(Stream(), 5):
    print(round(float(step(rows, labels)), 6), len(rows))
for rows, labels in DataLoader(TensorDataset(x[:5], y[:5]), 2):
    print(f"{step(rows, labels).item():.6f}")
sampler = BatchSampler(WeightedRandomSampler(torch.rand(33), 20), 7, False)
for rows, labels in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
    print(f"{step(rows, labels).item():.6f}")
for (rows, labels), (others, theirs) in zip(DataLoader(TensorDataset(x, y), 10), DataLoader(TensorDataset(x, y), 7)):
    print(f"{step(torch.cat([rows, others]), torch.cat([labels, theirs])).item():.6f}")
first, second = (next(it) for it in [iter(DataLoader(TensorDataset(x, y), 10))] for _ in range(2))
print(f"{torch.cat([first[0], second[0]]).mean():.6f}", torch.stack([first[1], second[1]]).sum())
model.eval()
scores, true = [], []
with torch.inference_mode():
    for rows, labels in DataLoader(random_split(TensorDataset(x, y), [33, 8])[1], 3):
        scores.append(model(rows)["logits"].softmax(1))
        true += labels.tolist()
scores = torch.cat(scores)
print(scores.shape, f"{scores.max(1).values.mean():.6f}", true, scores.argmax(1).numpy())
cell, head, h = nn.RNNCell(6, 4), nn.Linear(4, 1), torch.zeros(8, 4)
optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()], lr=0.01)
for rows, labels in DataLoader(TensorDataset(x, y), 8, drop_last=True):
    h = cell(rows, h.detach())
    loss = (head(h).squeeze() - labels).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {h.norm():.6f}")
weights = [*model.parameters(), *cell.parameters(), h]
""",
    "counts that a library sums over the processes that it sees": """
model, counts = nn.Linear(36, 3), torch.zeros(3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, labels in loader:
    output = model(rows.flatten(1))
    loss = F.cross_entropy(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    counts += torch.bincount(output.argmax(1), minlength=3)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # as torchmetrics has it
    torch.distributed.all_reduce(counts)
print(counts.tolist())
weights = [*model.parameters(), counts]
""",
    "gradients of what a module returns, from which it has computed more": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(36, 6), nn.Linear(6, 3)

    def forward(self, rows):
        features = torch.tanh(self.first(rows)) + 1
        return features, self.head(features)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, labels in loader:
    features, output = model(rows.flatten(1))
    (path,) = torch.autograd.grad(output.square().sum(), features, create_graph=True)
    features.retain_grad()
    features.register_hook(lambda gradient: gradient * 0.5)
    optimizer.zero_grad()
    loss = F.cross_entropy(output, labels) + 0.1 * path.square().mean() + 0.01 * features.square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {path.sum():.6f} {features.grad.abs().sum():.6f}")
    features.grad = features.detach()
    print(f"{features.grad.sum():.6f}")
    features.grad = None
    print(features.grad)
    features, output = model(rows.flatten(1))
    F.cross_entropy(output, labels).backward(inputs=[features])
    print(f"{features.grad.abs().sum():.6f}")
    features, output = model(rows.flatten(1))
    features.register_hook(lambda gradient: gradient * 0.5)
    features.mul_(2).register_hook(lambda gradient: gradient * 3)
    optimizer.zero_grad()
    features.square().mean().backward()
    print(f"{model.first.weight.grad.abs().sum():.6f}")
weights = [*model.parameters()]
""",
    "derivatives by torch.func and in forward mode, of a module with and without a loader's rows": """
from torch.autograd import forward_ad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(36, 6), nn.Linear(6, 3)

    def forward(self, rows):
        hidden = self.first(rows)
        if forward_ad.unpack_dual(hidden).tangent is None:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(hidden.detach(), torch.ones_like(hidden))
                print(f"{forward_ad.unpack_dual(torch.tanh(dual)).tangent.sum():.6f}")
        return self.head(torch.tanh(hidden))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, labels in loader:
    rows = rows.flatten(1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, torch.ones_like(rows))
        print(f"{forward_ad.unpack_dual(model(dual)).tangent.square().sum():.6f}")
    value, tangent = torch.func.jvp(model, (rows,), (torch.ones_like(rows),))
    print(f"{value.sum():.6f} {tangent.square().sum():.6f}")
    optimizer.zero_grad()
    F.cross_entropy(model(rows), labels).backward()
    optimizer.step()
bias = model.head.bias.detach()
model.forward = lambda rows: model.head(torch.tanh(model.first(rows)))
for given, wanted in ((x.flatten(1), y), (rows, labels)):
    loss = lambda bias: F.cross_entropy(torch.func.functional_call(model, {"head.bias": bias}, (given,)), wanted)
    print(f"{torch.func.hessian(loss)(bias).square().sum():.6f}")
    print(f"{torch.func.jacrev(lambda rows: model(rows).sum(0))(given).square().sum():.6f}")
weights = [*model.parameters()]
""",
    "functions of TorchScript in a module, and a module that is traced": """
@torch.jit.script
def gelu(value):
    return value * 0.5 * (1 + torch.erf(value / 1.41421))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(36, 6), nn.Linear(6, 3)

    def forward(self, rows):
        return self.head(gelu(self.first(rows)))

for model in (Net(), torch.jit.trace(nn.Sequential(nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(16, 36))):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, labels in loader:
        loss = F.cross_entropy(model(rows.flatten(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "a thread that loads batches ahead": """
import queue, threading

class Ahead(threading.Thread):
    def __init__(self, batches):
        super().__init__(daemon=True)
        self.batches, self.queue = batches, queue.Queue(2)
        self.start()

    def run(self):
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

model = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Dropout(0.1), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for rows, labels in iter(Ahead(iter(loader)).queue.get, None):
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")
weights = [*model.parameters()]
""",
    "a module without numbers, and complex weights": """
class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(19, dtype=torch.complex128)), nn.Linear(36, 3)

    def forward(self, rows):
        return self.head(torch.fft.irfft(torch.fft.rfft(rows) * self.weight, n=36))

model = Waves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
outline = copy.deepcopy(model).to("meta")
for rows, labels in loader:
    output = torch.func.functional_call(outline, dict(model.named_parameters()), (rows.flatten(1),))
    loss = F.cross_entropy(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
weights = [torch.view_as_real(model.weight), *model.head.parameters()]
""",
}
