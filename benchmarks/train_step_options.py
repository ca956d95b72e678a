"""The arguments of `python -m benchmarks train-step`."""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import pathlib

from benchmarks import gpt2
from benchmarks import nonfinite

PARTS = ("nonfinite", "traffic", "step")


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the arguments, or exits with what is wrong.

  Args:
    argv: the words after the command's name.
  """
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks train-step",
    description=(
      "Loss scaling on one device: whether it sees every NaN, the update phase "
      "against the bandwidth of the memory, and the train step of GPT-2 beside "
      "torch."
    ),
    allow_abbrev=False,
  )
  _add_what(parser)
  _add_how(parser)
  arguments = parser.parse_args(argv)
  size = gpt2.SIZES[arguments.model]
  if arguments.length is None:
    arguments.length = size.context
  if arguments.length > size.context:
    parser.error(f"--length: {arguments.model} has {size.context} positions")
  return arguments


def _add_what(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--parts",
    nargs="+",
    choices=PARTS,
    default=list(PARTS),
    help="which parts to run (default: all)",
  )
  parser.add_argument(
    "--model",
    choices=tuple(gpt2.SIZES),
    default="small",
    help="GPT-2 small, or one to try the command with (default: small)",
  )
  parser.add_argument(
    "--batch",
    type=_integer(1),
    default=8,
    help="sequences in a batch (default: 8)",
  )
  parser.add_argument(
    "--length",
    type=_integer(1),
    help="tokens in a sequence (default: the model's context, 1024 for small)",
  )
  parser.add_argument(
    "--attention",
    choices=("auto", "cudnn", "xla", "plain"),
    default="auto",
    help="in JAX (default: auto, which on a GPU is cudnn in 16 bits, if it "
    "compiles, else xla, and plain elsewhere)",
  )
  parser.add_argument(
    "--float32-matmul",
    choices=("default", "tf32", "float32"),
    default="default",
    help="precision of float32 matrix products in JAX and in torch (default: "
    "each one's own default; what it is, is printed)",
  )
  parser.add_argument(
    "--without-torch",
    dest="torch",
    action="store_false",
    help="leave torch out, also where it is installed",
  )
  parser.add_argument(
    "--torch-compile",
    action="store_true",
    help="compile torch's model with torch.compile",
  )


def _add_how(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--rounds",
    type=_integer(1),
    default=20,
    help="turns of each contender (default: 20)",
  )
  parser.add_argument(
    "--steps",
    type=_integer(1),
    default=10,
    help="train steps in each turn (default: 10)",
  )
  parser.add_argument(
    "--calls",
    type=_integer(1),
    default=20,
    help="update phases in each turn (default: 20)",
  )
  parser.add_argument(
    "--copy-size",
    type=_integer(1),
    default=1024,
    metavar="MIB",
    help="size in MiB of the array whose copy gives the bandwidth (default: "
    "1024)",
  )
  parser.add_argument(
    "--largest-leaf",
    type=_integer(1),
    default=max(nonfinite.SIZES),
    metavar="ELEMENTS",
    help="elements of the largest leaf in which a NaN is placed (default: "
    f"{max(nonfinite.SIZES)})",
  )
  parser.add_argument(
    "--random-places",
    type=_integer(0),
    default=2,
    metavar="N",
    help="places for a NaN in each leaf, beside the first and the last "
    "(default: 2)",
  )
  parser.add_argument(
    "--seed",
    type=_integer(0),
    default=0,
    help="of weights, tokens, gradients, places and orders (default: 0)",
  )
  parser.add_argument(
    "--output",
    type=pathlib.Path,
    metavar="FILE",
    help="write the figures there, as JSON (default: print them only)",
  )


def _integer(least: int) -> Callable[[str], int]:
  """Returns an argparse type that takes an integer from `least` on."""

  def integer(text: str) -> int:
    value = int(text)
    if value < least:
      raise argparse.ArgumentTypeError(f"must be {least} or more, got {text!r}")
    return value

  return integer
