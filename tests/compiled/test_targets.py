"""Programs compiled for nine GPUs and TPUs are as the pages say.

Nothing here runs on the target. These tests need XLA's compilers.
"""

import collections
import dataclasses
import functools
import json
import math
import re

import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import gpt2
from benchmarks import targets as cases
import optax_lossscale as ols
from optax_lossscale import cli
from optax_lossscale._base import bits
from optax_lossscale.compiled import _compile_report
from optax_lossscale.compiled import _compiled_program
from tests import documents
from tests import test_excess_precision
from tests.compiled import compiled_step
from tests.precision.test_originals_of_rounding import by_bits

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("one_device")]


@pytest.fixture
def one_device(monkeypatch):
  """Lets the library see one device, as a laptop has it."""
  monkeypatch.setattr(jax, "device_count", lambda: 1)


each_target = pytest.mark.parametrize("target", cases.TARGETS)
STORED = json.loads(documents.read("benchmarks/measured/targets.json"))
GPUS = {*cases.GPUS}
# The share of the parameters that temporaries may need. TPUs fetch ahead.
MOST_TEMPORARIES = {True: 0.005, False: 0.1}
DTYPES = test_excess_precision.DTYPES
PLACES = test_excess_precision.PLACES
X = jax.ShapeDtypeStruct((4096,), jnp.float32)


def compile_for(target, step, *args):
  """Returns the step as it is compiled for a target."""
  report = ols.instruments.compile_report(step, *args, targets=target)
  found = report.steps[target]
  assert not found.error
  return found


@each_target
def test_each_rounding_that_decides_what_is_found_is_kept(target):
  casts = {
    "cast back": lambda x: x.astype(jnp.float32),
    "barrier": lambda x: lax.optimization_barrier(x).astype(jnp.float32),
    "held": lambda x: bits.held(x).astype(jnp.float32),
  }
  places = casts | PLACES
  rows = {f"{x} {y}": (x, y) for x in places for y in DTYPES}

  def step(*arrays):
    results = []
    for (row, (place, dtype)), x in zip(rows.items(), arrays, strict=True):
      with jax.named_scope(row):
        results.append(places[place](x.astype(dtype)))
    return results

  # Each has its own array, since equal casts of one array would become one.
  found = compile_for(target, step, *[X] * len(rows))
  program = _compiled_program.parse(found.text)
  rounds = {x.scope for x in found.narrowings if x.kept}
  # A place that rounds in float32 itself does not need a cast.
  rounds |= {
    x.scope for x, _ in program.running() if x.opcode == "reduce-precision"
  }
  dropped = {x for x in rows if not any(y.startswith(x) for y in rounds)}
  plain = {f"cast back {dtype}" for dtype in DTYPES}
  assert dropped == (plain if target in GPUS else set())


@each_target
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_update_reads_each_gradient_twice_and_selects(target, dtype):
  step, state, grads = cases.update("optax_lossscale", dtype)
  found = compile_for(target, step, state, grads)
  assert found.conditionals == 0 and not found.collectives
  size = sum(4 * x.size for x in grads)
  assert found.temporaries <= MOST_TEMPORARIES[target in GPUS] * size
  program = _compiled_program.parse(found.text)
  first = len(jax.tree.leaves(state))
  numbers = set(map(str, range(first, first + len(grads))))
  parameters = {
    name: x.operands[0]
    for name in program.computations[program.entry]
    if (x := program.instructions[name]).opcode == "parameter"
  }
  gradients = [x for x, number in parameters.items() if number in numbers]
  assert len(gradients) == len(grads)
  for name in gradients:
    assert 1 <= reads(program, name) <= 2, name


