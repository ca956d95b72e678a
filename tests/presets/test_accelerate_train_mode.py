"""Ascend's accelerate_train_mode: its text and its other arguments."""

import dataclasses
import decimal
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.presets import accelerate_train_mode
from tests.reference import ascend

# The arguments that a mode needs beside the text.
NEEDS = {"step": {"total_steps": 20}, "loss": {"target_loss": 2.0}}

# The grammar.

TYPES, MODES = ("fast", "fast1"), ("step", "loss")
# The bounds and the defaults: ratios around these are accepted or refused.
BORDERS = ("0", "0.2", "0.9", "1", "1.01", "1.05", "1.5")


def beside(border, places, sign):
  """Returns the border, or a number as near to it as its places allow."""
  step = sign * decimal.Decimal(10) ** -places
  return format(decimal.Decimal(border) + step, "f")


# Some have more places than a float.
numbers = st.builds(
  beside, st.sampled_from(BORDERS), st.integers(1, 25), st.integers(-1, 1)
)
# Python reads some of these as numbers, and the grammar does not.
ratios = st.one_of(
  numbers,
  numbers.map(lambda x: x.lstrip("0")),
  st.builds("{}{}".format, st.sampled_from(" +-0"), numbers),
  st.builds("{}{}".format, numbers, st.sampled_from(["0", " ", "e0", "_0"])),
  st.text("0123456789.eE+-_ /%xnaif|\u0663", max_size=5),
)
texts = st.one_of(
  st.tuples(st.sampled_from(TYPES), st.sampled_from(MODES)),
  st.tuples(st.sampled_from(TYPES), st.sampled_from(MODES), ratios),
  st.lists(
    st.sampled_from([*TYPES, *MODES, "FAST", " fast", "step ", "0.9", ""]),
    max_size=4,
  ),
).map("|".join)


@given(texts)
@settings(max_examples=200)
def test_a_text_is_read_or_refused_like_the_model(text):
  try:
    dtype, mode, ratio = ascend.parse(text)
  except ValueError:
    for arguments in NEEDS.values():
      with pytest.raises(ValueError, match="`text` must be") as raised:
        accelerate_train_mode(text, **arguments)
      assert str(raised.value).endswith(f"got {text!r}.")
    return
  schedule = accelerate_train_mode(text, **NEEDS[mode])
  assert schedule.dtype == jnp.dtype(dtype)
  until = {"step": (int(20 * ratio), None), "loss": (None, 2 * ratio)}
  assert (schedule.until_step, schedule.until_loss) == until[mode]


def test_the_error_says_the_grammar_and_the_bounds():
  with pytest.raises(ValueError) as raised:
    accelerate_train_mode("fast|step|abc", total_steps=20)
  for words in ("type|mode", "'fast' (float16)", "number from 0.2 to 0.9 in "):
    assert words in str(raised.value)
  with pytest.raises(TypeError, match="`text` must be an .*got None of type"):
    accelerate_train_mode(None, total_steps=20)


# The other arguments.


@pytest.mark.parametrize(("mode", "other"), [MODES, MODES[::-1]])
def test_a_mode_takes_its_own_argument_and_not_that_of_the_other(mode, other):
  (own,), (others,) = NEEDS[mode], NEEDS[other]
  for missing in ({}, {own: None}):
    with pytest.raises(ValueError, match=f"`{own}` must be given .*'{mode}'"):
      accelerate_train_mode(f"fast|{mode}", **missing)
  for value in (2, 0):
    with pytest.raises(
      ValueError, match=f"`{others}` must be left out .*'{mode}"
    ):
      accelerate_train_mode(f"fast|{mode}", **NEEDS[mode], **{others: value})


@pytest.mark.parametrize(
  ("name", "error", "values"),
  [
    ("total_steps", TypeError, (20.0, True)),
    ("total_steps", ValueError, (-1,)),
    ("steps_per_call", TypeError, (20.0, None)),
    ("steps_per_call", ValueError, (0, -1)),
    ("target_loss", TypeError, ("2.0", np.ones(1))),
    ("target_loss", ValueError, (0, -2.0, math.nan, math.inf, 1e39)),
  ],
)
def test_a_number_that_an_argument_cannot_be_is_refused(name, error, values):
  mode = "loss" if name == "target_loss" else "step"
  for value in values:
    with pytest.raises(error, match=f"`{name}` .*got"):
      accelerate_train_mode(f"fast|{mode}", **NEEDS[mode] | {name: value})


@pytest.mark.parametrize("kind", [int, np.uint8, jnp.int32])
def test_integers_of_every_kind_count_exactly(kind):
  schedule = accelerate_train_mode(
    "fast|step|0.9", total_steps=kind(120), steps_per_call=kind(20)
  )
  # In uint8, 120 * 0.9 and 120 - 20 would differ or have another type.
  assert schedule.until_step == 100
  assert type(schedule.until_step) is int


@pytest.mark.parametrize(
  ("total", "per_call", "until"), [(20, 1, 18), (20, 4, 16), (3, 4, 0)]
)
def test_the_last_call_is_in_full_precision(total, per_call, until):
  schedule = accelerate_train_mode(
    "fast|step", total_steps=total, steps_per_call=per_call
  )
  assert schedule.until_step == until


# The precision modes.


@pytest.mark.parametrize(
  ("beside", "keeps"),
  [
    ({"precision_mode": "allow_fp32_to_fp16"}, False),
    ({"precision_mode": "must_keep_origin_dtype"}, True),
    ({"precision_mode_v2": "origin"}, True),
    ({"precision_mode": "", "precision_mode_v2": "origin"}, True),
  ],
)
def test_a_precision_mode_may_allow_low_products_and_changes_nothing_else(
  beside, keeps
):
  for mode in MODES:
    plain = accelerate_train_mode(f"fast|{mode}", **NEEDS[mode])
    schedule = accelerate_train_mode(f"fast|{mode}", **NEEDS[mode], **beside)
    assert schedule == dataclasses.replace(plain, allow_low_products=keeps)


@pytest.mark.parametrize(
  ("name", "values"),
  [
    ("precision_mode", ("force_fp16", "origin", "ALLOW_FP32_TO_FP16", " ", 0)),
    ("precision_mode_v2", ("fp16", "allow_fp32_to_fp16", ["origin"], False)),
  ],
)
def test_another_precision_mode_is_refused(name, values):
  for value in values:
    with pytest.raises(ValueError, match=rf"`{name}` .*origin") as raised:
      accelerate_train_mode("fast|step", total_steps=20, **{name: value})
    assert repr(value) in str(raised.value)
