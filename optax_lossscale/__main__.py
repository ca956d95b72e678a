"""Runs the command line as `python -m optax_lossscale`."""

import sys

from optax_lossscale import cli

if __name__ == "__main__":
  sys.exit(cli.main())
