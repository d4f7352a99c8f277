"""`python -m egmla_megatron.launching`: what the launch scripts ask."""

from egmla_megatron.cli import run_main
from egmla_megatron.launching.commands import main

if __name__ == "__main__":
    run_main(main)
