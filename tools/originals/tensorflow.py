"""TensorFlow's loss scalers, Keras's, and the managers of Ascend's bridge.

They need three environments:

- `tensorflow`: tensorflow-cpu 2.
- `keras`: keras 3 and torch. Of Keras's backends, torch and NumPy keep the
  subnormal S that the rule gives, while JAX's and TensorFlow's flush it to 0.
- `tf_exponential`, `npu_exponential`, `npu_fixed`: tensorflow 1.15 with
  protobuf < 3.21, on Python 3.7, the syntax of which this package therefore
  keeps to. The last two also need one file of github.com/Ascend/tensorflow at
  commit 0561ecb2340d, whose path the environment variable
  NPU_LOSS_SCALE_MANAGER holds:
  tf_adapter/python/npu_bridge/estimator/npu/npu_loss_scale_manager.py
"""

import importlib.util
import os


class Tensorflow:
  """`update` in eager mode, with a gradient that is finite or not.

  Inside `tf.function` the graph optimizer makes `S / multiplier` a product
  with the reciprocal, another rounding where that is no power of two.
  """

  ORIGINAL = "tf.compat.v1.mixed_precision.DynamicLossScale"
  FAILURES = ()
  ARGUMENTS = (
    {"initial_loss_scale": 2.0**15, "increment_period": 7},
    {"initial_loss_scale": 2.0**120, "increment_period": 1, "multiplier": 16.0},
    {"initial_loss_scale": 8.0, "increment_period": 2},
    {"initial_loss_scale": 2.0**10, "increment_period": 3, "multiplier": 1.5},
    {"initial_loss_scale": 100.0, "increment_period": 5, "multiplier": 3.0},
  )

  @staticmethod
  def version():
    import tensorflow as tf

    return "tensorflow " + tf.__version__

  def __init__(self, **arguments):
    import tensorflow as tf

    self._loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(
      **arguments
    )
    self._gradients = {
      False: [tf.constant(0.0)],
      True: [tf.constant(float("inf"))],
    }

  def update(self, overflow):
    self._loss_scale.update(self._gradients[overflow])

  def scale(self):
    return float(self._loss_scale())

  # The two variables under the names that a `tf.train.Checkpoint` gives them.
  def state_dict(self):
    return {
      name: variable.numpy()
      for name, variable in self._loss_scale._trackable_children().items()
    }

  def load_state_dict(self, state_dict):
    for name, variable in self._loss_scale._trackable_children().items():
      variable.assign(state_dict[name])


class Keras:
  """`apply` on one variable, with a gradient that is finite or not."""

  ORIGINAL = "keras.optimizers.LossScaleOptimizer"
  FAILURES = ()
  ARGUMENTS = (
    {"initial_scale": 2.0**15, "dynamic_growth_steps": 7},
    {"initial_scale": 2.0**120, "dynamic_growth_steps": 1},
    {"initial_scale": 2.0**-120, "dynamic_growth_steps": 2},
  )

  @staticmethod
  def version():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import torch

    if keras.backend.backend() != "torch":
      raise RuntimeError("record Keras with KERAS_BACKEND=torch")
    return f"keras {keras.__version__}, torch {torch.__version__} backend"

  def __init__(self, **arguments):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    self._variables = [keras.Variable(0.0)]
    self._optimizer = keras.optimizers.LossScaleOptimizer(
      keras.optimizers.SGD(0.1), **arguments
    )
    self._optimizer.build(self._variables)
    self._gradients = {
      False: [keras.ops.convert_to_tensor(0.0)],
      True: [keras.ops.convert_to_tensor(float("inf"))],
    }

  def update(self, overflow):
    self._optimizer.apply(self._gradients[overflow], self._variables)

  def scale(self):
    return float(self._optimizer.dynamic_scale)

  # What `model.save` and `save_weights` store of an optimizer: its variables,
  # numbered. 0 and 1 are the wrapper's idle `iteration` and `learning_rate`, 2
  # is `step_counter`, 3 is `dynamic_scale`, the others belong to SGD.
  def state_dict(self):
    store = {}
    self._optimizer.save_own_variables(store)
    return {key: value.copy() for key, value in store.items()}

  def load_state_dict(self, state_dict):
    self._optimizer.load_own_variables(state_dict)


