"""Parts of the tasks on text."""
