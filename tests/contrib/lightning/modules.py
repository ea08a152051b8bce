"""LightningModules as their owners write them: a plain one, and each kind of what is refused."""

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

TRAINING, HELD_OUT, BATCH = 37, 25, 10  # the last batch is short


class Net(lightning.LightningModule):
    """A mean loss, a metric object, a schedule by the epoch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        self.accuracy(output, y)
        self.log_dict({"val_loss": F.cross_entropy(output, y), "val_accuracy": self.accuracy})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Data(lightning.LightningDataModule):
    """62 points of three classes."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(TRAINING + HELD_OUT, 6, generator=generator)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        self.train = TensorDataset(x[:TRAINING], y[:TRAINING])
        self.held_out = TensorDataset(x[TRAINING:], y[TRAINING:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=BATCH, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=BATCH)


class BySteps(Net):
    """A schedule by the step, that asks its trainer how many there will be; validation_step returns its loss."""

    def validation_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Net):
    def on_train_epoch_end(self):
        self.net[0].weight.data.mul_(0.9)

    def configure_gradient_clipping(self, *rest, **options):
        pass


class Summed(Net):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Padded(Net):
    """A mean over the targets that are not ignored."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=2)


class Noisy(Net):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0] + torch.randn_like(batch[0])), batch[1])


class Counting(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class Ranked(Net):
    """Logs a value that is no mean over samples."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("largest", self(batch[0]).max())


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=0.1) for one in self.parameters()]


class Plateau(Net):
    """No score is so much better than the one before: each evaluation but the first divides the rate by ten."""

    monitor = "val_loss"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


class Unmonitored(Plateau):
    monitor = "train_loss"


class Attached(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Weighted(Data):
    def train_dataloader(self):
        sampler = WeightedRandomSampler([1.0] * TRAINING, TRAINING)
        return DataLoader(self.train, batch_size=BATCH, sampler=sampler, drop_last=True)


class Ordered(Data):
    prepared = 0

    def prepare_data(self):
        Ordered.prepared += 1

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=BATCH)


class Telling(Net):
    """Logs in training what is a mean over samples, what is none, and what only some batches have."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        self.accuracy(output, y)
        self.log("train_accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"largest": output.max(), "shape": output.sum(0)})
        if batch_idx == 0:
            self.log("first", 1.0)
        return F.cross_entropy(output, y)


class Unvalidated(lightning.LightningDataModule):
    """Training data alone."""

    def train_dataloader(self):
        data = Data()
        data.setup("fit")
        return data.train_dataloader()
