"""The trainer with one slow rank: `slow_rank_worker.py RANK SECONDS CONFIG [section.key=value ...]`.

Every forward pass of a decoder on that rank takes so much longer.
"""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    from megatron.core.transformer.transformer_block import TransformerBlock
    from torch.nn.modules.module import register_module_forward_pre_hook

    from egmla_megatron.train.main import main

    rank, seconds, *arguments = sys.argv[1:]

    def slow_down(module: object, _: object) -> None:
        if isinstance(module, TransformerBlock):
            time.sleep(float(seconds))

    if os.environ["RANK"] == rank:
        register_module_forward_pre_hook(slow_down)
    sys.exit(main(arguments))
