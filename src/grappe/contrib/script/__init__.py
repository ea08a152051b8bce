"""grappe launch, verify --script and --against: people's own training scripts, as they are."""
