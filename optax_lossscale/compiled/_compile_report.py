"""`compile_report`: what becomes of a step on a target that is not here."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import re
from typing import NamedTuple

import jax
from jax import export
from jax.extend.core import primitives

from optax_lossscale._base import arguments
from optax_lossscale._base import tables
from optax_lossscale._jaxpr import interpreter
from optax_lossscale.compiled import _compiled_program
from optax_lossscale.compiled import _narrowings
from optax_lossscale.compiled import compiling
from optax_lossscale.instruments import shared

_MOST_ROWS = 12
_FATES = True, False, None
# Kernels are not tuned, since tuning would run them.
_UNTUNED = {"cuda": {"xla_gpu_autotune_level": 0}}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A step as XLA has compiled it for one target; nothing was run.

  Attributes:
    device_memory: bytes that JAX takes of a device of the target; of a GPU
      these are by default three quarters.
    error: why the step does not compile, or an empty string.
    arguments: bytes of the arguments, on one device, as all that follow.
    outputs: bytes of the outputs.
    reused: bytes of the outputs that take the place of donated arguments.
    temporaries: bytes that XLA plans for what is in between.
    kernels: how many kernels, copies and library calls it launches; on a TPU,
      how many operations. The body of a loop counts once, and so does every
      branch.
    collectives: how many there are of each kind, such as {"all-reduce": 1}.
    conditionals: how many branches are decided while it runs. Without one, a
      skip is a select.
    products: its matrix products and convolutions.
    hand_written: the kernels that XLA did not make, such as Pallas's and
      cuDNN's attention, with the dtypes of their operands.
    narrowings: what became of each conversion to a narrower float.
    text: the optimized HLO.
  """

  device_memory: int
  error: str = ""
  arguments: int = 0
  outputs: int = 0
  reused: int = 0
  temporaries: int = 0
  kernels: int = 0
  collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
  conditionals: int = 0
  products: tuple[_compiled_program.Product, ...] = ()
  hand_written: tuple[str, ...] = ()
  narrowings: tuple[_narrowings.Narrowing, ...] = ()
  text: str = dataclasses.field(default="", repr=False)

  @property
  def total(self) -> int:
    """Bytes that it needs in all: arguments, outputs and temporaries."""
    return self.arguments + self.outputs - self.reused + self.temporaries

  @property
  def fits(self) -> bool:
    """True if it compiles, and JAX has that much memory on the target."""
    return not self.error and self.total <= self.device_memory


class CompileReport(NamedTuple):
  """The findings of `compile_report`; print it for a table.

  Attributes:
    steps: the step by target.
    baselines: the baseline by target; empty without one.
    versions: of JAX and of the compilers.
    options: of the compiler, by target.
  """

  steps: Mapping[str, CompiledStep]
  baselines: Mapping[str, CompiledStep]
  versions: Mapping[str, str]
  options: Mapping[str, Mapping[str, object]]

  def __str__(self) -> str:
    columns = dict[str, CompiledStep]()
    lines = []
    for target, step in self.steps.items():
      shown = {target: step}
      if self.baselines:
        shown[f"{target}, baseline"] = self.baselines[target]
      columns |= shown
      for name, x in shown.items():
        lines += _sections(name, x, self.options[target])
    versions = ", ".join(f"{x} {y}" for x, y in self.versions.items())
    return "\n".join(
      ["Compiled, not timed.", versions, *_table(columns), *lines]
    )


