"""Packages: finds what a job needs beside grappe, and whether the cluster's wheelhouse has it, before the queue."""
