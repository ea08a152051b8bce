"""Parts of the tasks on images."""