def reads(program, name):
  """Returns how often a parameter is read from memory."""
  users, total = [name], 0
  slices = collections.Counter()
  while users:
    at = users.pop()
    for key in program.computations[program.entry]:
      x = program.instructions[key]
      if at in x.operands:
        if x.opcode in ("bitcast", "get-tuple-element"):
          users.append(key)
        elif part := re.search(r"slice=(\{.*?\})", x.rest):
          slices[part[1]] += 1  # TPUs fetch a large array in parts.
        else:
          total += x.opcode != "tuple"
  return total + max(slices.values(), default=0)


def loss_fn(w, x):
  return jnp.mean(jnp.square(jnp.tanh(x @ w[0]) @ w[1]))


WEIGHTS = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2


@each_target
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_lowers_products_and_their_gradients(target, dtype):
  grad = jax.grad(ols.autocast(loss_fn, "O1", dtype=dtype))
  found = compile_for(target, grad, WEIGHTS, WEIGHTS[0])
  assert len(found.products) == 5
  wide = [x for x in found.products if x.operands != (dtype, dtype)]
  # Volta and Turing have no matrix unit for bfloat16.
  is_emulated = dtype == "bfloat16" and target in ("v100", "t4")
  assert len(wide) == (5 if is_emulated else 0)


def pallas(query, key, value, _):
  from jax.experimental.pallas.ops.gpu import attention

  scale = query.shape[-1] ** -0.5
  kernel = functools.partial(attention.mha, causal=True, sm_scale=scale)
  kernel = functools.partial(kernel, backward_pass_impl="triton")
  return ols.cast_inputs(kernel)(query, key, value, segment_ids=None)


def gpt2_step(layers, dtype):
  """Returns a train step of GPT-2 with loss scaling, and its arguments."""
  size = dataclasses.replace(gpt2.SIZES["small"], layers=layers)
  model = gpt2.GPT2(size, dtype)
  if dtype == jnp.float32:
    model = gpt2.Autocast(model, "O1")
  tx = ols.loss_scaling(optax.adamw(1e-4), ols.DynamicLossScale())

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch):
    loss_fn = gpt2.make_loss_fn(model)
    grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)[1]
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
  params = jax.eval_shape(lambda: gpt2.init(size, 0))
  return step, params, jax.eval_shape(tx.init, params), (tokens, tokens)


@pytest.mark.filterwarnings("ignore:.*[Pp]allas.*:DeprecationWarning")
@pytest.mark.parametrize(("target", "layers"), [("h200", 2), ("h100", 12)])
@pytest.mark.parametrize("kernel", ["plain attention", "kernel"])
def test_a_marked_kernel_saves_what_one_with_dtype_saves(
  target, layers, kernel, monkeypatch
):
  if kernel == "kernel":
    monkeypatch.setattr(gpt2, "_attend", pallas)
  device = jax.sharding.AbstractDevice(f"NVIDIA {target.upper()}", None, "cuda")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  found = {}
  for dtype in (jnp.float16, jnp.float32):
    with jax.sharding.use_abstract_mesh(mesh):
      found[dtype] = compile_for(target, *gpt2_step(layers, dtype))
  by_dtype, marked = found.values()
  assert marked.kernels <= 1.02 * by_dtype.kernels
  assert marked.temporaries <= 1.02 * by_dtype.temporaries
  assert marked.hand_written == by_dtype.hand_written
  assert len(marked.hand_written) == 3 * layers * (kernel == "kernel")
  if layers == 12:
    page = documents.read("docs/guides/fused_attention.md")
    rows = re.findall(rf"{kernel} \| (\d+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert rows == [
      (str(x.kernels), f"{x.temporaries / 1e6:,.0f}") for x in found.values()
    ]


