"""The pages under docs/ show programs that work as printed."""

import ast
import dataclasses
import functools
import json
import pathlib
import re

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np
import optax
import pytest

from benchmarks.truth.workloads import lenet5
import optax_lossscale as ols
from optax_lossscale import hardware
from optax_lossscale.cli import _loss_scale
from tests import documents
from tests.autocast.programs import dtypes_of

DOCS = documents.ROOT / "docs"
PAGES = {
  page.stem: page.read_text()
  for page in sorted(
    [
      documents.ROOT / "index.md",
      *DOCS.glob("*.md"),
      *DOCS.glob("guides/*.md"),
    ]
  )
}
# These have tests of their own.
ELSEWHERE = {
  "autocast",
  "different",
  *(
    path.stem.removeprefix("test_")
    for path in documents.ROOT.glob("tests/guides/test_*.py")
  ),
}


def block(name, words):
  """Returns the one Python block of a page that has some words in it."""
  (found,) = (x for x in documents.blocks(PAGES[name]) if words in x)
  return found


def test_the_lines_on_the_front_page_are_a_step():
  names = {"ols": ols, "optax": optax, "params": jnp.ones((8, 4))}
  names |= {"batch": jnp.eye(8), "loss_fn": lambda w, x: jnp.sum(x @ w)}
  exec(block("index", "ols.loss_scaling"), names)
  assert names["loss"] == 32
  np.testing.assert_allclose(names["params"], 0.999, rtol=1e-5)


def test_the_report_of_a_loss_is_the_one_that_is_shown(capsys):
  class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.LayerNorm()(nn.relu(nn.Dense(8, name="hidden")(x)))
      return nn.Dense(3, name="head")(x)

  batch = np.ones((4, 5), np.float32)
  params = MLP().init(jax.random.key(0), batch)
  names = {"ols": ols, "params": params, "batch": batch}
  names["mixed_loss_fn"] = ols.autocast(
    lambda params, batch: jnp.mean(MLP().apply(params, batch) ** 2), "O1"
  )
  exec(block("mixed_precision", "precision_report"), names)
  assert f"```text\n{capsys.readouterr().out}```" in PAGES["mixed_precision"]


@pytest.mark.slow
def test_the_examples_run_one_after_the_other():
  model = nn.Dense(3, dtype=jnp.float16)
  batch = np.ones((4, 5), np.float32)
  params = model.init(jax.random.key(0), batch)

  def loss_fn(params, batch):
    return jnp.mean(jnp.float32(model.apply(params, batch)) ** 2)

  tx = ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  names = {"params": params, "loss_fn": loss_fn, "batch": batch, "tx": tx}
  names |= {"functools": functools, "jax": jax, "jnp": jnp, "ols": ols}
  names |= {"optax": optax, "opt_state": tx.init(params)}
  loss = loss_fn(params, batch)

  names |= {"nnx": nnx, "lenet": lenet5.LeNet5()}
  mixed = functools.partial(block, "mixed_precision")
  first = dict(names)
  exec(mixed("scaled_value_and_grad(mixed_loss_fn"), first)
  np.testing.assert_allclose(first["loss"], loss, rtol=0.1)
  assert first["opt_state"].applied_steps == 1
  exec(mixed("ols.autocast(lenet.apply"), names)
  images = jnp.ones((1, 32, 32, 1))
  variables = names["lenet"].init(jax.random.key(0), images)
  found = dtypes_of(
    "conv_general_dilated", names["mixed_lenet"], variables, images
  )
  assert found == ["float16"] * 2 + ["float32"] * 4
  exec(mixed("class Head"), names)
  assert names["mixed_head"](batch).dtype == jnp.float32

  # What is written in float32, as these expect it.
  written = names | {"loss_fn": lambda params, x: jnp.mean(x @ params["w"])}
  written["params"] = {"w": jnp.ones((5, 3), jnp.float16)}
  exec(mixed("ols.get_policy"), written)
  assert written["params"]["w"].dtype == jnp.float32
  found = dtypes_of(
    "dot_general", written["mixed_loss_fn"], written["params"], batch
  )
  assert found == ["float16"] * 2
  written["opt_state"] = written["tx"].init(written["params"])
  schedule = functools.partial(block, "precision_schedule")
  exec(schedule("ols.PrecisionSchedule("), written)
  assert (written["state"].low, written["state"].steps) == (True, 1)
  exec(schedule("cast=cast"), written)
  *_, state, _ = written["train_step"](
    *(written[x] for x in ("params", "opt_state", "state", "batch"))
  )
  assert (state.low, state.steps) == (True, 2)

  _, names["scaled_grads"] = ols.scaled_value_and_grad(
    loss_fn, names["opt_state"]
  )(names["params"], batch)
  exec(block("instruments", "ols.loss_scale_metrics"), names)
  assert names["metrics"]["applied_steps"] == 1
  assert names["metrics"]["headroom"] > 0
  exec(block("instruments", "ols.raise_if_failed"), names)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", None])