class _Manager:
  """A manager in the `minimize` of TensorFlow 1's own LossScaleOptimizer.

  Ascend's NPULossScaleOptimizer inherits it, and is the same to the manager:
  it only learns of an overflow from the device, where that saturates.
  """

  FAILURES = ()

  def __init__(self, **arguments):
    import tensorflow as tf

    with tf.Graph().as_default():
      self._manager = self._original()(**arguments)
      self._gradient = tf.placeholder(tf.float32, ())
      weight = tf.Variable(0.0, name="weight")
      self._train = tf.contrib.mixed_precision.LossScaleOptimizer(
        tf.train.GradientDescentOptimizer(0.1), self._manager
      ).minimize(weight * self._gradient)
      self._state = {
        variable.op.name: variable
        for variable in tf.global_variables()
        if variable is not weight
      }
      self._session = tf.Session()
      self._session.run(tf.global_variables_initializer())

  def update(self, overflow):
    gradient = float("inf") if overflow else 0.0
    self._session.run(self._train, {self._gradient: gradient})

  def scale(self):
    return float(self._session.run(self._manager.get_loss_scale()))

  # The variables that a `tf.train.Saver` saves of a manager, by their names.
  def state_dict(self):
    return self._session.run(self._state)

  def load_state_dict(self, state_dict):
    for name, variable in self._state.items():
      variable.load(state_dict[name], self._session)


class TfExponential(_Manager):
  ORIGINAL = "tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager"
  ARGUMENTS = (
    {"init_loss_scale": 2.0**15, "incr_every_n_steps": 7},
    # On the way up S meets 3.401e38, finite and yet above Ascend's 3.4e38.
    {
      "init_loss_scale": 3.401e38 / 2**12,
      "incr_every_n_steps": 1,
      "decr_every_n_nan_or_inf": 1,
      "incr_ratio": 4.0,
      "decr_ratio": 0.25,
    },
    {
      "init_loss_scale": 8.0,
      "incr_every_n_steps": 2,
      "decr_every_n_nan_or_inf": 3,
      "decr_ratio": 0.5,
    },
    {
      "init_loss_scale": 1000.0,
      "incr_every_n_steps": 3,
      "incr_ratio": 1.5,
      "decr_ratio": 0.75,
    },
    {
      "init_loss_scale": 100.0,
      "incr_every_n_steps": 5,
      "decr_every_n_nan_or_inf": 1,
      "incr_ratio": 3.0,
      "decr_ratio": 0.1,
    },
  )

  @staticmethod
  def version():
    import tensorflow as tf

    return "tensorflow " + tf.__version__

  @staticmethod
  def _original():
    import tensorflow as tf

    return tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager


def _npu_loss_scale_manager():
  """Returns Ascend's module, which needs no more of npu_bridge than itself."""
  path = os.environ["NPU_LOSS_SCALE_MANAGER"]
  spec = importlib.util.spec_from_file_location("npu_loss_scale_manager", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class _NpuManager(_Manager):
  @staticmethod
  def version():
    import tensorflow as tf

    return "Ascend/tensorflow 0561ecb2340d, tensorflow " + tf.__version__


class NpuExponential(_NpuManager):
  ORIGINAL = (
    "npu_bridge.estimator.npu.npu_loss_scale_manager"
    ".ExponentialUpdateLossScaleManager"
  )
  ARGUMENTS = TfExponential.ARGUMENTS

  @staticmethod
  def _original():
    return _npu_loss_scale_manager().ExponentialUpdateLossScaleManager


class NpuFixed(_NpuManager):
  ORIGINAL = (
    "npu_bridge.estimator.npu.npu_loss_scale_manager.FixedLossScaleManager"
  )
  ARGUMENTS = (
    {"loss_scale": 128.0},
    {"loss_scale": 1000.1, "enable_overflow_check": False},
  )

  @staticmethod
  def _original():
    return _npu_loss_scale_manager().FixedLossScaleManager


SYSTEMS = {
  "tensorflow": Tensorflow,
  "keras": Keras,
  "tf_exponential": TfExponential,
  "npu_exponential": NpuExponential,
  "npu_fixed": NpuFixed,
}
