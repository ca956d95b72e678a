"""Drives MindSpore's loss scalers, on the CPU and without graph mode.

Recorded with `mindspore` from the package index and NumPy below 2, for which
it is compiled.
"""

import pathlib
import tempfile


def version():
  import mindspore

  return f"mindspore {mindspore.__version__}"


class Manager:
  """`DynamicLossScaleManager`: a Python number, moved on the host."""

  ORIGINAL = "mindspore.amp.DynamicLossScaleManager"
  FAILURES = (RuntimeError,)
  ARGUMENTS = (
    {"init_loss_scale": 2.0**24, "scale_factor": 2, "scale_window": 7},
    {"init_loss_scale": 2.0**10, "scale_factor": 4, "scale_window": 2},
    {"init_loss_scale": 1000.0, "scale_factor": 3, "scale_window": 3},
    # Documented as an integer, but a fraction is taken.
    {"init_loss_scale": 2.0**15, "scale_factor": 1.5, "scale_window": 5},
  )
  EXTRA_SEQUENCES = (
    # It gives up at the 1001st overflow in a row.
    ({"init_loss_scale": 2.0**24}, [True] * 1005),
    # One clean step starts that count again.
    ({"scale_window": 1}, [True] * 1000 + [False] + [True] * 1005),
    # A Python float: it goes on where float32 ends.
    (
      {"init_loss_scale": 2.0**120, "scale_window": 1},
      ([False] * 20 + [True] * 5) * 2,
    ),
  )
  version = staticmethod(version)

  def __init__(self, **arguments):
    from mindspore import amp

    self._manager = amp.DynamicLossScaleManager(**arguments)

  def update(self, overflow):
    self._manager.update_loss_scale(overflow)

  def scale(self):
    return float(self._manager.get_loss_scale())

  def state_dict(self):
    # MindSpore saves nothing of it. These are its attributes, as in a pickle.
    return dict(vars(self._manager))

  def load_state_dict(self, state):
    vars(self._manager).update(state)


class FixedManager(Manager):
  """`FixedLossScaleManager`, asked as `Model.train` asks it."""

  ORIGINAL = "mindspore.amp.FixedLossScaleManager"
  FAILURES = ()
  ARGUMENTS = (
    {},
    {"loss_scale": 1.0, "drop_overflow_update": False},
  )

  def __init__(self, **arguments):
    from mindspore import amp

    self._manager = amp.FixedLossScaleManager(**arguments)

  def update(self, overflow):
    if self._manager.get_drop_overflow_update():
      self._manager.update_loss_scale(overflow)


class Scaler:
  """`mindspore.amp.DynamicLossScaler`: S and the counter are parameters."""

  ORIGINAL = "mindspore.amp.DynamicLossScaler"
  FAILURES = ()
  ARGUMENTS = (
    {"scale_value": 2.0**15, "scale_factor": 2, "scale_window": 7},
    {"scale_value": 1000.0, "scale_factor": 3, "scale_window": 3},
    {"scale_value": 2.0**120, "scale_factor": 2, "scale_window": 1},
    # The top met with a factor that does not divide it.
    {"scale_value": 2.0**120, "scale_factor": 5, "scale_window": 2},
  )
  version = staticmethod(version)

  def __init__(self, **arguments):
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    self._scaler = mindspore.amp.DynamicLossScaler(**arguments)

  def update(self, overflow):
    import mindspore

    self._scaler.adjust(mindspore.Tensor(not overflow))

  def scale(self):
    return self._scaler.scale_value.asnumpy().item()

  def state_dict(self):
    # A network's checkpoint does not hold them, since the scaler is no cell:
    # these are its parameters, by their names.
    return {
      parameter.name: parameter.asnumpy().copy()
      for parameter in (self._scaler.scale_value, self._scaler.counter)
    }

  def load_state_dict(self, state):
    import mindspore

    for parameter in (self._scaler.scale_value, self._scaler.counter):
      parameter.set_data(mindspore.Tensor(state[parameter.name]))


class Cell:
  """`DynamicLossScaleUpdateCell` in the cell that trains one step.

  That cell holds S. A whole step of it is not possible here, as it reads the
  overflow from a register that a CPU lacks: it is told of the overflow by the
  method that it offers to training cells of one's own.
  """

  ORIGINAL = "mindspore.nn.DynamicLossScaleUpdateCell"
  FAILURES = ()
  ARGUMENTS = (
    {"loss_scale_value": 2.0**15, "scale_factor": 2, "scale_window": 7},
    {"loss_scale_value": 1000.0, "scale_factor": 3, "scale_window": 3},
    # Documented as an integer, but a fraction is taken.
    {"loss_scale_value": 2.0**15, "scale_factor": 1.5, "scale_window": 4},
    {"loss_scale_value": 2.0**120, "scale_factor": 2, "scale_window": 1},
    # Below the lowest S: the first overflow raises it.
    {"loss_scale_value": 2.0**-4, "scale_factor": 2, "scale_window": 5},
  )
  version = staticmethod(version)

  # Of all that a checkpoint holds: what the update reads and writes.
  _STATE = (
    "scale_sense",
    "current_iterator_step",
    "last_overflow_iterator_step",
  )

  def __init__(self, **arguments):
    import mindspore
    from mindspore import nn

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    network = nn.Dense(1, 1)
    self._training = nn.TrainOneStepWithLossScaleCell(
      network,
      nn.SGD(network.trainable_params()),
      scale_sense=nn.DynamicLossScaleUpdateCell(**arguments),
    )

  def update(self, overflow):
    import mindspore

    self._training.process_loss_scale(mindspore.Tensor(overflow))

  def scale(self):
    return self._training.scale_sense.asnumpy().item()

  def state_dict(self):
    import mindspore

    with tempfile.TemporaryDirectory() as folder:
      path = str(pathlib.Path(folder) / "training.ckpt")
      mindspore.save_checkpoint(self._training, path)
      saved = mindspore.load_checkpoint(path)
    return {name: saved[name].asnumpy().copy() for name in self._STATE}

  def load_state_dict(self, state):
    import mindspore

    saved = self._training.parameters_dict()
    for name, value in state.items():
      saved[name] = mindspore.Parameter(mindspore.Tensor(value), name=name)
    mindspore.load_param_into_net(self._training, saved)


SYSTEMS = {
  "mindspore": Manager,
  "mindspore_fixed": FixedManager,
  "mindspore_amp": Scaler,
  "mindspore_cell": Cell,
}