def test_the_loss_is_mixed_if_the_device_prefers_a_low_dtype(name, monkeypatch):
  found = hardware.probe()
  preferred = name and jnp.dtype(name)
  found = dataclasses.replace(found, preferred_dtype=preferred)
  monkeypatch.setattr(hardware, "probe", lambda: found)
  names = {"jnp": jnp, "ols": ols, "loss_fn": lambda x: jnp.sum(x @ x)}
  exec(block("mixed_precision", "preferred_dtype"), names)
  if name in ("float16", "bfloat16"):
    found = dtypes_of("dot_general", names["mixed_loss_fn"], jnp.eye(2))
    assert found == [name] * 2
  else:
    assert "mixed_loss_fn" not in names


def test_five_lines_of_torch_are_beside_five_of_ours():
  torch = ast.parse(block("mixed_precision", "scaler.scale(loss)"))
  ours = ast.parse(block("mixed_precision", "scaled_value_and_grad(mixed_loss"))
  assert len(torch.body) == len(ours.body) == 5


def test_gradient_error_is_measured_as_the_page_shows(capsys):
  names = {"ols": ols, "params": jnp.ones((8, 4)), "batch": jnp.ones((2, 8))}
  names["loss_fn"] = lambda params, batch: jnp.mean(batch @ params)
  exec(block("does_it_matter", "gradient_error"), names)
  assert capsys.readouterr().out.startswith("Gradient in float16, ")


def test_the_norm_that_is_logged_is_the_true_one_when_s_grows():
  seeing = block("instruments", "ols.loss_scale_metrics")
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(growth_interval=1))
  params = {"w": jnp.array([3.0, 4.0])}
  names = {"ols": ols, "optax": optax, "tx": tx, "params": params}
  names["opt_state"] = tx.init(params)
  for step in range(1, 4):
    _, names["scaled_grads"] = ols.scaled_value_and_grad(
      lambda params: jnp.sum(params["w"] ** 2) / 2, names["opt_state"]
    )(params)
    exec(seeing, names)
    assert names["metrics"]["grad_norm"] == 5
    assert names["metrics"]["loss_scale"] == 2.0 ** (15 + step)
  # After `update` it would be halved.
  with pytest.warns(ols.WiringWarning, match="from before `update`"):
    after = optax.tree.norm(
      ols.unscale(names["scaled_grads"], names["opt_state"])
    )
  assert after == 2.5


