"""The text form of a rule."""

import re

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import rules
from optax_lossscale.cli import _loss_scale


@pytest.mark.parametrize(
  ("text", "rule"),
  [
    ("fixed", ols.FixedLossScale()),
    ("fixed:scale=2**-3", ols.FixedLossScale(0.125)),
    ("dynamic:", ols.DynamicLossScale()),
    ("dynamic:2**10", ols.DynamicLossScale(1024.0)),
    ("megatron", ols.presets.megatron()),
    (
      "mindspore:scale_factor=4,scale_window=3000",
      ols.presets.mindspore(scale_factor=4, scale_window=3000),
    ),
    (
      "dynamic:init_scale=2**15, growth_interval=200, skip=False",
      ols.DynamicLossScale(2.0**15, growth_interval=200, skip=False),
    ),
    ("apex:loss_scale=dynamic", ols.presets.apex(loss_scale="dynamic")),
    ("megatron:refill=clean", ols.presets.megatron(refill="clean")),
    (
      "headroom:2**10,headroom=2,window=100,dtype=bfloat16",
      rules.HeadroomLossScale(
        1024.0, headroom=2, window=100, dtype=jnp.bfloat16
      ),
    ),
    ("log_max:log_max=128", rules.LogMaxLossScale(log_max=128.0)),
    (
      "warm_start:dynamic:2**32,growth_interval=200",
      rules.WarmStart(ols.DynamicLossScale(2.0**32, growth_interval=200)),
    ),
  ],
)
def test_text_stands_for_rule(text, rule):
  assert _loss_scale.parse(text) == rule


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("nope", "unknown rule 'nope'; choose from fixed, dynamic"),
    ("megatorn:hysteresis=2", "growth_interval=200; did you mean 'megatron'?"),
    ("", "unknown rule ''"),
    (
      "1024",
      "must be a rule, got '1024'; fixed:1024 keeps that S, dynamic:",
    ),
    ("2**15", "fixed:2**15 keeps that S, dynamic:2**15 starts from it"),
    ("0", "unknown rule '0'; choose from fixed"),
    ("fixed:-1", "`scale` must be positive, got -1"),
    ("fixed:scale=True", "`scale` must be a number, got True"),
    ("dynamic:growth=2", "dynamic has no argument 'growth'; choose from init"),
    ("torch:init_scal=8", "enabled; did you mean 'init_scale'?"),
    ("mindspore:4,3000", "mindspore takes its arguments by name, as in"),
    ("jmp:period=9", "call missing 'loss_scale'; pass loss_scale=..."),
    ("dynamic:8,init_scale=8", "dynamic got 'init_scale' twice"),
    ("fixed:1024,", "must be a number such as 1024, 0.5 or 2**15, got ''"),
    ("fixed:big", "scale must be a number such as 1024, 0.5 or 2**15"),
    ("fixed:__import__('os')", "scale must be a number"),
    ("fixed:9**9**9**9", "scale must be a number"),
    ("fixed:0**-1", "scale must be a number"),
    ("fixed:9**999", "scale must be a number"),
    ("fixed:inf", "scale must be a number"),
    ("headroom:dtype=int8", "`dtype` must be a floating-point dtype such as"),
    ("warm_start", "'warm_start': warm_start must come once, before a rule"),
    ("warm_start:warm_start:fixed", "warm_start must come once, before a rule"),
    ("warm_start:" * 9999, "warm_start must come once, before a rule"),
    ("megatron:refill=sometimes", "`refill` must be 'growth'"),
    ("apex:scale_window=dynamic", "scale_window must be a number such as"),
  ],
)
def test_a_text_that_names_no_rule_is_refused(text, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _loss_scale.parse(text)


def test_an_error_repeats_only_the_beginning_of_a_long_text():
  with pytest.raises(ValueError) as error:
    _loss_scale.parse("x" * 10**6)
  assert len(str(error.value)) < 1000