@each_target
def test_products_have_the_formats_that_the_page_says(target):
  page = documents.read("docs/guides/fp8.md")
  (shown,) = re.findall(
    rf"^\|[^|]*\b{target}\b[^|]*\| (\w+)", page, re.M | re.I
  )
  low = functools.partial(ols.autocast, loss_fn, dtype=jnp.bfloat16)
  grad = jax.grad(low(dot_dtype=jnp.float8_e4m3fn))
  found = compile_for(target, grad, WEIGHTS, WEIGHTS[0])
  assert len(found.products) >= 5
  for x in (x for product in found.products for x in product.operands):
    assert x.split("_")[0] == shown
  # Four operands and two gradients are rounded, whatever becomes of casts.
  assert found.text.count(" reduce-precision(") >= 6
  grad = jax.grad(low(preferred_element_type=jnp.float32))
  found = compile_for(target, grad, WEIGHTS, WEIGHTS[0])
  assert not found.conditionals
  assert {x.result for x in found.products} == {"float32"}
  if target not in ("v100", "t4"):
    assert {x.operands for x in found.products} == {("bfloat16", "bfloat16")}


@each_target
def test_what_changes_numbers_without_a_gradient_is_compiled(target):
  tx = ols.master_weights(
    ols.loss_scaling(optax.adam(1e-3), ols.DynamicLossScale())
  )
  schedule = ols.PrecisionSchedule(jnp.float16, until_step=9)

  def scaled(w, x, factor):
    scale = ols.experimental.scale_cotangent
    w = scale(w, 1 / factor)
    return scale(loss_fn(w, scale(x, 1 / factor)), factor)

  def step(params, opt_state, state, x, factor):
    loss = functools.partial(scaled, factor=factor)
    value_and_grad = schedule.value_and_grad(loss, opt_state, state)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    loss, grads = value_and_grad(wide, x)
    by_schedule = schedule.optimizer(tx, state)
    updates, opt_state = by_schedule.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = [x.update(dtype=jnp.float16) for x in WEIGHTS]
  opt_state = jax.eval_shape(tx.init, params)
  state = jax.eval_shape(schedule.init)
  factor = jax.ShapeDtypeStruct((), jnp.float32)
  found = compile_for(
    target, step, params, opt_state, state, WEIGHTS[0], factor
  )
  # A branch decides the precision, and a select the skip.
  assert found.conditionals == 1
  # By default a TPU multiplies float32 in bfloat16, and may convert it before.
  low = [x.operands[0] == "float16" for x in found.products]
  assert collections.Counter(low) == {True: 5, False: 5}
  # Plain casts: four of the schedule, and the new parameters to float16.
  assert [x.kept for x in found.narrowings] == [True] * 6


@pytest.mark.parametrize("target", compiled_step.TARGETS)
def test_the_stored_programs_are_what_the_compilers_make(target):
  found = compile_for(target, *compiled_step.program())
  stored = _compile_report.read_program(target, compiled_step.load(target))
  # Another version may have other numbers of kernels and bytes.
  for name in ("products", "narrowings", "collectives", "conditionals"):
    seen = str(getattr(found, name)).replace(f"{documents.ROOT}/", "")
    assert seen == str(getattr(stored, name)), name


@pytest.mark.parametrize("on", ["h200 and v5e"])
def test_the_guide_prints_its_report(on, capsys):
  page = documents.read("docs/guides/compile.md")
  documents.run(page, {})
  printed = capsys.readouterr().out.splitlines()
  shown = page.partition("```\nCompiled")[2].partition("```")[0].splitlines()
  (kernels,) = documents.blocks(page, "text")
  for line in reversed(kernels.splitlines()):
    count, leaves = map(int, re.findall(r"\d+", line))
    found, *others = map(int, re.findall(r"\d+", printed.pop()))
    assert abs(found - count) <= 2 and others == [leaves]
  assert printed[0] == f"Compiled{shown[0]}"
  # Another JAX has other numbers.
  first, second = (
    [re.sub(r"[\d.,]+", "#", x).split() for x in lines[2:]]
    for lines in (printed, shown)
  )
  assert first == second


@jax.jit
def padded(x):
  return jnp.pad(x, 1)


def narrow(x, dtype=jnp.bfloat16):
  return (x + 1).astype(dtype)


def wide(x):
  return x.astype(jnp.float32)


