"""grappe lr-find: a band of learning rates from short trainings whose learning rate rises."""
