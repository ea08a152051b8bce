"""Defines the command line; each command calls one verb."""
