"""Measures replicated against dimension-wise sharded gating tables; `tools/bench_sharding.py` is its command line."""
