"""The native engine, on torch alone: a whole model, or one cut into pipeline stages."""

from grappe.engines.native.engine import Native

ENGINE = Native