def compile_report(
  step: Callable[..., object],
  *args: object,
  targets: str | Sequence[str] = ("h200", "v6e"),
  baseline: Callable[..., object] | tuple[object, ...] | None = None,
  compiler_options: Mapping[str, object] | None = None,
  compilers: str | os.PathLike[str] | None = None,
) -> CompileReport:
  """Compiles a step for targets that are not here, and says what became of it.

  XLA's compilers for NVIDIA GPUs and for TPUs need no such device. So a laptop
  can tell which roundings of a program survive there, in which dtype each
  product runs, how many kernels are launched, and whether it fits the memory.
  Nothing runs: times are not to be had, and kernels are not tuned.

  The compilers are in an environment of their own, for Linux on x86-64, which
  `optax-lossscale doctor --make-compilers FOLDER` makes. A compilation runs in
  another process, and may take minutes.

  Args:
    step: any function that JAX can trace, jitted or not, which may donate its
      arguments.
    *args: its arguments, as arrays or as the shapes and dtypes of arrays
      (`jax.ShapeDtypeStruct`); Python's numbers are constants. Shardings are
      taken along, of a mesh of devices or of a `jax.sharding.AbstractMesh`.
      Bind any keyword-only arguments first, as in
      `functools.partial(train_step, train=True)`.
    targets: the names of devices, in a list or with commas in between: v100,
      t4, a100, h100, h200, b200, v5e, v6e and tpu7x. A TPU may come with its
      size, as in "v5e:16x16".
    baseline: another step to be put beside it, such as the same one without
      loss scaling. A tuple of the step and its arguments if these differ.
    compiler_options: XLA's options by name, as for `jax.jit`.
    compilers: the folder with the compilers; by default the environment
      variable `OPTAX_LOSSSCALE_COMPILERS`, or else this environment.

  Returns:
    The report. Print it, or read its `steps`.

  Raises:
    RuntimeError: if the compilers are not installed.
    TypeError: if `step` is not a function or needs an argument by keyword.
    ValueError: if a target is unknown.

  Examples:
    >>> import optax_lossscale as ols
    >>> ols.instruments.compile_report(abs, 1.0, targets="h300")
    Traceback (most recent call last):
    ...
    ValueError: `targets` must be of v100, t4, a100, h100, h200, b200, ...
  """
  read = compiling.read_targets(targets)
  if not isinstance(compiler_options, Mapping | None):
    raise TypeError(
      "`compiler_options` must be a dict of XLA's options by name, got "
      f"{arguments.shown(compiler_options)}."
    )
  python = compiling.find_python(compilers)
  programs = {"step": _on_arrays(step, args, "step")}
  if baseline is not None:
    given = baseline if isinstance(baseline, tuple) else (baseline, *args)
    other, *its_args = given or (None,)
    programs["baseline"] = _on_arrays(other, its_args, "baseline")
  exported = {
    platform: {name: x.export(platform) for name, x in programs.items()}
    for platform in {x.platform for x in read}
  }
  columns: dict[str, dict[str, CompiledStep]] = {"step": {}, "baseline": {}}
  versions: dict[str, str] = {}
  options = {
    x.name: {**_UNTUNED.get(x.platform, {}), **(compiler_options or {})}
    for x in read
  }
  for target in read:
    versions, found = compiling.compile_for(
      target,
      exported[target.platform],
      python=python,
      options=options[target.name],
    )
    for name, outcome in found.items():
      columns[name][target.name] = read_program(target.name, outcome)
  return CompileReport(columns["step"], columns["baseline"], versions, options)


def read_program(target: str, outcome: compiling.Outcome) -> CompiledStep:
  """Returns what is found in a program, before and after it was compiled."""
  (read,) = compiling.read_targets(target)
  if "error" in outcome:
    return CompiledStep(read.usable_memory, error=outcome["error"])
  sizes = {x: y for x, y in outcome.items() if x not in ("before", "after")}
  asked, program = (
    _compiled_program.parse(outcome[x]) for x in ("before", "after")
  )
  return CompiledStep(
    read.usable_memory,
    **sizes,
    kernels=_compiled_program.kernels(program),
    collectives=_compiled_program.collectives(program),
    conditionals=_compiled_program.conditionals(program),
    products=tuple(
      _compiled_program.products(
        asked,
        program,
        is_tpu=read.platform == "tpu",
        rounding=read.default_precision,
      )
    ),
    hand_written=tuple(_compiled_program.hand_written(program)),
    narrowings=tuple(_narrowings.find(asked, program)),
    text=outcome["after"],
  )


class _Program(NamedTuple):
  """A step on arrays alone, whose containers another process need not know."""

  jitted: jax.stages.Wrapped
  # Of its arguments.
  shapes: Sequence[jax.ShapeDtypeStruct]
  # The positions of the arguments that are donated, and the size and type of
  # each axis of a mesh.
  about: Mapping[str, object]

  def export(self, platform: str) -> compiling.Exported:
    """Returns the step, lowered for a platform and serialized, or an error."""
    try:
      traced = self.jitted.trace(*self.shapes)
      text = traced.lower(lowering_platforms=(platform,)).as_text()
      calls = set(re.findall(r"custom_call @([\w$.]+)", text))
      exported = export.export(
        self.jitted,
        platforms=(platform,),
        # The versions are equal, so unstable calls are safe.
        disabled_checks=[*map(export.DisabledSafetyCheck.custom_call, calls)],
      )(*self.shapes)
      return bytes(exported.serialize()), self.about
    except Exception as error:  # Each platform has its own rules, and errors.
      text = f"{error}".strip() or repr(error)
    if re.search(
      r"(callback|debug_print)\[", f"{self.jitted.trace(*self.shapes).jaxpr}"
    ):
      text = (
        "the step must not call Python, as jax.debug.print and "
        f"ols.instruments.print_loss_scale do; JAX says: {text}"
      )
    return b"", {"error": text}


