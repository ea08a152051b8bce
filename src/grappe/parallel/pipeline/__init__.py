"""A model cut into stages that work one after the other, each on its own process."""