WEIGHT = jax.ShapeDtypeStruct((64, 64), jnp.float32)
# The fate of a bfloat16 or float16 in each place: "dropped" on every GPU, on
# those "before" Hopper, or kept.
USES = {
  "a branch": (
    lambda x: lax.cond(
      x[0, 0] > 0, lambda n: wide(n) * 2, lambda n: jnp.sin(wide(n)), narrow(x)
    ),
    "dropped",
  ),
  "one turn of a loop": (
    lambda x: wide(lax.fori_loop(0, 1, lambda i, c: c, narrow(x))),
    "dropped",
  ),
  "a loop in float32": (
    lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), wide(narrow(x))),
    "dropped",
  ),
  "in each turn": (
    lambda x: lax.fori_loop(0, 5, lambda i, c: wide(narrow(c * 1.1)), x),
    "dropped",
  ),
  "carried": (
    lambda x: lax.fori_loop(0, 5, lambda i, c: narrow(wide(c) * 2), narrow(x)),
    "kept",
  ),
  "tanh": (lambda x: jnp.tanh(narrow(x)), "dropped"),
  "a product": (lambda x: 2 * narrow(x), "before"),
  "float16": (lambda x: jnp.exp(narrow(x, jnp.float16)), "kept"),
  "a function": (lambda x: padded(wide(narrow(x))), "kept"),
  "the same function": (lambda x: padded(narrow(x)), "kept"),
  "transposed": (
    lambda x: (wide(narrow(x, jnp.float16)) @ (x + 2)).T,
    "unknown",
  ),
  "both": (lambda x: (narrow(x), wide(narrow(x)) * 2), "dropped"),
}


@each_target
@pytest.mark.parametrize("allow", [True, False])
def test_each_use_of_a_narrowing_counts(target, allow):
  def step(*arrays):
    results = []
    for (name, (use, _)), x in zip(USES.items(), arrays, strict=True):
      with jax.named_scope(name):
        results.append(use(x))
    return results

  # Each has its own array, since equal casts of one array would become one.
  found = ols.instruments.compile_report(
    *(step, *[WEIGHT] * len(USES)),
    targets=target,
    compiler_options={"xla_allow_excess_precision": allow},
  ).steps[target]
  lossy = {"dropped"} if target in GPUS and allow else set()
  lossy |= {"before"} if lossy and target in ("v100", "t4", "a100") else set()
  for name, (_, fate) in USES.items():
    fates = [x.kept for x in found.narrowings if x.scope == name]
    # The name of a transposed product may be gone.
    expected = {True, None} if fate == "unknown" else {fate not in lossy}
    assert min(fates, key=str) in expected, name


def by_neighbors(x, key):
  """Rounds stochastically, in the usual ten lines."""
  near = x.astype(jnp.bfloat16)
  back = near.astype(jnp.float32)
  gap = jnp.abs(back) * 2.0**-8
  other = (back + jnp.sign(x - back) * gap).astype(jnp.bfloat16)
  return jnp.where(
    jax.random.uniform(key, x.shape) * gap < abs(x - back), other, near
  )


@each_target
def test_roundings_that_are_plain_casts_are_lost_on_gpus(target):
  page = documents.read("docs/guides/sixteen_bit_parameters.md")
  title = "Why a plain Kahan sum does nothing on a GPU"
  code = documents.block(page, title, "compensated")
  compensated = documents.run(f"```python\n{code}```", {"jnp": jnp})[
    "compensated"
  ]
  key = jax.eval_shape(lambda: jax.random.key(0))
  low = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
  wide = low.update(dtype=jnp.float32)
  lost = (by_neighbors, wide, key), (compensated, low, low, wide)
  for step, *args in (*lost, (by_bits, wide, wide.update(dtype=jnp.uint32))):
    found = compile_for(target, step, *args)
    fates = {x.kept for x in found.narrowings if x.narrow == "bfloat16"}
    is_lost = target in GPUS and step is not by_bits
    assert (False in fates) == is_lost, step.__name__
    if step is compensated:
      text = found.text
  # The lines that the page shows, with whatever names.
  shown = re.search(r"^(%sum.*?)\n```", page, re.DOTALL | re.MULTILINE)[1]
  seen = set()

  def pattern_of(name):
    is_new = name[1] not in seen
    seen.add(name[1])
    return rf"(?P<{name[1]}>%[^\s,)]+)" if is_new else f"(?P={name[1]})"

  lines = re.sub(r"%(\w+)", pattern_of, re.escape(shown))
  lines = lines.replace("\\\n", r".*?\s")
  assert bool(re.search(lines, text, re.DOTALL)) == (target in GPUS)


