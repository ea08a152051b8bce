"""Tests of the guides and of the site."""
