"""Optimizers that mean the same under any plan: LARS, LARC, LAMB, Muon; parameter groups, averages, larger batches."""

from grappe.optimizers.common import by_name, scale_factor, warmed_up
from grappe.optimizers.layerwise import LAMB, LARC, LARS
from grappe.optimizers.muon import Muon

__all__ = ["LAMB", "LARC", "LARS", "Muon", "by_name", "scale_factor", "warmed_up"]