# How an optimizer is wrapped, and for each leaf the roundings in float32 and
# the operations on bits.
INNER = {
  "remainder": (lambda x: ols.master_weights(x, store="remainder"), (3, 4)),
  "stochastic": (ols.stochastic_rounding, (3, 10)),
  "state": (ols.low_precision_state, (2, 4)),
}


@each_target
@pytest.mark.parametrize("way", INNER)
def test_sixteen_bit_parameters_keep_their_roundings_and_need_no_more(
  target, way
):
  wrap, asked = INNER[way]
  params = sorted(cases.update("bare")[2], key=lambda x: x.size)[-8:-1]
  dtype = jnp.float32 if way == "state" else jnp.bfloat16
  params = [x.update(dtype=dtype) for x in params]

  def make(tx):
    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    return jax.jit(step, donate_argnums=(0, 1)), params, state, params

  adam = optax.adamw(1e-3)
  report = ols.instruments.compile_report(
    *make(wrap(adam)), targets=target, baseline=make(adam)
  )
  found, bare = report.steps[target], report.baselines[target]
  assert not found.error and not bare.error
  size = sum(x.size for x in params) * jnp.dtype(dtype).itemsize
  more = found.temporaries - bare.temporaries
  assert more <= 0.02 * size
  # Whatever is asked for by a leaf is there, or more, if XLA computes it twice.
  for operation, count in zip(
    (" reduce-precision(", " and("), asked, strict=True
  ):
    assert found.text.count(operation) >= count * len(params), operation


# The figures of docs/costs.md, within bounds for another version of JAX.


QUICK = "update, float16 gradients"


def params_bytes(devices):
  """Returns the bytes of the sharded parameters on a device."""
  shapes = [cases.on_mesh(x, devices) for x in cases.update("bare")[2]]
  return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in shapes)


def check_what_loss_scaling_adds(part, target, bare, ours):
  """Checks the promises of docs/costs.md on GPUs."""
  is_lamb = part == cases.LAMB
  assert ours["kernels"] <= bare["kernels"] + (12 if is_lamb else 0)
  size = params_bytes(4 if part.endswith("sharded") else 1)
  # The page names the one step that needs more.
  share = 0.013 if (part, target) == ("train step", "v100") else 0.01
  most = share * (bare["temporaries"] if is_lamb else size)
  assert ours["temporaries"] <= bare["temporaries"] + most
  more = collections.Counter(all_reduce=1) if "four" in part else {}
  figures = {"temporaries", "total", "kernels", "conditionals"}
  for kind in ours.keys() - figures:
    assert ours[kind] <= bare.get(kind, 0) + more[kind], kind


