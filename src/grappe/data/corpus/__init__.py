"""Reads folders of shards (Parquet, Arrow, JSON lines, tokens, tar) as map-style datasets; mixes, cuts and packs."""
