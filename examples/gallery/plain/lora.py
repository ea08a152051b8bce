"""LoRA with peft: the loop as a person writes it, on one process."""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS, BATCH, RATE, RANK = 2, 16, 1e-2, 4


def network():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    adapters = LoraConfig(r=RANK, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def data(split):
    seed = {"train": 0, "validation": 1, "test": 2}[split]
    half = torch.randint(0, 32, (256, 8), generator=torch.Generator().manual_seed(seed))
    tokens = torch.cat([half, half], 1)
    return tokens[:, :-1], tokens[:, 1:]


def train(net, shuffled, epochs=EPOCHS):
    inputs, targets = data("train")
    adapters = [one for one in net.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=RATE, weight_decay=0.0, eps=1e-5)
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
    for step, loss in enumerate(train(net, lambda _: torch.randperm(256).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
