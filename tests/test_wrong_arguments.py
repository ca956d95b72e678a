"""Every public function refuses a wrong argument, and names it."""

import fnmatch
import inspect
import re
import traceback
import types
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.compiled import compiling
from tests import surface

WRONG = {
  "None": None,
  "numpy": np.ones(2),
  "jax": jnp.ones(2),
  "text": "nonsense",
  "list": [],
}

X = jnp.ones((2, 2))
PARAMS = {"w": jnp.ones(2)}


def loss_fn(params, x=X):
  return jnp.mean(x @ jax.tree.leaves(params)[0])


RULE = ols.DynamicLossScale(8.0)
INNER = optax.sgd(0.5)
TX = ols.loss_scaling(INNER, RULE)
OPT_STATE = TX.init(PARAMS)
SCALING = ols.scaled_value_and_grad(loss_fn, 8.0)
SCHEDULE = ols.PrecisionSchedule(jnp.float16, until_step=3)
HISTORY = ols.instruments.History(
  np.array([1]), np.float32([8]), np.float32([4]), np.array([False])
)
MODEL = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
OPTIMIZER = nnx.Optimizer(MODEL, TX, wrt=nnx.Param)
SHAPES = jax.eval_shape(lambda: (PARAMS, OPT_STATE))


def train_step(params, opt_state):
  _, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
  updates, opt_state = TX.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


