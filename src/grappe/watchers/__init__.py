"""What happens behind each step: curves, console, evaluation, checkpoints, stopping."""
