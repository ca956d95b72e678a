"""Drives Paddle's loss scalers, on the CPU.

Recorded with `paddlepaddle` from the package index and NumPy below 2.4, with
which its `GradScaler` raises TypeError when S is to fall.
"""

import contextlib
import io
from unittest import mock


def version():
  import paddle

  return f"paddlepaddle {paddle.__version__}"


class Dygraph:
  """`paddle.amp.GradScaler` around an optimizer, in dynamic graph mode."""

  ORIGINAL = "paddle.amp.GradScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"incr_every_n_steps": 7},
    {
      "init_loss_scaling": 1000.0,
      "incr_ratio": 1.5,
      "decr_ratio": 0.8,
      "incr_every_n_steps": 3,
      "decr_every_n_nan_or_inf": 2,
    },
    # No cap: inf is met, and kept.
    {
      "init_loss_scaling": 2.0**120,
      "incr_ratio": 4.0,
      "decr_ratio": 0.25,
      "incr_every_n_steps": 1,
      "decr_every_n_nan_or_inf": 3,
    },
  )
  EXTRA_SEQUENCES = (
    # No floor: down among the subnormal numbers, up from there, and to 0.
    (
      {"init_loss_scaling": 2.0**-120, "incr_every_n_steps": 1},
      [True] * 20 + [False] * 10 + [True] * 30 + [False] * 10,
    ),
    (
      {"init_loss_scaling": 1000.0, "use_dynamic_loss_scaling": False},
      [True, True, False, False] * 8,
    ),
  )
  version = staticmethod(version)

  def __init__(self, **arguments):
    import paddle
    from paddle.amp import grad_scaler

    # Without an accelerator it switches itself off. It asks its tracer once,
    # on construction; all that it does later is the same everywhere.
    with mock.patch.object(grad_scaler, "_dygraph_tracer") as tracer:
      tracer()._expected_place.is_gpu_place.return_value = True
      self._scaler = paddle.amp.GradScaler(**arguments)
    self._parameter = paddle.create_parameter([1], "float32")
    self._optimizer = paddle.optimizer.SGD(0.0, parameters=[self._parameter])

  def update(self, overflow):
    import paddle

    # The gradient is set and not computed from `scale(loss)`: no loss gives a
    # finite gradient once S is inf.
    self._parameter.grad = paddle.full([1], float("inf") if overflow else 1.0)
    self._scaler.step(self._optimizer)
    with contextlib.redirect_stdout(io.StringIO()):  # It prints each fall.
      self._scaler.update()
    self._optimizer.clear_grad()
    assert bool(self._scaler._cache_found_inf) == overflow

  def scale(self):
    return self._scaler._scale.item()

  def state_dict(self):
    state = self._scaler.state_dict()
    state["scale"] = state["scale"].copy()
    return state

  def load_state_dict(self, state):
    self._scaler.load_state_dict(state)


class StaticGraph:
  """The operator `update_loss_scaling` in a static training program.

  S, and the two counters, are variables of the program; on overflow the
  operator puts zeros in place of the gradients.
  """

  ORIGINAL = "paddle._C_ops.update_loss_scaling_"
  FAILURES = ()
  ARGUMENTS = (
    {
      "init_loss_scaling": 2.0**15,
      "incr_every_n_steps": 7,
      "decr_every_n_nan_or_inf": 2,
      "incr_ratio": 2.0,
      "decr_ratio": 0.8,
    },
    {
      "init_loss_scaling": 1000.0,
      "incr_every_n_steps": 3,
      "decr_every_n_nan_or_inf": 2,
      "incr_ratio": 1.5,
      "decr_ratio": 0.75,
    },
    {
      "init_loss_scaling": 2.0**120,
      "incr_every_n_steps": 1,
      "decr_every_n_nan_or_inf": 1,
      "incr_ratio": 2.0,
      "decr_ratio": 0.5,
    },
    # The top met with a factor that does not divide it.
    {
      "init_loss_scaling": 2.0**120,
      "incr_every_n_steps": 1,
      "decr_every_n_nan_or_inf": 3,
      "incr_ratio": 3.0,
      "decr_ratio": 0.5,
    },
    # Below the lowest S: the first fall raises it.
    {
      "init_loss_scaling": 2.0**-4,
      "incr_every_n_steps": 5,
      "decr_every_n_nan_or_inf": 3,
      "incr_ratio": 4.0,
      "decr_ratio": 0.25,
    },
  )
  version = staticmethod(version)

  def __init__(self, **arguments):
    import paddle

    with self._static():
      self._scope = paddle.static.Scope()
      self._executor = paddle.static.Executor(paddle.CPUPlace())
      self._program = paddle.static.Program()
      startup = paddle.static.Program()
      with (
        # The names of the variables are to be the same in every program.
        paddle.utils.unique_name.guard(),
        paddle.static.program_guard(self._program, startup),
        paddle.amp.auto_cast(dtype="float16"),
      ):
        # The scaler hands its arguments to the decorated optimizer, in whose
        # program the operator then is.
        scaler = paddle.amp.GradScaler(**arguments)
        factor = paddle.static.data("factor", [1], "float32")
        weight = paddle.create_parameter([1], "float32")
        optimizer = paddle.static.amp.decorate(paddle.optimizer.SGD(0.0))
        scaled = scaler.scale((factor * weight).sum())
        scaler.minimize(optimizer, scaled, startup_program=startup)
      names = {op.name() for op in self._program.global_block().ops}
      assert "pd_op.update_loss_scaling_" in names
      with paddle.static.scope_guard(self._scope):
        self._executor.run(startup)

  def update(self, overflow):
    import numpy as np
    import paddle

    factor = np.full([1], np.inf if overflow else 0.0, np.float32)
    with self._static(), paddle.static.scope_guard(self._scope):
      self._executor.run(self._program, feed={"factor": factor})

  def scale(self):
    return self.state_dict()["loss_scaling_0"].item()

  def state_dict(self):
    import numpy as np

    # Of the program's: the learning rate and the parameter are left out, and
    # what is Paddle's own kind of tensor is made an array.
    with self._static():
      saved = self._program.state_dict(scope=self._scope)
    return {
      name: np.array(saved[name])
      for name in ("loss_scaling_0", "num_good_steps_0", "num_bad_steps_0")
    }

  def load_state_dict(self, state):
    import paddle

    saved = {}
    for name, value in state.items():
      saved[name] = paddle.base.core.DenseTensor()
      saved[name].set(value, paddle.CPUPlace())
    with self._static():
      self._program.set_state_dict(saved, self._scope)

  @contextlib.contextmanager
  def _static(self):
    """Turns static graph mode on for a while: `Dygraph` needs the other."""
    import paddle

    paddle.enable_static()
    try:
      yield
    finally:
      paddle.disable_static()


SYSTEMS = {"paddle": Dygraph, "paddle_op": StaticGraph}
