"""What the machine does at best: a large copy, and large matrix products in the model's type."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from egmla_megatron.bench.roofline.cost import Machine

__all__ = ["measure_machine"]

COPY_BYTES = {"cuda": 2**32, "cpu": 2**24}  # so many that a cache cannot hold back a share that counts
# rows, inputs, outputs
PRODUCTS = {"cuda": ((8192, 8192, 8192), (4096, 8192, 8192)), "cpu": ((1024, 1024, 1024),)}
WARM_UP, TIMED = 3, 10


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Medians of single runs; of the products the fastest shape."""
    size = COPY_BYTES[device.type]
    copy_s = _median_s(_copy(size, device), device)
    rates = [_product_rate(*shape, device, dtype) for shape in PRODUCTS[device.type]]
    return Machine(2 * size / copy_s, max(rates))


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _product_rate(rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> float:
    x, w = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs)))
    out = torch.empty(rows, outputs, device=device, dtype=dtype)
    seconds = _median_s(lambda: torch.matmul(x, w.t(), out=out), device)
    return 2 * rows * inputs * outputs / seconds


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    times = _device_seconds(run) if device.type == "cuda" else [_host_seconds(run) for _ in range(WARM_UP + TIMED)]
    return statistics.median(times[WARM_UP:])


def _device_seconds(run: Callable[[], object]) -> list[float]:
    """Runs one behind the other, each between two events: only the first ones wait for the host."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + TIMED)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _host_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
