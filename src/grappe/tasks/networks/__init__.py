"""Networks that several tasks train."""
