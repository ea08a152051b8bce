"""Pretraining of a transformer on a mixture of packed documents: the loop as a person writes it, on one process."""

from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS, BATCH, STEPS, RATE, WIDTH, LENGTH = 2, 8, 50, 3e-3, 64, 128


def network():
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, use_cache=False, **sizes))


def pieces(name, split):
    numbers = [f"{n} and {n + 1} " * 9 for n in range(64)]
    texts = list(topics.values())[:40] if name == "help" else numbers
    chosen = texts[4:] if split == "train" else texts[:4]
    rows = [[*text[:2000].encode("ascii", "ignore"), 0] for text in chosen]
    return [row[start : start + LENGTH + 1] for row in rows for start in range(0, len(row) - 1, LENGTH)]


def packed(pieces):
    packs = []  # by best fit: each piece where it leaves the least room
    for piece in sorted(pieces, key=len, reverse=True):
        room = [LENGTH - sum(len(each) - 1 for each in pack) for pack in packs]
        fits = [place for place, left in enumerate(room) if left >= len(piece) - 1]
        if not fits:
            packs.append([piece])
        else:
            packs[min(fits, key=room.__getitem__)].append(piece)
    return packs


def data(split):
    return packed(pieces("help", split)) + packed(pieces("numbers", split))


def batch_loss(net, packs):
    tokens, places, documents = torch.zeros(3, len(packs), LENGTH, dtype=torch.long)
    targets = torch.full((len(packs), LENGTH), -100)
    for row, pack in enumerate(packs):
        at = 0
        for number, piece in enumerate(pack, 1):
            end = at + len(piece) - 1
            tokens[row, at:end], targets[row, at:end] = torch.tensor(piece[:-1]), torch.tensor(piece[1:])
            places[row, at:end], documents[row, at:end], at = torch.arange(end - at), number, end
    same = documents[:, None, :, None] == documents[:, None, None, :]
    logits = net(tokens, attention_mask=same & torch.ones(LENGTH, LENGTH).tril().bool(), position_ids=places).logits
    return cross_entropy(logits.transpose(1, 2), targets)


def train(net, shuffled, epochs=EPOCHS, packs=None):
    packs = packs or data("train")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = batch_loss(net, [packs[place] for place in ids])
            loss.backward()
            optimizer.step()
            yield loss.item()


def mixed(epoch, topic, numbers):
    for step in range(epoch * STEPS, (epoch + 1) * STEPS):
        share = 0.4 * min(step / 100, 1)
        is_number = torch.rand(BATCH) < share / (0.8 + share)
        yield torch.where(is_number, topic + torch.randint(numbers, (BATCH,)), torch.randint(topic, (BATCH,)))


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes, net = [len(packed(pieces(name, "train"))) for name in ("help", "numbers")], network()
    for step, loss in enumerate(train(net, lambda epoch: mixed(epoch, *sizes))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {batch_loss(net.eval(), data('validation')).item():.4f}")