# A valid value by the name of the argument, for each without a default.
RIGHT = {
  **dict.fromkeys(["fun", "loss_fn", "apply_fn"], loss_fn),
  **dict.fromkeys(["inner", "opt"], INNER),
  **dict.fromkeys(["opt_state", "target", "restored"], OPT_STATE),
  **dict.fromkeys(["params", "updates", "grads", "scaled_grads"], PARAMS),
  **dict.fromkeys(["tree", "new", "old", "x"], PARAMS),
  **dict.fromkeys(["scale", "loss_scale", "initial_scale", "scale_value"], 8.0),
  **dict.fromkeys(["init_loss_scale", "loss_scale_value"], 8.0),
  **dict.fromkeys(["every", "capacity", "incr_every_n_steps"], 2),
  **dict.fromkeys(["scale_factor", "scale_window"], 2),
  **dict.fromkeys(["loss", "value", "amax"], jnp.float32(1)),
  **dict.fromkeys(["param_dtype", "compute_dtype", "output_dtype"], "float32"),
  "ax": Figure().subplots(),
  "axis_name": "i",
  "bare_state": INNER.init(PARAMS),
  "check": ols.nonfinite(jnp.float16),
  "dtype": jnp.float16,
  "high": 3,
  "history": HISTORY,
  "loss_scale_manager": ols.presets.mindspore_fixed(),
  "low": -3,
  "microbatches": 1,
  "optimizer": OPTIMIZER,
  "overflow": jnp.bool_(False),
  "policy": "float32",
  "replays": {"a": ols.instruments.replay(RULE, HISTORY)},
  "rule": RULE,
  "saturating": False,
  "state": RULE.init(),
  "state_dict": {"fin_steps": 3, "scale": 8.0},
  "stats": ols.instruments.leaf_stats(PARAMS),
  "status": jnp.float32(0),
  "step": train_step,
  "system": "flax",
  "text": "fast|step|0.5",
  "tx": TX,
  "value_and_grad": SCALING,
}
# What some functions need besides; those at "*" go by position.
OWN = {
  "ols.PrecisionSchedule": {"until_step": 3},
  "ols.PrecisionSchedule.update": {"step": 1},
  "ols.hardware.Hardware.check": {"dtype": jnp.float32},
  "ols.hardware.status_tap": {"check": ols.saturated()},
  "ols.instruments.LeafStats.leaf": {"path": "w"},
  "ols.instruments.check_step": {"*": SHAPES},
  "ols.instruments.compile_report": {"*": SHAPES},
  "ols.instruments.get_history": {
    "opt_state": ols.instruments.record(TX, 2).init(PARAMS)
  },
  "ols.instruments.precision_report": {"*": (PARAMS,)},
  "ols.instruments.read_history": {"path": "history.csv"},
  "ols.instruments.write_history": {"path": "history.csv"},
  "ols.nnx.autocast": {"fun": lambda model, x: model(x)},
  "ols.nnx.scaled_value_and_grad": {"fun": lambda model, x: model(x).sum()},
  "ols.nnx.undo_on_skip": {"*": (MODEL,)},
  "ols.presets.accelerate_train_mode": {"total_steps": 10},
  "ols.raise_if_failed": {"max_consecutive_skips": 5},
  "ols.rules.*.update": {"amax": jnp.float32(1)},
  "ols.ScaledValueAndGrad.__call__": {"*": (PARAMS,)},
  "ols.ScaledValueAndGrad.bind": {"args": (PARAMS, X)},
}
# The objects whose methods are called.
OBJECTS = [
  HISTORY,
  OPTIMIZER,
  RIGHT["stats"],
  RULE,
  SCALING,
  SCHEDULE,
  ols.FixedLossScale(),
  ols.get_policy("float32"),
  ols.hardware.probe(),
  ols.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=TX),
  ols.master_weights(INNER).init(PARAMS),
  ols.presets.torch(),
  ols.rules.HeadroomLossScale(),
  ols.rules.LogMaxLossScale(),
  ols.rules.WarmStart(RULE),
]
# Where a value is right, by the reason; the places are patterns.
ANY = "None numpy jax text list"
ACCEPTED = {
  "a pytree may be any; leaves that are no arrays pass through": {
    "ols.Policy.cast_to_* tree=": ANY,
    "ols.experimental.scale_cotangent x=": ANY,
    "ols.hardware.*_tap x=": ANY,
    "ols.instruments.leaf_stats tree=": ANY,
    "ols.instruments.swallowed_share updates=": "None text list",
    "ols.instruments.tune_precision params=": "numpy jax",
    "ols.linen.TrainState.create params=": "None numpy jax list",
    "ols.make_varying tree=": ANY,
    "ols.unscale scaled_grads=": ANY,
  },
  "the field is Flax's, which takes anything": {
    "ols.linen.TrainState.create apply_fn=": ANY
  },
  "a rule that counts overflows does not look at amax": {
    "ols.DynamicLossScale.update amax=": "numpy jax text list",
    "ols.FixedLossScale.update amax=": "numpy jax text list",
    "ols.presets.PresetLossScale.update amax=": "numpy jax text list",
  },
  "None means no cast, no loss scaling, no floor": {
    "ols.Policy *_dtype=": "None",
    "ols.loss_scaling rule=": "None",
    "ols.presets.flax minimum_scale=": "None",
  },
  "none is named": {
    "* axis_name=": "list",
    "ols.cast_inputs argnums=": "list",
    "ols.instruments.check_step may_change=": "None list",
    "ols.loss_scaling average_scaled=": "list",
    "ols.plot.exponent_histogram dtypes=": "list",
  },
  "an empty tree of dtypes, which fits an empty tree of gradients": {
    f"ols.{x} dtype=": "list" for x in ("Check", "nonfinite", "saturated")
  },
  "one number for each element, or one S": {
    "ols.instruments.gradient_error loss_scales=": "numpy jax",
    "ols.scale_loss loss=": "numpy jax",
  },
  "it is not used unless is_distributed is True": {
    "ols.presets.npu_loss_scale_optimizer axis_name=": "text"
  },
  "any text may name a file": {"ols.instruments.write_history path=": "text"},
}
# The errors where a text names a file that is not there.
NO_FILE = {
  "ols.instruments.compile_report compilers=text": RuntimeError,
  "ols.instruments.read_history path=text": FileNotFoundError,
}
STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Their methods take the state that their `init` makes.
STATEFUL = ols.LossScale, ols.PrecisionSchedule


def callables():
  """Yields each public function, method, and class that checks its fields."""
  objects = {type(x): x for x in OBJECTS}
  for prefix, module in surface.modules().items():
    for key in surface.names_of(module):
      value, name = getattr(module, key), f"{prefix}.{key}"
      if inspect.isfunction(value):
        yield name, value
      if not inspect.isclass(value) or inspect.isabstract(value):
        continue
      if "__post_init__" in vars(value):
        yield name, value
      for own, method in vars(value).items():
        is_function = isinstance(method, (types.FunctionType, classmethod))
        if is_function and surface.is_public(own):
          bound = getattr(objects.get(value, value), own)
          if [*inspect.signature(bound).parameters] not in ([], ["self"]):
            yield f"{name}.{own}", bound


