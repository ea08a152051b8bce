"""The gallery's tasks, examples/gallery: under every plan, beside their plain loops, and in a table."""
