"""Masked language model of transformers above a frozen backbone: the loop as a person writes it, on one process."""

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM

MASK, IGNORED, EPOCHS, BATCH, RATE, SHARE = 1, -100, 2, 16, 3e-3, 0.15


def network():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.tie_word_embeddings = False
    model = BertForMaskedLM(config)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    model.cls.predictions.bias.requires_grad_(False)  # the decoder has one of its own
    return model


def data(split):
    seed = {"train": 0, "validation": 1, "test": 2}[split]
    return torch.randint(2, 64, (256, 4), generator=torch.Generator().manual_seed(seed)).repeat(1, 4)


def masked(tokens, numbers):
    chosen = numbers < SHARE
    chosen[:, 0] = True  # each sample has something to learn
    return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, IGNORED)


def optimizer_of(net):
    heads = {True: [], False: []}
    for name, one in net.named_parameters():
        if one.requires_grad:
            heads[name.startswith("cls.")].append(one)
    groups = [{"params": heads[True], "lr": 3 * RATE}, {"params": heads[False]}]
    return torch.optim.AdamW(groups, lr=RATE, eps=1e-5)


def train(net, shuffled, epochs=EPOCHS, rand=torch.rand):
    tokens = data("train")
    optimizer = optimizer_of(net)
    warmup = max(1, epochs * (len(tokens) // BATCH) // 10)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            inputs, targets = masked(tokens[ids], rand(len(ids), tokens.shape[1]))
            optimizer.zero_grad()
            logits = net(input_ids=inputs).logits
            loss = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED)
            loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    inputs, targets = masked(data("validation"), torch.rand(256, 16))
    logits = net.eval()(input_ids=inputs).logits
    return cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(256).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
