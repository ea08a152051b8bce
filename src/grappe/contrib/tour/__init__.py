"""grappe tour: six steps in the terminal, for who has never used grappe."""
