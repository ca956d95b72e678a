"""Ascend's accelerate_train_mode: its text, and its arguments."""

import dataclasses
import decimal
import fractions
import inspect

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.presets import accelerate_train_mode
from tests import support
from tests.precision.schedules import INF
from tests.precision.schedules import mode_of
from tests.precision.schedules import NAN
from tests.precision.schedules import NEEDS
from tests.reference import ascend

# The grammar.

TYPES = ("fast", "fast1")
MODES = ("step", "loss")
# Ratios around these are taken or refused: the bounds and the defaults.
BORDERS = ("0", "0.2", "0.9", "1", "1.01", "1.05", "1.5")


def beside(border, places, sign):
  """Returns a number as near a border as its places allow, or the border."""
  step = sign * decimal.Decimal(10) ** -places
  return format(decimal.Decimal(border) + step, "f")


# More places than a float has.
numbers = st.builds(
  beside, st.sampled_from(BORDERS), st.integers(1, 25), st.integers(-1, 1)
)
# Some of these are numbers for Python but not for the grammar.
ratios = st.one_of(
  numbers,
  numbers.map(lambda x: x.lstrip("0")),
  st.builds("{}{}".format, st.sampled_from(" +-0"), numbers),
  st.builds(
    "{}{}".format, numbers, st.sampled_from(["0", " ", "e0", "_0", "|"])
  ),
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
@settings(max_examples=400)
def test_every_text_is_taken_or_refused_as_by_the_model(text):
  try:
    dtype, mode, ratio = ascend.parse(text)
  except ValueError:
    for arguments in NEEDS.values():
      with pytest.raises(ValueError, match="`text`") as raised:
        accelerate_train_mode(text, **arguments)
      assert repr(text) in str(raised.value)
    return
  schedule = accelerate_train_mode(text, **NEEDS[mode])
  assert schedule.dtype == jnp.dtype(dtype)
  assert mode_of(schedule) == mode
  # `NEEDS` has 20 steps, and 2.0 as the target.
  until = {"step": schedule.until_step, "loss": schedule.until_loss}
  assert until[mode] == {"step": int(20 * ratio), "loss": 2 * ratio}[mode]


# The arguments.


def refused(text, **arguments):
  """Returns the error's text, of arguments that must be refused."""
  with pytest.raises((TypeError, ValueError)) as raised:
    accelerate_train_mode(text, **arguments)
  return str(raised.value)


@pytest.mark.parametrize(
  "text, words",
  [
    # How many fields.
    ("fast", ("type|mode",)),
    ("fast|step|0.9|1", ("type|mode",)),
    # The type.
    ("fast2|step", ("'fast'", "'fast1'")),
    # The mode.
    ("fast|steps", ("'step'", "'loss'")),
    # The ratio.
    ("fast|step|abc", ("number",)),
    ("fast|step|0.19", ("0.2 to 0.9 in mode 'step'",)),
    ("fast|step|0.91", ("0.2 to 0.9 in mode 'step'",)),
    ("fast|step|nan", ("number",)),
    ("fast|loss|1", ("1.01 to 1.5 in mode 'loss'",)),
    ("fast|loss|1.51", ("1.01 to 1.5 in mode 'loss'",)),
  ],
  ids=support.name,
)
def test_an_error_of_the_grammar_says_the_rule_and_what_came(text, words):
  message = refused(text, **NEEDS["loss" if "loss" in text else "step"])
  for word in ("`text` must be", *words, f"got {text!r}."):
    assert word in message


@pytest.mark.parametrize("text", [None, 0.9, ("fast", "step"), b"fast|step"])
def test_a_mode_that_is_no_text_is_a_type_error(text):
  with pytest.raises(
    TypeError, match="`text` must be an `accelerate_train_mode`.*got"
  ):
    accelerate_train_mode(text, total_steps=20)


@pytest.mark.parametrize("mode", ["step", "loss"])
def test_what_a_mode_needs_must_be_there(mode):
  (name,) = NEEDS[mode]
  message = refused(f"fast|{mode}")
  assert f"`{name}`" in message
  assert repr(mode) in message or f"fast|{mode}" in message
  # None is how one leaves it out.
  assert refused(f"fast|{mode}", **{name: None}) == message


@pytest.mark.parametrize("mode", ["step", "loss"])
def test_what_the_other_mode_needs_must_not_be_there(mode):
  both = NEEDS["step"] | NEEDS["loss"]
  (other,) = both.keys() - NEEDS[mode].keys()
  message = refused(f"fast|{mode}", **both)
  assert f"`{other}`" in message
  assert mode in message
  # Nor where it is a zero.
  assert f"`{other}`" in refused(f"fast|{mode}", **NEEDS[mode], **{other: 0})


WRONG_COUNTS = (
  *(20.0, 20.5, "20", True, False, np.bool_(True), np.float32(20), 1j, [20]),
  *((20,), np.arange(2), np.asarray([20]), NAN, INF, fractions.Fraction(20)),
)


@pytest.mark.parametrize("value", WRONG_COUNTS, ids=repr)
def test_total_steps_must_be_an_integer(value):
  with pytest.raises(TypeError, match="`total_steps` .*got"):
    accelerate_train_mode("fast|step", total_steps=value)


@pytest.mark.parametrize("value", [-1, -(2**40), np.int8(-1)], ids=repr)
def test_total_steps_must_not_be_negative(value):
  with pytest.raises(ValueError, match="`total_steps` .*got"):
    accelerate_train_mode("fast|step", total_steps=value)


@pytest.mark.parametrize("value", [*WRONG_COUNTS, None], ids=repr)
def test_steps_per_call_must_be_an_integer(value):
  with pytest.raises(TypeError, match="`steps_per_call` .*got"):
    accelerate_train_mode("fast|step", total_steps=20, steps_per_call=value)


@pytest.mark.parametrize("value", [0, -1, np.int8(-1)], ids=repr)
@pytest.mark.parametrize("mode", ["step", "loss"])
def test_steps_per_call_must_be_one_or_more(mode, value):
  with pytest.raises(ValueError, match="`steps_per_call` .*got"):
    accelerate_train_mode(f"fast|{mode}", **NEEDS[mode], steps_per_call=value)


@pytest.mark.parametrize(
  "value", ["2.0", True, 1j, [2.0], np.ones(1), np.bool_(True)], ids=repr
)
def test_target_loss_must_be_a_number(value):
  with pytest.raises(TypeError, match="`target_loss` .*got"):
    accelerate_train_mode("fast|loss", target_loss=value)


@pytest.mark.parametrize(
  "value", [0, 0.0, -0.0, -2.0, NAN, INF, -INF, np.float32(NAN)], ids=repr
)
def test_target_loss_must_be_positive_and_finite(value):
  with pytest.raises(ValueError, match="`target_loss` .*got"):
    accelerate_train_mode("fast|loss", target_loss=value)


@pytest.mark.parametrize(
  "name", ["total_steps", "steps_per_call", "target_loss"]
)
def test_an_argument_must_be_known_when_the_schedule_is_made(name):
  mode = "loss" if name == "target_loss" else "step"

  def make(value):
    arguments = NEEDS[mode] | {name: value}
    accelerate_train_mode(f"fast|{mode}", **arguments)

  with pytest.raises(TypeError, match=f"`{name}` "):
    jax.jit(make)(2)


def test_all_arguments_but_the_text_are_keyword_only():
  parameters = inspect.signature(accelerate_train_mode).parameters.values()
  first, *others = parameters
  assert first.kind == first.POSITIONAL_OR_KEYWORD
  assert {other.kind for other in others} == {first.KEYWORD_ONLY}


# The precision modes.


@pytest.mark.parametrize(
  "precision_mode", [None, "", "allow_fp32_to_fp16", "must_keep_origin_dtype"]
)
@pytest.mark.parametrize("precision_mode_v2", [None, "", "origin"])
def test_a_precision_mode_that_goes_with_it_changes_no_switch(
  precision_mode, precision_mode_v2
):
  for mode, needs in NEEDS.items():
    schedule = accelerate_train_mode(
      f"fast|{mode}",
      **needs,
      precision_mode=precision_mode,
      precision_mode_v2=precision_mode_v2,
    )
    # Products in low precision are then allowed.
    keeps = "origin" in f"{precision_mode} {precision_mode_v2}"
    plain = accelerate_train_mode(f"fast|{mode}", **needs)
    assert schedule == dataclasses.replace(plain, allow_low_products=keeps)


V1 = (
  *("force_fp16", "force_fp32", "cube_fp16in_fp32out", "allow_mix_precision"),
  *("allow_mix_precision_fp16", "allow_mix_precision_bf16"),
)
V2 = ("fp16", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize("name", ["precision_mode", "precision_mode_v2"])
def test_any_other_precision_mode_is_an_error(name):
  v1_and_v2 = {
    "precision_mode": (*V1, "origin", "ALLOW_FP32_TO_FP16", " ", "O1"),
    "precision_mode_v2": (*V2, "must_keep_origin_dtype", "allow_fp32_to_fp16"),
  }
  for value in v1_and_v2[name]:
    message = refused("fast|step", total_steps=20, **{name: value})
    assert f"`{name}`" in message
    assert repr(value) in message
    assert "origin" in message


@pytest.mark.parametrize("name", ["precision_mode", "precision_mode_v2"])
@pytest.mark.parametrize("value", [0, False, 1.0, ["origin"]])
def test_a_precision_mode_that_is_no_text_is_an_error(name, value):
  assert f"`{name}`" in refused("fast|step", total_steps=20, **{name: value})


# The schedule.


@pytest.mark.parametrize(
  "kind", [int, np.uint8, np.int16, np.int64, np.uint64, jnp.int32], ids=repr
)
def test_integers_of_every_kind_are_taken_exactly(kind):
  schedule = accelerate_train_mode(
    "fast|step|0.9", total_steps=kind(120), steps_per_call=kind(20)
  )
  # 120 * 0.9 in uint8, and 120 - 20, are other numbers or of another type.
  assert schedule.until_step == 100
  assert type(schedule.until_step) is int


def test_numbers_written_differently_make_equal_schedules():
  schedules = {
    accelerate_train_mode(f"fast|step{ratio}", total_steps=20)
    for ratio in ("", "|", "|0.9", "|.9", "|0.90")
  }
  assert len(schedules) == 1