def _on_arrays(step: object, args: Sequence[object], name: str) -> _Program:
  """Returns a step as a function of the arrays among its arguments."""
  run, named, _ = shared.bind(step, args, "compile_report", name)
  leaves, tree = jax.tree.flatten([*named.values()])
  # Equinox's models also hold strings and functions.
  places = [i for i, x in enumerate(leaves) if interpreter.is_array(x)]
  shapes = [_shape(leaves[i]) for i in places]
  impls = [_key_impl(leaves[i]) for i in places]

  def on_arrays(*arrays: jax.Array) -> list[object]:
    filled = list(leaves)
    for i, impl, x in zip(places, impls, arrays, strict=True):
      filled[i] = jax.random.wrap_key_data(x, impl=impl) if impl else x
    values = jax.tree.unflatten(tree, filled)
    outputs = jax.tree.leaves(run(dict(zip(named, values, strict=True))))
    return [_plain(x) for x in outputs if isinstance(x, jax.Array)]

  jitted = jax.jit(on_arrays)
  donated = []
  try:
    jaxpr = jitted.trace(*shapes).jaxpr.jaxpr
  except ValueError as error:
    if "compiler_options" not in f"{error}":
      raise
    raise ValueError(
      f"`{name}` must not be jitted with compiler_options, since it becomes "
      "part of another program; pass them to compile_report."
    ) from error
  for call in jaxpr.eqns:
    # This is what the jitted step asked for, in whichever wrapper.
    if call.primitive is primitives.jit_p:
      for x, is_donated, sharding in zip(
        call.invars,
        call.params["donated_invars"],
        call.params["in_shardings"],
        strict=True,
      ):
        if x in jaxpr.invars:
          i = jaxpr.invars.index(x)
          donated += [i] * is_donated
          if shapes[i].sharding is None:
            shapes[i] = _sharded(shapes[i], sharding)
  meshes = [x.sharding.mesh for x in shapes if x.sharding is not None]
  axes = {
    name: (mesh.shape[name], kind.name)
    for mesh in meshes[:1]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
  }
  return _Program(jitted, shapes, {"donated": donated, "axes": axes})


def _plain(x: object) -> object:
  """Returns the numbers of a typed key, and other arrays unchanged."""
  return jax.random.key_data(x) if shared.is_key(x) else x


def _key_impl(x: object) -> str | None:
  """Returns how a typed key is made; None for other arrays."""
  found: list[str] = []
  if shared.is_key(x):
    # Only a traced key says it, so that this works for shapes.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), x)
  return found[0] if found else None


def _shape(x: object) -> jax.ShapeDtypeStruct:
  """Returns the shape of an argument as a plain array, and its sharding."""
  return _sharded(jax.eval_shape(_plain, x), getattr(x, "sharding", None))


def _sharded(
  shape: jax.ShapeDtypeStruct, sharding: object
) -> jax.ShapeDtypeStruct:
  """Returns a shape with a sharding, if that is over several devices."""
  if isinstance(sharding, jax.NamedSharding) and sharding.mesh.size > 1:
    return shape.update(sharding=sharding)
  return shape


def _table(columns: Mapping[str, CompiledStep]) -> list[str]:
  """Returns the numbers of steps, one column for each."""
  kinds = sorted({kind for x in columns.values() for kind in x.collectives})
  names = [
    *("arguments, MB", "outputs in new memory, MB", "temporaries, MB"),
    *("in all, MB", "fits the memory", "kernels (TPU: operations)", *kinds),
    "conditionals",
    *("products", "narrowings kept", "narrowings dropped"),
  ]
  if any(y.kept is None for x in columns.values() for y in x.narrowings):
    names.append("narrowings unknown")

  def cells(x: CompiledStep) -> list[str]:
    if x.error:
      is_known = "RESOURCE_EXHAUSTED" in x.error
      none = ["-"] * len(names)
      return [*none[:4], "no" if is_known else "-", *none[5:]]
    fates = [[y.kept for y in x.narrowings].count(z) for z in _FATES]
    sizes = x.arguments, x.outputs - x.reused, x.temporaries, x.total
    found = [x.collectives.get(kind, 0) for kind in kinds]
    found = [x.kernels, *found, x.conditionals, len(x.products), *fates]
    return [
      *(f"{y / 1e6:,.{1 if y < 1e9 else 0}f}" for y in sizes),
      "yes" if x.fits else "no",
      *(f"{y:,}" for y in found),
    ][: len(names)]

  table = [
    ["", *names],
    *([name, *cells(x)] for name, x in columns.items()),
  ]
  return tables.aligned(zip(*table, strict=True), "<" + ">" * len(columns))


def _sections(
  target: str, step: CompiledStep, options: Mapping[str, object]
) -> list[str]:
  """Returns the products by dtype, the wide ones, and dropped narrowings."""
  title = f"{target}, {options}" if options else target
  if step.error:
    return [f"\n{title}: it does not compile: {step.error.splitlines()[0]}"]
  lines = [f"\n{title}"]
  for name, rows in {
    "products": [
      f"{' x '.join(x.operands)} -> {x.result}, {x.through}"
      for x in step.products
    ],
    "products of float32": [
      f"{x.line}  {x.scope}" for x in step.products if "float32" in x.operands
    ],
    "hand-written kernels": step.hand_written,
    "narrowings dropped": [
      f"{x.line}  {x.wide} -> {x.narrow}"
      for x in step.narrowings
      if x.kept is False
    ],
  }.items():
    counts = collections.Counter(rows)
    if not rows and name.startswith("hand"):
      continue  # Most programs have none.
    lines += [f"{name}: {'' if rows else 'none'}".rstrip()]
    lines += [
      f"  {n:,} x {x.strip()}" for x, n in counts.most_common(_MOST_ROWS)
    ]
    if len(counts) > _MOST_ROWS:
      lines += [f"  and {len(counts) - _MOST_ROWS} other lines"]
  return lines
