"""Silences what libraries say at every start and nobody here can act on."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Drop what megatron-core and torch say at every start about options this project does not use."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\..*")
    warnings.filterwarnings(
        "ignore", category=UserWarning, message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for name in ("megatron", "torch.distributed.elastic", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
