"""measure --why, lr-find, verify --record and --with: what explains a training, for who improves it."""
