"""Trains on digits in one process, as PyTorch's tutorials do: `grappe launch` runs it, as it is, on several."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = torch.utils.data.random_split(data, [1500, 297])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(3):
    model.train()
    for inputs, targets in DataLoader(train, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in DataLoader(test, 128))
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {right / len(test):.4f}")
torch.save(model.state_dict(), "digits.pt")
