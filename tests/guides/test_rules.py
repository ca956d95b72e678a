"""docs/guides/rules.md: its steps, and the numbers of its replays."""

import re

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.cli import _loss_scale
from tests import documents

PATH = "docs/guides/rules.md"


def test_amax_inside_the_model_reaches_the_rule():
  params = {"w": jnp.full((5, 3), 0.5)}
  batch = {"x": jnp.ones((4, 5)), "y": jnp.ones(4)}
  with documents.reading(PATH, params=params, batch=batch) as page:
    page.run(count=1)
    page.run(opt_state=page["tx"].init(params))
    largest = jnp.abs(page["scaled_grads"]["w"]).max()
    assert page["opt_state"].amax == max(page["amax"], largest)


@pytest.mark.slow
def test_the_table_of_rules_is_what_replays_show():
  rows = re.findall(
    r"^\| `(\S+)`(?:.*?) \| (\d.*) \|$", documents.read(PATH), re.MULTILINE
  )
  assert len(rows) == 14
  text_of = {
    "megatron": "megatron:initial_scale=2**32,min_scale=1,growth_factor=2,"
    "backoff_factor=0.5,growth_interval=1000,hysteresis=2"
  }
  histories = [
    ols.instruments.read_history(f"tests/traces/amax_{name}.csv")
    for name in ("digits", "text")
  ]
  for name, shown in rows:
    rule = _loss_scale.parse(text_of.get(name, name))
    replays = [ols.instruments.replay(rule, x) for x in histories]
    cells = [f"{x.lost_steps} | {x.mean_headroom:.1f}" for x in replays]
    assert " | ".join(cells) == shown, name
