"""`python -m chaos`: run a scenario, list what there is, judge a record again."""

import sys

from chaos.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
