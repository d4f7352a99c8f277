"""Redirects of `torch.cuda` that let megatron-core train on a machine without a GPU.

megatron-core calls CUDA unconditionally in a few places. Each redirect below has a name, the reason it
is needed, and a test that fails without it (`tests/unit/test_cpu.py`). This is the only module that
rebinds anything, it touches torch alone, and it does nothing where CUDA exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["REDIRECTS", "install"]

CPU = torch.device("cpu")
_installed: set[str] = set()
_factory_mode: TorchFunctionMode | None = None  # keeps the entered mode alive


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _FactoriesOnCpu(TorchFunctionMode):
    """Sends `device="cuda"` of any torch function to the CPU and drops `pin_memory`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


class _Stream:
    """A stream or event of a device that has none: every operation is already complete."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return self

    def _done(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = wait_stream = wait_event = synchronize = _done


class _Generators:
    """`torch.cuda.default_generators[i]` is the CPU generator for every i."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator


def _redirect_rng() -> None:
    """megatron-core imported `_lazy_call` by name before this runs, and it only queues what it is given until CUDA
    is initialised: so the answer to that question is what has to change."""
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.default_generators = _Generators()
    for module in (cuda, cuda.random):  # torch.cuda offers the functions of torch.cuda.random under a second name
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


def _redirect_current_device() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


def _redirect_streams() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *_, **__: stream


def _redirect_tensor_type() -> None:
    original = torch.Tensor.type

    def type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if isinstance(name, str) and not args and not kwargs and ".cuda." not in name:
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = type_as_cuda  # type: ignore[method-assign,assignment]


def _redirect_factories() -> None:
    global _factory_mode
    _factory_mode = _FactoriesOnCpu()
    _factory_mode.__enter__()


def _redirect_synchronize() -> None:
    torch.cuda.synchronize = lambda *_, **__: None


def _redirect_tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


# name -> (what megatron-core does that needs it, the redirect)
REDIRECTS: dict[str, tuple[str, Callable[[], None]]] = {
    "rng": ("tensor_parallel.random keeps CUDA generator states for dropout and initialisation", _redirect_rng),
    "current_device": (
        "buffers, losses and layers are allocated on torch.cuda.current_device()",
        _redirect_current_device,
    ),
    "streams": ("gradient buckets and schedules order their work with CUDA streams and events", _redirect_streams),
    "tensor_type": ("optimizers tell precisions apart by the strings 'torch.cuda.*Tensor'", _redirect_tensor_type),
    "factories": ('optimizers and gradient norms allocate with device="cuda"', _redirect_factories),
    "synchronize": ("pipeline communication and checkpoints call torch.cuda.synchronize()", _redirect_synchronize),
    "tensor_cuda": ("optimizer and checkpoint code moves tensors with Tensor.cuda()", _redirect_tensor_cuda),
}


def install(without: frozenset[str] = frozenset()) -> None:
    """Install all redirects once, before a model is built. Does nothing where CUDA exists.

    Args:
        without: names of `REDIRECTS` to leave out; only the tests use it.
    """
    if torch.cuda.is_available():
        return
    for name, (_, redirect) in REDIRECTS.items():
        if name not in without and name not in _installed:
            redirect()
            _installed.add(name)
