"""engine=lightning, and tasks made of a LightningModule."""
