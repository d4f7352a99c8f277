"""How near every kernel of a training step is to what memory and tensor cores allow; see `tools/bench_kernels.py`."""
