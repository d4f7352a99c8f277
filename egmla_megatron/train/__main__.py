"""Entry point; imports almost nothing, because checkpoint writers spawn processes that import it again."""

import sys

from egmla_megatron.train.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