@pytest.mark.slow
def test_what_is_seen_and_advised(capfd):
  seeing = functools.partial(block, "instruments")
  rule = ols.DynamicLossScale(2.0**20)
  batch = np.ones((4, 5), np.float32)
  params = {"w": jnp.full((5, 3), 0.5)}

  def loss_fn(params, batch):
    hidden = jnp.float16(batch) @ jnp.float16(params["w"])
    return jnp.mean(jnp.float32(hidden) ** 2)

  names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax, "rule": rule}
  names |= {"params": params, "loss_fn": loss_fn, "batch": batch}
  record = seeing("ols.instruments.record")
  exec(record.replace("ols.DynamicLossScale()", "rule"), names)
  step = documents.STEP + seeing("ols.instruments.print_loss_scale")
  names["train_step"] = documents.step(step, names)
  for _ in range(100):
    names["params"], names["opt_state"], _ = names["train_step"](
      names["params"], names["opt_state"], batch
    )
  with matplotlib.rc_context({"backend": "agg"}):
    exec(seeing("ols.instruments.get_history"), names)
    assert names["history"].overflow.sum() == 5
    exec(seeing("ols.instruments.advise"), names)
    names["grads"] = jax.grad(loss_fn)(params, batch)
    exec(seeing("ols.instruments.leaf_stats"), names)
    matplotlib.pyplot.close("all")
  assert names["stats"].total == 15
  assert names["lost"] == 0
  overflow = seeing("ols.instruments.where_overflow")
  exec(overflow, names)
  # As if the last step had overflowed, at the S that the run has settled on.
  history = names["history"]
  last = history._replace(overflow=np.ones_like(history.overflow))
  exec(overflow, names | {"history": last})
  jax.effects_barrier()
  printed, advice, place, none = capfd.readouterr().out.splitlines()
  assert printed.startswith(
    "step 100: clean, loss scale now 32768, headroom 0.6 bits, 95 appl"
  )
  assert advice.startswith("init_scale: 2**20 -> 2**15: 5 steps overflowed")
  assert place.startswith("float16 overflow in ")
  assert none == "no operation overflowed"


@pytest.mark.slow
def test_the_table_of_rules_is_what_replays_show():
  rows = re.findall(
    r"^\| `(\S+)`(.*?) \| (.*) \|$", PAGES["rules"], re.MULTILINE
  )
  text_of = {
    "megatron": "megatron:initial_scale=2**32,min_scale=1,growth_factor=2,"
    "backoff_factor=0.5,growth_interval=1000,hysteresis=2"
  }
  histories = [
    ols.instruments.read_history(f"tests/traces/amax_{name}.csv")
    for name in ("digits", "text")
  ]
  # A table before it says in words what the rules do.
  shown = {
    name: cells.split(" | ") for name, _, cells in rows if cells[0].isdigit()
  }
  assert len(shown) == 14
  for name, cells in shown.items():
    rule = _loss_scale.parse(text_of.get(name, name))
    replays = [ols.instruments.replay(rule, x) for x in histories]
    expected = [
      cell
      for replay in replays
      for cell in (str(replay.lost_steps), f"{replay.mean_headroom:.1f}")
    ]
    assert cells == expected, name


def test_amax_inside_the_model_reaches_the_rule():
  rules = functools.partial(block, "rules")
  params = {"w": jnp.full((5, 3), 0.5)}
  batch = {"x": jnp.ones((4, 5)), "y": jnp.ones(4)}
  names = {"jnp": jnp, "ols": ols, "optax": optax, "params": params}
  names |= {"batch": batch}
  exec(rules("ols.rules.HeadroomLossScale"), names)
  names["opt_state"] = names["tx"].init(params)
  exec(rules("hardware.amax_tap"), names)
  assert names["opt_state"].amax == max(
    names["amax"], jnp.abs(names["scaled_grads"]["w"]).max()
  )


@pytest.mark.parametrize(
  ("name", "code"),
  [
    (name, code)
    for name, page in PAGES.items()
    if name not in ELSEWHERE
    for code in documents.blocks(page)
    if "savefig" not in code  # tests/guides/test_reading_s.py draws it.
  ],
)
def test_every_block_is_run_by_one_of_these_tests(name, code):
  calls = [
    node.args[-1].value
    for node in ast.walk(ast.parse(pathlib.Path(__file__).read_text()))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.args
    and isinstance(node.args[-1], ast.Constant)
  ]
  assert any(str(words) in code for words in calls)