def use(name, made):
  """Calls what a function returned, since some errors come only then."""
  match name.removeprefix("ols."):
    case "nnx.undo_on_skip":
      with made:
        OPTIMIZER.update(MODEL, nnx.state(MODEL, nnx.Param))
    case "nnx.autocast" | "nnx.scaled_value_and_grad":
      made(MODEL, X)
    case "accumulate":
      jax.eval_shape(made, PARAMS, X)
    case "PrecisionSchedule.make_train_step":
      jax.eval_shape(made, PARAMS, OPT_STATE, SCHEDULE.init())
    case _ if isinstance(made, optax.GradientTransformation):
      jax.eval_shape(made.update, PARAMS, made.init(PARAMS), PARAMS)
    case _ if isinstance(made, (types.FunctionType, ols.ScaledValueAndGrad)):
      made(PARAMS)


def valid_call(name, function):
  """Returns the arguments of a valid call by name, and those after them."""
  right, own = RIGHT, {}
  if isinstance(owner := getattr(function, "__self__", None), STATEFUL):
    right = RIGHT | {"state": owner.init()}
  for pattern, given in OWN.items():
    own |= given if fnmatch.fnmatchcase(name, pattern) else {}
  others = own.pop("*", ())
  needed = [
    x.name
    for x in inspect.signature(function).parameters.values()
    if x.default is x.empty and x.kind not in STARRED
  ]
  return {x: right[x] for x in needed if x not in own} | own, others


def call(name, function, given, others, use=use):
  """Calls a function, and what it returns."""
  by_name, args = {**given}, []
  for x in inspect.signature(function).parameters.values():
    is_first = others and x.kind is x.POSITIONAL_OR_KEYWORD
    if x.name in given and (is_first or x.kind is x.POSITIONAL_ONLY):
      args.append(by_name.pop(x.name))

  def run(_):
    use(name, function(*args, *others, **by_name))

  # An argument that must name an axis gets one.
  jax.vmap(run, axis_name="i")(X) if "axis_name" in given else run(X)


def outcomes(values, use=use):
  """Yields the name, the argument, the value's label and the error of calls."""
  with warnings.catch_warnings(action="ignore"):
    for name, function in callables():
      given, others = valid_call(name, function)
      if values is WRONG:
        call(name, function, given, others)
      for x in inspect.signature(function).parameters.values():
        for label, value in values.items():
          if x.kind in STARRED or (value is None and x.default is None):
            continue
          error = None
          try:
            call(name, function, given | {x.name: value}, others, use)
          except Exception as caught:
            error = caught
          yield name, x.name, label, error


@pytest.fixture(autouse=True)
def a_history_and_no_compilers(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  ols.instruments.write_history("history.csv", HISTORY)
  monkeypatch.setenv(compiling.VARIABLE, str(tmp_path))
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "python").touch()
  monkeypatch.setattr(
    compiling,
    "compile_for",
    lambda target, programs, **_: ({}, {x: {"error": ""} for x in programs}),
  )


def test_a_wrong_argument_is_refused_by_its_name():
  accepted, wrong = [], {}
  for name, argument, label, error in outcomes(WRONG):
    case = f"{name} {argument}={label}"
    is_named = isinstance(error, (TypeError, ValueError))
    is_named = is_named and f"`{argument}`" in str(error)
    if error is None:
      accepted.append(case)
    elif not is_named and type(error) is not NO_FILE.get(case):
      wrong[case] = repr(error)
  assert not wrong
  right = {
    place + value
    for places in ACCEPTED.values()
    for place, values in places.items()
    for value in values.split()
  }
  found = {x: fnmatch.filter(accepted, x) for x in right}
  assert not [x for x in right if not found[x]], "these are refused now"
  assert {*accepted} == {case for cases in found.values() for case in cases}


def test_no_error_has_a_name_from_inside_jax():
  texts = []

  def note(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "optax_lossscale" in last.filename:
      texts.append(str(error))

  def walk(x):
    def use(name, made):
      for args in ((x,), (PARAMS,), (PARAMS, x)) if callable(made) else ():
        try:
          made(*args)
        except Exception as error:
          note(error)

    values = {"array": x, "tree": {"w": x}, "pair": (x, x)}
    for *_, error in outcomes(values, use):
      if error is not None:
        note(error)
    return x

  jax.jit(walk)(jnp.float32(1.5))
  assert len(texts) > 100
  assert not [x for x in texts if re.search("Tracer|ArrayImpl", x)]
