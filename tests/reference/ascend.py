"""Ascend's accelerate_train_mode: which calls run in low precision."""

import decimal
import fractions


def parse(text):
  """Reads `type|mode|ratio`: returns the dtype's name, the mode, the ratio.

  Two fields or three; a ratio that is absent or empty is the mode's default.
  The ratio is the decimal number that is written, as a fraction.

  Raises:
    ValueError: if it is not of this grammar.
  """
  fields = text.split("|")
  if len(fields) not in (2, 3):
    raise ValueError("fields")
  kind, mode, written = fields if len(fields) == 3 else [*fields, ""]
  dtypes = {"fast": "float16", "fast1": "bfloat16"}
  if kind not in dtypes:
    raise ValueError("type")
  # The default, the least and the greatest.
  ratios = {"step": ("0.9", "0.2", "0.9"), "loss": ("1.05", "1.01", "1.5")}
  if mode not in ratios:
    raise ValueError("mode")
  default, least, greatest = map(decimal.Decimal, ratios[mode])
  # No sign, exponent, space or underscore, which Python would read.
  is_number = set(written) <= set("0123456789.") and written.count(".") < 2
  if not is_number or written == ".":
    raise ValueError("ratio")
  ratio = decimal.Decimal(written or default)
  if not least <= ratio <= greatest:
    raise ValueError("ratio")
  return dtypes[kind], mode, fractions.Fraction(ratio)