@pytest.mark.parametrize("around", ["recorded", "chained"])
def test_a_precision_schedule_counts_steps_wherever_loss_scaling_is(around):
  tx = ols.loss_scaling(optax.sgd(0.1), ols.DynamicLossScale())
  if around == "recorded":
    tx = ols.instruments.record(tx, 2)
  else:
    tx = optax.chain(tx, optax.identity())
  params = jnp.ones((2, 2))
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=9)
  names = {"jax": jax, "jnp": jnp, "ols": ols, "optax": optax, "tx": tx}
  names |= {"schedule": schedule}
  names["loss_fn"] = lambda params, x: jnp.mean(x @ params)
  train_step = documents.step(
    block("precision_schedule", "schedule.value_and_grad"),
    names,
    ("params", "opt_state", "state"),
  )
  carry = params, tx.init(params), schedule.init()
  for x in (jnp.eye(2), jnp.eye(2) * jnp.inf, jnp.eye(2)):
    *carry, _ = train_step(*carry, x)
  assert carry[-1].steps == 2


# Their first step is one for hardware that saturates.
SATURATING = {"checks.md", "ascend.md"}


def checks_of(page):
  """Returns the check of each call of `loss_scaling` in a page, or None."""
  text = page.read_text()
  if page.suffix == ".md":
    text = "".join(documents.blocks(text))
  elif page.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    code = [x["source"] for x in cells if x["cell_type"] == "code"]
    text = re.sub(r"^%.*", "", "\n".join(map("".join, code)), flags=re.M)
  calls = [
    node
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
    and ast.unparse(node.func) == "ols.loss_scaling"
  ]
  keywords = [
    {x.arg: ast.unparse(x.value) for x in call.keywords}
    for call in sorted(calls, key=lambda call: call.lineno)
  ]
  return [x.get("check") for x in keywords]


@pytest.mark.parametrize(
  "page",
  [
    page
    for pattern in (
      "*.md",
      "docs/**/*.md",
      "notebooks/*.ipynb",
      "examples/*.py",
    )
    for page in sorted(documents.ROOT.glob(pattern))
    if checks_of(page)
  ],
  ids=lambda page: str(page.relative_to(documents.ROOT)),
)
def test_a_page_begins_with_a_step_that_needs_no_check(page):
  first, *_ = checks = checks_of(page)
  assert (first is None) == (page.name not in SATURATING)
  assert not [x for x in checks if str(x).startswith("ols.nonfinite(")]


def test_the_table_of_names_is_complete():
  names = [*ols.__all__]
  names += [f"experimental.{name}" for name in ols.experimental.__all__]
  names += [f"hardware.{name}" for name in hardware.__all__]
  for name in names:
    assert f"`{name}" in PAGES["reference"], name


def test_every_guide_is_in_the_table_of_guides_once_by_its_title():
  guides = DOCS / "guides"
  rows = re.findall(
    r"^\| \[(.+)\]\((\w+\.md)\) \| .+ \|$",
    (guides / "README.md").read_text(),
    re.MULTILINE,
  )
  expected = [
    (page.read_text().partition("\n")[0].removeprefix("# "), page.name)
    for page in guides.glob("*.md")
    if page.stem != "README"
  ]
  assert sorted(rows) == sorted(expected)


def anchors(text):
  """Returns the anchors of a page's headings and of its cells."""
  prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
  made = {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in headings
  }
  return made | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize(
  "page",
  [
    documents.ROOT / "README.md",
    documents.ROOT / "index.md",
    documents.ROOT / "notebooks" / "README.md",
    documents.ROOT / "benchmarks" / "truth" / "README.md",
    *DOCS.rglob("*.md"),
  ],
  ids=lambda page: page.stem,
)
def test_every_link_leads_somewhere(page):
  for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text()):
    if link.startswith("https:"):
      continue
    target, _, anchor = link.partition("#")
    path = page.parent / target if target else page
    assert path.exists(), link
    assert not anchor or anchor in anchors(path.read_text()), link
