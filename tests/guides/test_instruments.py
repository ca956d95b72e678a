"""docs/guides/instruments.md: what is logged, recorded, advised and drawn."""

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax

import optax_lossscale as ols
from tests import documents

PATH = "docs/guides/instruments.md"


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