@pytest.mark.parametrize(
  ("part", "target"),
  [
    pytest.param(part, target, marks=() if is_quick else pytest.mark.long)
    for part, (_, its_targets, *_) in cases.PARTS.items()
    for target in its_targets
    for is_quick in [part == QUICK or (target == "h200" and "32" not in part)]
  ],
)
def test_a_program_needs_what_the_page_says(part, target):
  # The peers take as long again, so only where that is not long.
  is_short = part == QUICK or "train" in part
  names = cases.PARTS[part].contenders[: 2 if is_short else 4]
  found = cases.figures(part, target, names)
  if target in GPUS:
    check_what_loss_scaling_adds(
      part, target, found["bare"], found["optax_lossscale"]
    )
  for name in names:
    row, stored = found[name], STORED["parts"][part][target][name]
    assert row.keys() == stored.keys()
    for key, x in row.items():
      slack = {"temporaries": 2**20, "kernels": 10}.get(key, 0)
      most = 0.1 * stored[key] + slack
      is_near = abs(x - stored[key]) <= most
      assert is_near, f"{part}, {target}, {name}: {key} {x}, not {stored[key]}"


@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize(
  ("devices", "is_shared", "most"),
  [(1, False, 10), (4, False, 40), (4, True, 40)],
)
def test_the_check_takes_few_kernels(
  target, devices, is_shared, most, monkeypatch
):
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  scaled_grads = cases.update("bare")[2]
  if devices > 1:
    place = functools.partial(cases.on_mesh, devices=4, is_shared=is_shared)
    scaled_grads = [*map(place, scaled_grads)]
  scale = jax.ShapeDtypeStruct((), jnp.float32)
  found = compile_for(
    target, lambda x, scale: bits.amax(x, scale=scale), scaled_grads, scale
  )
  assert found.kernels <= most
  assert found.collectives == ({"all-reduce": 1} if is_shared else {})


@pytest.mark.long
@pytest.mark.parametrize("name", cases.MESHES)
def test_sharded_over_many_chips_loss_scaling_adds_one_small_all_reduce(name):
  target = cases.MESHES[name]
  rows = cases.figures(f"sharded train step, {name}", target, cases.CONTENDERS)
  bare, ours, *peers = rows.values()
  assert ours["all_reduce"] == bare["all_reduce"] + 1
  assert ours["temporaries"] <= min(x["temporaries"] for x in peers)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "more", "weights"),
  [
    ("16 x v5e", 17, ""),
    ("16 x v5e", 17, r"f8e4m3fn\[4096,2048\]\S* all-gather"),
    ("256 x v5e", 17, ""),
    # A sum of shares, four numbers of float8 in one of u32.
    ("256 x v5e", 20, r"u32\[2,1048576\]\S*\) all-reduce"),
  ],
)
def test_sharded_float8_adds_the_all_reduces_that_the_page_says(
  name, more, weights
):
  spec = jax.P("data") if weights else jax.P()
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh((int(name.split()[0]),), ("data",), auto)
  up, down, x = (
    x.update(shape=shape, sharding=jax.NamedSharding(mesh, spec))
    for x, shape, spec in (
      (X, (2048, 4096), spec),
      (X, (4096, 2048), spec),
      (X, (32768, 2048), jax.P("data")),
    )
  )

  def residual_loss_fn(layers, x):
    for up, down in layers:
      x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(jnp.float32(x) ** 2)

  low = functools.partial(ols.autocast, residual_loss_fn, dtype=jnp.bfloat16)
  in_bfloat16, in_float8 = (
    compile_for(
      cases.MESHES[name], jax.grad(low(**options)), [(up, down)] * 4, x
    )
    for options in ({}, {"dot_dtype": jnp.float8_e4m3fn})
  )
  added = in_float8.collectives["all-reduce"]
  added -= in_bfloat16.collectives["all-reduce"]
  assert added == more, "docs/guides/fp8.md says how many"
  assert re.search(weights, in_float8.text)


@pytest.mark.parametrize("on", ["h200,v5e"])
def test_doctor_says_which_casts_are_kept(on, capsys):
  assert cli.main(["doctor", "--on", on]) == 0
  gpu, tpu = capsys.readouterr().out.split("v5e  ")
  assert len(re.findall("^float16 +dropped +kept +dropped$", gpu, re.M)) == 1
  assert len(re.findall("^float8_e5m2( +kept){3}$", tpu, re.M)) == 1
