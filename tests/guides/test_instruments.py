"""docs/guides/instruments.md: what is logged, recorded, advised and drawn."""

from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests import documents

PATH = "docs/guides/instruments.md"


@pytest.mark.slow
def test_a_run_is_logged_recorded_advised_drawn_and_searched(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)  # The page draws a picture there.
  with documents.reading(PATH, plt=plt) as page:
    title = "Monitor and tune the loss scale: every step"
    page.run(title, before=documents.BACKWARD)
    grads = jax.grad(page["loss_fn"])(page["params"], page["batch"])
    np.testing.assert_allclose(
      page["metrics"]["grad_norm"], optax.tree.norm(grads), rtol=1e-6
    )
    assert_logged_without_waiting(page)
    page.run("When it has gone wrong")

    page.run("Print or record", 1)
    rule = ols.DynamicLossScale(2.0**24)
    mixed_loss_fn = ols.autocast(page["loss_fn"])
    tx = ols.instruments.record(ols.loss_scaling(page["inner"], rule), 1000)
    names = page.names | {"loss_fn": mixed_loss_fn, "tx": tx}
    train_step = documents.step(documents.STEP, names)
    params, opt_state = page["params"], tx.init(page["params"])
    for _ in range(100):
      params, opt_state, _ = train_step(params, opt_state, page["batch"])
    with mpl.rc_context({"backend": "agg"}):
      printed = page.run("Print or record", 1, opt_state=opt_state)
      assert printed.startswith("step 100: clean, loss scale now ")
      page.run("Print or record")
      history = page["history"]
      lost = int(history.overflow.sum())
      assert lost > 0
      advice = page.run("Advice", rule=rule)
      assert advice.startswith("init_scale: 2**24 -> 2**")
      assert f": {lost} steps overflowed" in advice

      page.run("How to read the curve of S")
      page.run("The distribution of gradients", grads=grads)
      assert page["stats"].total == 32 and page["lost"] == 0
      plt.close("all")
    place = page.run(
      "Where the overflow happens", history=history, loss_fn=mixed_loss_fn
    )
    assert place.startswith("float16 overflow in ")

  # Other noise differs by 0.007, and another interval by 0.0017.
  documents.assert_shows(tmp_path / "reading_s.png", within=0.0015)


class Noting:
  """A number that notes when it is read."""

  def __init__(self, array, note):
    self.array, self.note = array, note

  def __array__(self, dtype=None, copy=None):
    self.note()
    return np.array(self.array, dtype)


def assert_logged_without_waiting(page):
  """Asserts that the page's loop reads nothing but old steps, all at once."""
  compiled = documents.step(documents.STEP, page.names)
  metrics_of = jax.jit(ols.loss_scale_metrics)
  opt_state, begun, read_at = page["tx"].init(page["params"]), [], set()

  def train_step(params, opt_state, batch):
    begun.append(batch)
    params, opt_state, _ = compiled(params, opt_state, batch)
    metrics = metrics_of(opt_state)
    step = len(begun)
    note = lambda: read_at.add((step, len(begun)))  # noqa: E731
    return params, opt_state, {k: Noting(x, note) for k, x in metrics.items()}

  batches = jnp.stack([jnp.asarray(page["batch"])] * 150)
  names = {"batches": list(batches.at[7].mul(jnp.inf)), "rows": []}
  names |= {"train_step": train_step, "opt_state": opt_state}
  page.names["write"] = lambda rows: page["rows"].extend(rows)
  before = dict(page.names)
  with jax.transfer_guard("disallow"):
    page.run("To wandb, TensorBoard or clu", 1, **names)
  rows = page["rows"]
  page.names |= before
  # The newest step is never waited for.
  expected = {(step, 101 if step < 101 else 150) for step in range(1, 151)}
  assert read_at == expected
  assert [step for step, _ in rows] == list(range(150))
  assert [i for i, x in rows if x["skipped"]] == [7]

  wandb, writer, clu_writer = mock.Mock(), mock.Mock(), mock.Mock()
  names = {"wandb": wandb, "writer": writer, "clu_writer": clu_writer}
  page.run("To wandb, TensorBoard or clu", **names)
  for name in ("wandb", "tensorboard", "clu"):
    page[f"to_{name}"](rows)
  call = mock.call  # These are the arguments of the originals.
  assert wandb.log.mock_calls == [call(x, step=i) for i, x in rows]
  assert clu_writer.write_scalars.mock_calls == [call(*row) for row in rows]
  flat = [call(k, x[k], i) for i, x in rows for k in x]
  assert writer.add_scalar.mock_calls == flat
