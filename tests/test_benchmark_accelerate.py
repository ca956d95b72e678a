"""`python -m benchmarks accelerate`: that it measures what it says."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import accelerate
from benchmarks import accelerate_steps
from benchmarks import autocast_counts as counts
from benchmarks.truth import workload as workload_lib

pytestmark = pytest.mark.long


LINEAR = workload_lib.Workload(
  description="A linear model",
  elements=64,
  init=lambda key: jnp.zeros((8, 1)),
  draw=lambda key, params: jax.random.normal(key, (64, 8)),
  loss=lambda params, x: jnp.mean((x @ params - 1) ** 2),
  score=lambda params: params,
  score_name="",
  matters=1.0,
  rate=0.1,
  steps=4,
)


def row(*seconds, compilation=(1.0, 2.0)):
  """The figures of a contender, as far as they are needed."""
  trace, compile_ = compilation
  cost = {"trace_seconds": trace, "compile_seconds": compile_}
  return {"seconds": list(seconds), "compilations": [cost] * 3}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
  """What the command printed and wrote, of a linear model."""
  path = tmp_path_factory.mktemp("benchmark") / "new" / "accelerate.json"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(accelerate, "make_workload", lambda *, tiny: LINEAR)
    printed = []
    patch.setattr("builtins.print", lambda *x, **_: printed.extend(x))
    options = ["--tiny", "--rounds=2", f"--out={path.parent}"]
    assert command.main(["accelerate", *options]) == 0
  return "\n".join(printed), json.loads(path.read_text())


def test_every_precision_is_timed_and_compiled(output):
  rows = output[1]["contenders"]
  assert list(rows) == [
    "float32",
    *("float16, O1", "fast, low part", "fast, full part"),
    *("bfloat16, O1", "fast1, low part", "fast1, full part"),
  ]
  for figures in rows.values():
    assert len(figures["seconds"]) == 2 and min(figures["seconds"]) > 0
    assert len(figures["compilations"]) == 1
  for name in rows:
    assert name in output[0]


def test_schedule_stays_in_its_part(output):
  lows = {name: x["low"] for name, x in output[1]["contenders"].items()}
  assert {name for name, low in lows.items() if low} == {
    "fast, low part",
    "fast1, low part",
  }
  assert {name for name, low in lows.items() if low is None} == {
    "float32",
    "float16, O1",
    "bfloat16, O1",
  }


def test_all_train_alike(output):
  losses = [x["last_loss"] for x in output[1]["contenders"].values()]
  assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)


def test_both_types_are_judged(output):
  printed, content = output
  assert list(content["schedules"]) == ["fast", "fast1"]
  for kind in content["schedules"]:
    assert f"{kind}|step|0.9: a step takes" in printed


def test_low_precision_alone_has_its_products_in_it():
  batch = LINEAR.draw(jax.random.key(0), None)
  contenders = accelerate_steps.make_contenders(LINEAR)
  for name, dtype in (("float16, O1", jnp.float16), ("float32", jnp.float32)):
    contender = contenders[name]
    jaxpr = jax.make_jaxpr(contender.step)(contender.state, batch)
    products = counts.products(jaxpr, dtype)
    assert products.lowered == products.all > 0


def test_second_compilation_is_earned_back_by_what_the_steps_save():
  figures = accelerate.earned_back(
    row(4.0, 4.0, 4.0),
    row(1.0, 2.0, 3.0, compilation=(2.0, 3.7)),
    row(4.0, 4.0, 4.0),
  )
  # Nine steps of ten are two seconds faster in the median.
  assert figures["saved"]["median"] == pytest.approx(1.8)
  assert figures["compilation"] == pytest.approx(2.7)
  assert figures["steps"] == pytest.approx(1.5)
  assert figures["hours"] == pytest.approx(1.5 * 4 / 3600)


def test_what_the_full_part_loses_counts():
  figures = accelerate.earned_back(row(4.0), row(3.0), row(14.0))
  assert figures["saved"]["median"] == pytest.approx(-0.1)


def test_nothing_is_earned_back_where_nothing_is_saved():
  figures = accelerate.earned_back(row(4.0), row(5.0), row(4.0))
  assert figures["steps"] is None and figures["hours"] is None
  assert accelerate._verdict(figures).endswith(
    "never: low precision is not faster here"
  )


def test_saving_that_some_rounds_do_not_show_is_called_unclear():
  for slowest, is_unclear in ((3.5, False), (6.0, True)):
    figures = accelerate.earned_back(
      row(4.0, 4.0, 4.0), row(slowest, 3.0, 1.0), row(4.0, 4.0, 4.0)
    )
    assert ("if at all" in accelerate._verdict(figures)) == is_unclear
