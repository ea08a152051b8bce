"""Whether a plan learns what one plain process learns, and if not, why: what `grappe verify` is made of."""
