"""`compile_report` on stored programs, and on compilers that fail."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.compiled import _compile_report
from optax_lossscale.compiled import _compiled_program
from optax_lossscale.compiled import _narrowings
from optax_lossscale.compiled import compiling
from tests.compiled import compiled_step

compile_report = ols.instruments.compile_report
LINES = pathlib.Path(compiled_step.__file__).read_text().splitlines()


def number_of(text):
  """Returns where a piece of the stored step's code is."""
  (found,) = (i for i, line in enumerate(LINES, 1) if text in line)
  return f"tests/compiled/compiled_step.py:{found}"


def read(target):
  return _compile_report.read_program(target, compiled_step.load(target))


@pytest.mark.parametrize("target", compiled_step.TARGETS)
def test_a_compiled_program_says_what_became_of_it(target):
  found = read(target)
  through = {"h200": "Triton", "v5e": "the matrix unit"}[target]
  float16, float32 = ("float16",) * 2, ("float32",) * 2
  wide, narrow = number_of("wide = x"), number_of("narrow = x")
  in_low = {"h200": " in TF32", "v5e": " in bfloat16"}[target]
  assert sorted(found.products, key=lambda x: x.scope) == [
    (float32, "float32", through, "exact", number_of("exact = ")),
    (float16, "float32", through, "narrow", narrow),
    (float32, "float32", "sums", "vector", number_of("vector = ")),
    (float32, "float32", through + in_low, "wide", wide),
  ]
  is_kept = {"h200": False, "v5e": True}[target]
  to_bfloat16 = "float32", "bfloat16"
  assert sorted(found.narrowings, key=lambda x: x.line) == [
    ("float32", "float16", True, "narrow", narrow),
    ("float32", "float16", True, "narrow", narrow),
    ("float32", "float16", is_kept, "", number_of("dropped = ")),
    (*to_bfloat16, True, "", number_of("kept = ")),
    (*to_bfloat16, is_kept, "", number_of("computed_in_float32 = ")),
    # The carry is rounded, but not what is found to be lost.
    (*to_bfloat16, is_kept, "compensated", number_of("rounded = ")),
    (*to_bfloat16, True, "compensated", number_of("compensated, _")),
  ]
  assert found.collectives == {"all-reduce": 1}
  assert found.conditionals == 1
  assert found.reused == 4 * 512 * 128  # w is donated.
  assert found.arguments >= 4 * (256 * 512 // 4 + 512 * 128 + 2 * 32 * 64)
  assert found.total == (
    found.arguments + found.outputs - found.reused + found.temporaries
  )
  assert found.fits and not found.error


def test_the_report_prints_every_number_and_line():
  report = _compile_report.CompileReport(
    {x: read(x) for x in compiled_step.TARGETS},
    {"h200": read("v5e"), "v5e": _compile_report.CompiledStep(1, "No.\nmore")},
    {"jax": "0.12"},
    {"h200": {"xla_flag": 1}, "v5e": {}},
  )
  text = str(report)
  assert text.startswith("Compiled, not timed.\njax 0.12\n")
  row = re.search(r"^narrowings dropped +(.*)", text, re.MULTILINE)[1]
  assert row.split() == ["3", "0", "0", "-"]
  assert "h200, {'xla_flag': 1}\n" in text
  line = number_of("dropped = ")
  assert f"  1 x {line}  float32 -> float16\n" in text
  line = number_of("wide = x")
  assert f"  1 x {line}  wide\n" in text
  assert "1 x float16 x float16 -> float32, Triton" in text
  baseline = text.partition("\nh200, baseline")[2]
  assert "1 x float16 x float16 -> float32, the matrix unit\n" in baseline
  assert "v5e, baseline: it does not compile: No." in text
  fits = re.search(r"^fits the memory +(.*)", text, re.MULTILINE)[1]
  assert fits.split() == ["yes", "yes", "yes", "-"]
  failed = _compile_report.CompiledStep(1, "RESOURCE_EXHAUSTED: 2 bytes")
  text = str(report._replace(steps={"v5e": failed}, baselines={}))
  assert re.search("^fits the memory +no$", text, re.MULTILINE)
  assert not failed.fits


# A program of JAX's, whose operations are numbered, and what XLA made of it.
BEFORE = (
  f"""\
FileNames
1 "step.py"
2 "{sysconfig.get_path("purelib")}/jax/numpy.py"

FileLocations
1 {{file_name_id=1 line=7}}
2 {{file_name_id=2 line=8}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
"""
  + """
inner.1 {
  a = f32[8] parameter(0)
  in.1 = f16[8] convert(a), metadata={op_name="inner/#1" stack_frame_id=2}
  moved = f16[8] reshape(in.1)
  ROOT results = (f16[8], f16[8]) tuple(moved, moved)
}

body.1 {
  state = (s32[], f16[8]) parameter(0)
  seen = f16[8] get-tuple-element(state), index=1
  wide = f32[8] convert(seen), metadata={op_name="#40"}
  tangent = f32[8] tan(wide), metadata={op_name="#41"}
  next = f16[8] convert(tangent), metadata={op_name="in a loop/#42"}
  ROOT out = (s32[], f16[8]) tuple(seen, next)
}

branch.1 {
  given = f32[8] parameter(0)
  ROOT arc = f32[8] atan(given), metadata={op_name="#43"}
}

ENTRY main.1 {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  results = (f16[8], f16[8]) call(x), to_apply=inner.1, \
metadata={op_name="outer/jit(f)"}
  of_call = f16[8] get-tuple-element(results), index=1
  back = f32[8] convert(of_call), metadata={op_name="back#2"}
  first = f16[8] convert(y), metadata={op_name="merged/#3"}
  first_wide = f32[8] convert(first), metadata={op_name="#4"}
  second = f16[8] convert(y), metadata={op_name="merged/#5"}
  second_wide = f32[8] convert(second), metadata={op_name="#6"}
  both = f32[8] add(first_wide, second_wide), metadata={op_name="#7"}
  third = bf16[8] convert(both), metadata={op_name="one use of two/#8"}
  negated = bf16[8] negate(third), metadata={op_name="#9"}
  third_wide = f32[8] convert(third), metadata={op_name="#10"}
  doubled = f32[8] multiply(third_wide, x), metadata={op_name="#11"}
  dot = f32[8] dot(doubled, negated), metadata={op_name="#14"}
  fourth = f16[8] convert(doubled), metadata={op_name="carried/#22"}
  carry = (s32[], f16[8]) tuple(x, fourth)
  loop = (s32[], f16[8]) while(carry), condition=body.1, body=body.1
  last = f16[8] get-tuple-element(loop), index=1
  given = f16[8] convert(negated), metadata={op_name="in a branch/#44"}
  given_wide = f32[8] convert(given), metadata={op_name="#45"}
  arc = f32[8] conditional(x, given_wide), branch_computations={branch.1}
  same = f16[8] convert(last), metadata={op_name="not narrower"}
  fifth = bf16[8] convert(dot), metadata={op_name="other kernel/#24"}
  fifth_wide = f32[8] convert(fifth), metadata={op_name="#25"}
  root = f32[8] sqrt(fifth_wide), metadata={op_name="#26"}
  sixth = f16[8] convert(both), metadata={op_name="summed/#27"}
  seventh = f16[8] convert(root), metadata={op_name="one operand/#28"}
  sums = f16[8] dot(sixth, sixth), metadata={op_name="#29"}
  product = f16[8] dot(seventh, sixth), metadata={op_name="#30"}
  eighth = f16[8] convert(x), metadata={op_name="a result/#34"}
  result = f32[8] convert(eighth), metadata={op_name="#35"}
  ROOT out = (f32[8], f16[8], f16[8], f32[8]) tuple(back, same, last, root, \
sums, product, result)
}
"""
)
AFTER = """\
%kernel (p: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8] parameter(0)
  %n = bf16[8] convert(%p)
  %w = f32[8] convert(%n)
  ROOT %t = (f32[8], f32[8]) tuple(%p, %w)
}

%body (state: (f32[8])) -> (f32[8]) {
  %state = (f32[8]) parameter(0)
  %seen = f32[8] get-tuple-element(%state), index=0
  %tan = f32[8] tan(%seen), metadata={op_name="f/#41"}
  ROOT %t = (f32[8]) tuple(%tan)
}

%branch (given: f32[8]) -> f32[8] {
  %given = f32[8] parameter(0)
  ROOT %arc = f32[8] atan(%given), metadata={op_name="f/#43"}
}

%next (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  ROOT %r = f32[8] sqrt(%q), metadata={op_name="f/#26"}
}

ENTRY %main (x: f32[8], y: f32[8]) -> (f32[8], f16[8], f16[8], f32[8]) {
  %x = f32[8] parameter(0)
  %y = f32[8] parameter(1)
  %x16 = f16[8] convert(%x)
  %back = f32[8] convert(%x16), metadata={op_name="f/#2"}
  %y16 = f16[8] convert(%y), metadata={op_name="f/merged/#3"}
  %y32 = f32[8] convert(%y16), metadata={op_name="f/#4"}
  %both = f32[8] add(%y32, %y32)
  %third = bf16[8] convert(%both), metadata={op_name="f/one use of two/#8"}
  %negated = bf16[8] negate(%third), metadata={op_name="f/#9"}
  %doubled = f32[8] multiply(%both, %x), metadata={op_name="f/#11"}
  %dot = f32[8] custom-call(%doubled, %negated), metadata={op_name="f/#14"}
  %kernels = (f32[8], f32[8]) fusion(%dot), calls=%kernel
  %fourth = f16[8] convert(%doubled)
  %carried = f32[8] convert(%fourth)
  %carry = (f32[8]) tuple(%carried)
  %loop = (f32[8]) while(%carry), condition=%body, body=%body
  %wide = f32[8] get-tuple-element(%loop), index=0
  %last = f16[8] convert(%wide)
  %arc = f32[8] conditional(%y, %negated), branch_computations={%branch}
  %fifth = f32[8] get-tuple-element(%kernels), index=1
  %root = f32[8] fusion(%fifth), calls=%next
  %sixth = f16[8] convert(%both), metadata={op_name="f/summed/#27"}
  %sum = f32[8] multiply(%sixth, %sixth)
  %sums = f16[8] convert(%sum), metadata={op_name="f/#29"}
  %product = f16[8] custom-call(%root, %sixth), metadata={op_name="f/#30"}
  %z16 = f16[8] convert(%x), metadata={op_name="f/a result/#34"}
  ROOT %out = (f32[8], f16[8], /*index=2*/f16[8], f32[8]) \
tuple(%back, %last, /*index=2*/%last, %root, %sums, %product, %x)
}
"""


def test_a_narrowing_is_kept_if_all_that_use_it_get_rounded_numbers():
  found = _narrowings.find(
    _compiled_program.parse(BEFORE), _compiled_program.parse(AFTER)
  )
  assert [(x.scope, x.narrow, x.kept, x.line) for x in found] == [
    ("outer/inner", "float16", True, "step.py:7"),  # The line is the user's.
    ("in a loop", "float16", True, ""),
    ("merged", "float16", True, ""),
    ("merged", "float16", True, ""),
    ("one use of two", "bfloat16", False, ""),
    ("carried", "float16", True, ""),
    ("in a branch", "float16", False, ""),
    ("other kernel", "bfloat16", True, ""),
    ("summed", "float16", True, ""),
    # Either its operands are exchanged, or one is not rounded.
    ("one operand", "float16", None, ""),
    ("a result", "float16", False, ""),  # The result is x.
  ]


CAST = 'n = f16[8] convert(x), metadata={op_name="#1"}'
ROOT = 'ROOT r = f32[8] sqrt({}), metadata={{op_name="#3"}}'
WIDE = "w = f32[8] convert(n)"
DOT = 'ROOT d = f32[8] dot({}, {}), metadata={{op_name="#3"}}'
PAIRS = {
  "the only result": (
    [CAST, f"ROOT {WIDE}"],
    ["ROOT s = f32[8] copy(x)"],
    False,
  ),
  "a constant": (
    [CAST, "k = f16[8] constant(3)", DOT.format("n", "k")],
    ["k = f16[8] constant(3)", "w = f32[8] convert(k)", DOT.format("x", "w")],
    False,
  ),
  "another rounding": (
    [CAST, WIDE, ROOT.format("w")],
    [
      "p = f32[8] reduce-precision(x), exponent_bits=8, mantissa_bits=7",
      ROOT.format("p"),
    ],
    False,
  ),
  "the same rounding": (
    [CAST, WIDE, ROOT.format("w")],
    [
      "p = f32[8] reduce-precision(x), exponent_bits=5, mantissa_bits=10",
      ROOT.format("p"),
    ],
    True,
  ),
  "exchanged operands": (
    [CAST, WIDE, DOT.format("w", "x")],
    [CAST, DOT.format("x", "n")],
    True,
  ),
  "less range": (
    ["b = bf16[8] parameter(1)", CAST.replace("x", "b"), ROOT.format("n")],
    ["b = bf16[8] parameter(1)", ROOT.format("b")],
    False,
  ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_a_use_takes_decides(pair):
  *programs, kept = PAIRS[pair]
  before, after = (
    _compiled_program.parse(
      "\n  ".join(["ENTRY main {", "x = f32[8] parameter(0)", *lines])
    )
    for lines in programs
  )
  (found,) = _narrowings.find(before, after)
  assert found.kept is kept


# Shortened from programs for a GPU and a TPU.
PROGRAM = """\
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %p.2 = f32[8]{0} add(%p, %p)
}

%body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %x = f32[8]{0} get-tuple-element(%p.1), index=1
  %i.2 = s32[] copy(%i)
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %pair = (s32[], f32[8]{0}) tuple(%i.2, %y)
}

%condition (p.3: (s32[], f32[8])) -> pred[] {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%p.3), index=0
  ROOT %more = pred[] fusion(%j), kind=kLoop, calls=%fused
}

ENTRY %main (x.1: f32[8]) -> f32[] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (f32[8]{0}, u32[]) copy-start(%x.1)
  %done = f32[8]{0} copy-done(%start)
  %first = (s32[], f32[8]{0}) tuple(%zero, /*index=1*/%done)
  %loop = (s32[], f32[8]{0}) while(%first), condition=%condition, body=%body
  %last = f32[8]{0} get-tuple-element(%loop), index=1
  %b = f32[8] conditional(%zero, %x.1), branch_computations={%fused, %fused}
  %c = f32[8] conditional(%zero, %b, %b), true_computation=%fused, \
false_computation=%fused
  %c8 = f8e4m3fn[8]{0} convert(%c)
  %l8 = f8e5m2[8]{0} convert(%last)
  %product = (f32[8]{0}, s8[64]{0}) custom-call(%c8, /*index=1*/%l8), \
custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="f/#5"}
  %bits = f32[8]{0} bitcast(%last)
  %both = f32[] all-reduce-start(%bits), to_apply=%fused
  %ended = f32[] all-reduce-done(%both)
  %sums = f32[] reduce(%ended, %zero), to_apply=%fused, \
metadata={op_name="f/#6"}
  %new = f32[8]{0} dot(%bits, %bits)
  %low = f32[8]{0} dot(%bits, %bits), algorithm=dot_bf16_bf16_f32
  %high = f32[8]{0} custom-call(%bits, %bits), \
custom_call_target="__cublas$gemm", backend_config={operand_precision:["HIGH"]}
  %other = f32[8]{0} dot(%bits, %bits), operand_precision={high,high}
  %narrow = bf16[8]{0} convert(%bits)
  ROOT %own = f32[8]{0} dot(%narrow, %narrow), metadata={op_name="f/#7"}
}
"""


def test_launches_are_counted_in_loops_and_branches():
  program = _compiled_program.parse(PROGRAM)
  # Two of the loop, one of its condition, one in each branch of two, and then
  # a copy, three casts, two library calls, a collective, a sum, four products.
  assert _compiled_program.kernels(program) == 2 + 1 + 4 + 3 + 3 + 6
  assert _compiled_program.collectives(program) == {"all-reduce": 1}
  assert _compiled_program.conditionals(program) == 2
  asked = _compiled_program.parse(ASKED)
  products = _compiled_program.products(
    asked, program, is_tpu=False, rounding="TF32"
  )
  # The second is made of sums, and the third was not there before.
  assert products[:3] == [
    (("float8_e4m3fn", "float8_e5m2"), "float32", *F8),
    (("bfloat16", "bfloat16"), "float32", "sums", "f", ""),
    (("float32", "float32"), "float32", "a fusion in TF32", "", ""),
  ]
  assert [x.through for x in products[3:6]] == [
    *("a fusion by dot_bf16_bf16_f32", "cuBLAS in TF32", "a fusion"),
  ]
  # A TPU converts float32 operands to bfloat16 itself.
  *_, last = _compiled_program.products(
    asked, program, is_tpu=True, rounding="bfloat16"
  )
  assert last == (
    *(("float32",) * 2, "float32", "the matrix unit in bfloat16", "f", ""),
  )


ASKED = """\
ENTRY main.1 {
  x = bf16[8] parameter(0)
  dot = f32[8] dot(x, x), metadata={op_name="#5"}
  other = f32[8] dot(x, x), metadata={op_name="#6"}
  y = f32[8] parameter(1)
  ROOT own = f32[8] dot(y, y), metadata={op_name="#7"}
}
"""
F8 = ("cuBLAS in float8", "f", "")

# An environment's Python runs this in the place of the compilers.
CHILD = f"""\
#!{sys.executable}
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[-1])
job = json.loads(path.read_text())
pathlib.Path(__file__).with_name("job").write_text(json.dumps(job))
print("E0000 a warning of a library", file=sys.stderr)
"""
VERSIONS = {"jax": "1"}


@pytest.fixture
def compilers(tmp_path):
  """Returns a function that makes compilers of Python code."""

  def make(code):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(CHILD + code)
    python.chmod(0o755)
    return tmp_path

  return make


def answering(**found):
  return (
    f"path.write_text({json.dumps({'versions': VERSIONS, 'found': found})!r})"
  )


def test_what_compilers_say_is_in_the_report(compilers, capfd):
  stored = compiled_step.load("h200")
  folder = compilers(answering(step=stored, baseline={"error": "Too large."}))
  key = jax.eval_shape(lambda: jax.random.key(0))
  donating = jax.jit(
    lambda flag, x, key: jax.random.normal(key, x.shape) * x if flag else x,
    donate_argnums=1,
    static_argnums=0,
  )
  report = compile_report(
    donating,
    *(True, jnp.ones(3), key),
    targets="h200",
    baseline=compiled_step.program(),
    compiler_options={"xla_flag": 2},
    compilers=folder,
  )
  assert report.steps["h200"] == read("h200")
  assert report.baselines["h200"].error == "Too large."
  assert report.versions == VERSIONS
  job = json.loads((folder / "bin/job").read_text())
  options = {"xla_gpu_autotune_level": 0, "xla_flag": 2}
  assert job["options"] == options == report.options["h200"]
  programs = job["programs"]
  assert programs["step"]["donated"] == [0]  # Of the arrays.
  assert programs["step"]["axes"] == {}
  assert programs["baseline"]["axes"] == {"data": [4, "Auto"]}
  # The warnings of libraries are not shown.
  out, err = capfd.readouterr()
  assert not out and re.fullmatch(
    r"Compiling the step and baseline for h200 \.\.\. \d+ s\n", err
  )


def test_whatever_wraps_a_jitted_step_its_donation_and_shardings_count(
  compilers,
):
  explicit = (jax.sharding.AxisType.Explicit,)
  mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=explicit)
  shared = jax.NamedSharding(mesh, jax.P("data"))
  jitted = jax.jit(
    lambda scale, x, y: (x * scale + y, y),
    static_argnums=0,
    donate_argnums=2,
    in_shardings=(shared, None),
  )
  x = jax.ShapeDtypeStruct((4,), jnp.float32)
  folder = compilers(answering())
  step = functools.partial(jitted, 3)
  compile_report(step, x, x, targets="h200", compilers=folder)
  job = json.loads((folder / "bin/job").read_text())
  assert job["programs"]["step"]["donated"] == [1]
  assert job["programs"]["step"]["axes"] == {"data": [2, "Explicit"]}


def test_a_step_that_calls_python_is_an_error_of_its_own(compilers, tmp_path):
  def step(x):
    jax.debug.print("{}", x)
    return x

  report = compile_report(
    step,
    1.5,
    targets="h200,v5e",
    baseline=(jnp.sin, jnp.ones(2)),
    compilers=compilers(answering(baseline=compiled_step.load("h200"))),
  )
  job = json.loads((tmp_path / "bin/job").read_text())
  assert [*job["programs"]] == ["baseline"]
  for target in ("h200", "v5e"):
    assert "must not call Python, as jax.debug." in report.steps[target].error
    assert not report.baselines[target].error


def test_a_compiler_that_crashes_is_an_error_of_its_target(compilers):
  code = f"{answering()}\nsys.exit('Check failed: x > 0')"
  report = compile_report(
    jnp.sin, 1.0, targets=("t4", "v6e"), compilers=compilers(code)
  )
  for step in report.steps.values():
    assert step.error == (
      "the compiler ended with status 1: Check failed: x > 0"
    )


def test_settings_of_the_user_do_not_reach_the_compilers(
  compilers, monkeypatch
):
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  code = "import os\nsys.exit(str({k: os.environ.get(k) for k in NAMES}))"
  names = (
    "NAMES = 'XLA_FLAGS', 'JAX_PLATFORMS', 'JAX_ENABLE_X64', "
    "'TPU_SKIP_MDS_QUERY'\n"
  )
  expected = str(dict.fromkeys(("XLA_FLAGS",)) | {"JAX_PLATFORMS": "cpu"})[:-1]
  with pytest.raises(RuntimeError, match=re.escape(expected) + ", .*: '1'}"):
    compile_report(jnp.sin, 1.0, compilers=compilers(names + code))
  with jax.enable_x64(True), pytest.raises(RuntimeError, match="X64': 'True'"):
    compile_report(jnp.sin, 1.0, compilers=compilers(names + code))


def test_compilers_that_do_not_start_are_an_error(compilers):
  folder = compilers("sys.exit('ImportError: no libtpu')")
  with pytest.raises(RuntimeError, match="must start, got: ImportError: no"):
    compile_report(jnp.sin, 1.0, compilers=folder)


@pytest.mark.slow
def test_an_interrupt_ends_the_compiler(compilers, tmp_path):
  folder = compilers(
    "import os\n"
    "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
    "time.sleep(600)"
  )
  code = (
    "import signal, jax.numpy as jnp, optax_lossscale as ols\n"
    # A program in the background of a shell ignores interrupts.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    f"ols.instruments.compile_report(jnp.sin, 1., compilers={str(folder)!r})"
  )
  parent = subprocess.Popen([sys.executable, "-c", code])
  pid = folder / "bin/pid"
  until = time.monotonic() + 120
  while not (pid.exists() and pid.read_text()):
    assert time.monotonic() < until
    time.sleep(0.05)
  # A notebook's interrupt reaches only the parent, its kernel.
  parent.send_signal(signal.SIGINT)
  assert parent.wait(60) != 0
  with pytest.raises(ProcessLookupError):
    os.kill(int(pid.read_text()), 0)


def test_the_compilers_and_the_target_must_be_known(tmp_path, monkeypatch):
  monkeypatch.delenv("OPTAX_LOSSSCALE_COMPILERS", raising=False)
  with pytest.raises(
    RuntimeError, match="is not set; run `optax-lossscale doc"
  ):
    compile_report(jnp.sin, 1.0)
  monkeypatch.setenv("OPTAX_LOSSSCALE_COMPILERS", str(tmp_path))
  with pytest.raises(RuntimeError, match=f"installed, got '{tmp_path}'"):
    compile_report(jnp.sin, 1.0)
  monkeypatch.setenv("OPTAX_LOSSSCALE_COMPILERS", sys.prefix)
  for wrong in ("h300", "v5e,h200:2x2", ["v5e:foo"], "cpu", "", (), None, 3):
    with pytest.raises(ValueError, match=r"must be of v100, .*, got "):
      compile_report(jnp.sin, 1.0, targets=wrong)
  with pytest.raises(TypeError, match=r"`compiler_options` .* got 'xla_flag'"):
    compile_report(jnp.sin, 1.0, compiler_options="xla_flag")
  own = jax.jit(jnp.sin, compiler_options={"xla_cpu_enable_fast_math": False})
  with pytest.raises(
    ValueError, match="`step` must not .* pass them to compile"
  ):
    compile_report(own, 1.0)
  for wrong in (3, ()):
    with pytest.raises(TypeError, match="`baseline` must be the train step"):
      compile_report(jnp.sin, 1.0, baseline=wrong)
  with pytest.raises(TypeError, match="`step` must be the train step itself"):
    compile_report(1.0, jnp.sin, targets="h200", compilers=sys.prefix)


def test_memory_and_precision_are_what_jax_takes_by_default():
  found = {x.name: x for x in compiling.read_targets("v100, a100,v5e:4x4")}
  assert found["v100"].usable_memory == 0.75 * 16_935_682_048
  assert found["v5e:4x4"].usable_memory == 15.75 * 2**30
  precisions = [x.default_precision for x in found.values()]
  assert precisions == ["", "TF32", "bfloat16"]


def test_compilers_must_be_whole(compilers, monkeypatch):
  monkeypatch.setitem(sys.modules, "flatbuffers", None)
  with pytest.raises(RuntimeError, match="without flatbuffers; make them"):
    compile_report(jnp.sin, 1.0, compilers=compilers(""))


def test_compilers_of_another_jax_say_so(monkeypatch):
  monkeypatch.setattr(compiling.metadata, "version", lambda name: "0.1")
  with pytest.raises(
    RuntimeError, match=r"for jax [\d.]+, and jax 0\.1 is here"
  ):
    compile_report(jnp.sin, 1.0, compilers=sys.prefix)
