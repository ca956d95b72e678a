"""`python -m optax_lossscale`: the command line."""

import sys

from optax_lossscale import cli

if __name__ == "__main__":
  sys.exit(cli.main())
