"""`compile_report` on stored programs, and on compilers that fail."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.instruments import _compile_report
from optax_lossscale.instruments import _compiled_program
from optax_lossscale.instruments import compiling
from tests.instruments import compiled_step

compile_report = ols.instruments.compile_report
LINES = pathlib.Path(compiled_step.__file__).read_text().splitlines()


def number_of(text):
  """Returns where a piece of the stored step's code is."""
  (found,) = (i for i, line in enumerate(LINES, 1) if text in line)
  return f"tests/instruments/compiled_step.py:{found}"


def read(target):
  return _compile_report.read_program(target, compiled_step.load(target))


@pytest.mark.parametrize("target", compiled_step.TARGETS)
def test_a_compiled_program_says_what_became_of_it(target):
  found = read(target)
  through = {"h200": "Triton", "v5e": "the matrix unit"}[target]
  float16, float32 = ("float16",) * 2, ("float32",) * 2
  wide, narrow = number_of("wide = x"), number_of("narrow = x")
  assert sorted(found.products) == [
    (float16, "float32", through, "narrow", narrow),
    (float32, "float32", through, "wide", wide),
  ]
  is_kept = {"h200": False, "v5e": True}[target]
  assert sorted(found.narrowings, key=lambda x: x.line) == [
    ("float32", "float16", True, "narrow", narrow),
    ("float32", "float16", True, "narrow", narrow),
    ("float32", "float16", is_kept, "", number_of("dropped = ")),
    ("float32", "bfloat16", True, "", number_of("kept = ")),
  ]
  assert found.collectives == {"all-reduce": 1}
  assert found.conditionals == 1
  assert found.reused == 4 * 512 * 128  # w is donated.
  assert found.arguments >= 4 * (256 * 512 // 4 + 512 * 128 + 2 * 32 * 64)
  assert found.peak == (
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
  assert row.split() == ["1", "0", "0", "-"]
  assert "h200, {'xla_flag': 1}\n" in text
  line = number_of("dropped = ")
  assert f"narrowings dropped:\n  1 x {line}  float32 -> float16\n" in text
  line = number_of("wide = x")
  assert f"products of float32:\n  1 x {line}  wide\n" in text
  assert "1 x float16 x float16 -> float32, Triton" in text
  failed = {"v5e": _compile_report.CompiledStep(1, "No.\nmore")}
  text = str(report._replace(steps=failed, baselines={}))
  assert "v5e: it does not compile: No." in text
  assert not failed["v5e"].fits


# The program of JAX: the line of each operation is that of its frame.
BEFORE = """\
FileNames
1 "step.py"

FileLocations
1 {file_name_id=1 line=7}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

inner.1 {
  a = f32[8] parameter(0)
  in.1 = f16[8] convert(a), metadata={op_name="inner/cast"}
  ROOT moved = f16[8] reshape(in.1)
}

ENTRY main.1 {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  z = f32[8] parameter(2)
  called = f16[8] call(x), to_apply=inner.1
  back = f32[8] convert(called), metadata={op_name="back"}
  first = f16[8] convert(y), metadata={op_name="first" stack_frame_id=1}
  second = f16[8] convert(y), metadata={op_name="second"}
  summed = f32[8] convert(first), metadata={op_name="summed"}
  taken = f16[8] negate(second)
  third = bf16[8] convert(z), metadata={op_name="third"}
  widened = f32[8] convert(third), metadata={op_name="widened"}
  fourth = f16[8] convert(taken), metadata={op_name="not narrower"}
  ROOT last = bf16[8] convert(summed), metadata={op_name="last"}
}
"""
AFTER = """\
ENTRY %main (y: f32[8]) -> bf16[8] {
  %y = f32[8] parameter(0)
  %w = bf16[8] negate(%y)
  ROOT %b = f32[8] convert(bf16[8]{0} %w), metadata={op_name="jit(f)/widened"}
}
"""


def test_a_narrowing_is_kept_if_anything_takes_narrow_numbers():
  found = _compiled_program.narrowings(
    _compiled_program.parse(BEFORE), _compiled_program.parse(AFTER)
  )
  assert [(x.narrow, x.kept, x.line) for x in found] == [
    ("float16", False, ""),  # Only `back` takes it, past a call and a move.
    ("float16", True, "step.py:7"),  # It is one with the second, below.
    ("float16", True, ""),  # `taken` does not convert it.
    ("bfloat16", True, ""),  # Its widening is still there.
    ("bfloat16", True, ""),  # It is the result.
  ]


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
  %product = (f32[8]{0}, s8[64]{0}) custom-call(%c, /*index=1*/%last), \
custom_call_target="__cublas$lt$matmul$f8"
  %bits = f32[8]{0} bitcast(%last)
  %both = f32[] all-reduce-start(%bits), to_apply=%fused
  %ended = f32[] all-reduce-done(%both)
  ROOT %sum = f32[] reduce(%ended, %zero), dimensions={0}, to_apply=%fused
}
"""


def test_launches_are_counted_in_loops_and_branches():
  program = _compiled_program.parse(PROGRAM)
  # Two of the loop, one of its condition, one in each branch of two, and then
  # an asynchronous copy, a call of a library, a collective and a sum.
  assert _compiled_program.kernels(program) == 2 + 1 + 4 + 4
  assert _compiled_program.collectives(program) == {"all-reduce": 1}
  assert _compiled_program.conditionals(program) == 2
  (product,) = _compiled_program.products(program, is_tpu=False)
  assert product == (("float32", "float32"), "float32", *F8)


F8 = ("cuBLAS in float8", "", "")

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
  assert not out and re.fullmatch(r"Compiling for h200 \.\.\. \d+ s\n", err)


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
  names = "NAMES = 'XLA_FLAGS', 'JAX_PLATFORMS', 'TPU_SKIP_MDS_QUERY'\n"
  expected = str(dict.fromkeys(("XLA_FLAGS",)) | {"JAX_PLATFORMS": "cpu"})[:-1]
  with pytest.raises(RuntimeError, match=re.escape(expected) + ", .*: '1'}"):
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
    "import jax.numpy as jnp, optax_lossscale as ols\n"
    f"ols.instruments.compile_report(jnp.sin, 1., compilers={str(folder)!r})"
  )
  parent = subprocess.Popen([sys.executable, "-c", code])
  pid = folder / "bin/pid"
  until = time.monotonic() + 60
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
  for name in ("h300", "h200:2x2", "cpu", 3):
    with pytest.raises(ValueError, match=r"must be of v100, .* got .*\d|cpu"):
      compile_report(jnp.sin, 1.0, targets=[name])
  with pytest.raises(TypeError, match="`step` must be the train step itself"):
    compile_report(1.0, jnp.sin, targets="h200", compilers=sys.prefix)


def test_compilers_of_another_jax_say_so(monkeypatch):
  monkeypatch.setattr(compiling.metadata, "version", lambda name: "0.1")
  with pytest.raises(
    RuntimeError, match=r"for jax [\d.]+, and jax 0\.1 is here"
  ):
    compile_report(jnp.sin, 1.0, compilers=sys.prefix)
