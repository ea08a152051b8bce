"""Causal language model of transformers on packed text: the loop as a person writes it, on one process."""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

END, WINDOW, EPOCHS, BATCH, RATE = 256, 32, 2, 16, 3e-3


def network():
    sizes = {"vocab_size": END + 1, "n_positions": WINDOW, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, use_cache=False, eos_token_id=END, bos_token_id=END)
    return GPT2LMHeadModel(config)


def packed(texts, window):
    tokens = [token for text in texts for token in (*text.encode(), END)]
    count = (len(tokens) - 1) // window
    starts = torch.arange(count)[:, None] * window
    return torch.tensor(tokens)[starts + torch.arange(window + 1)]


def data(split):
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    first = {"train": 0, "validation": 100, "test": 120}[split]
    texts = [" ".join(words[(start + i) % 7] for i in range(12)) for start in range(first, first + 100)]
    windows = packed(texts, WINDOW)
    return windows[:, :-1], windows[:, 1:]


def train(net, shuffled, epochs=EPOCHS):
    inputs, targets = data("train")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, eps=1e-5)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            logits = net(input_ids=inputs[ids]).logits
            loss = cross_entropy(logits.transpose(1, 2), targets[ids])
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    inputs, targets = data("validation")
    return cross_entropy(net.eval()(input_ids=inputs).logits.transpose(1, 2), targets).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
