"""The workloads, by name, in the order of the table."""

from collections.abc import Callable
from collections.abc import Mapping

from benchmarks.truth import workload
from benchmarks.truth.workloads import brier
from benchmarks.truth.workloads import critic
from benchmarks.truth.workloads import diffusion
from benchmarks.truth.workloads import lenet5
from benchmarks.truth.workloads import lstm
from benchmarks.truth.workloads import neural_ode
from benchmarks.truth.workloads import pinn
from benchmarks.truth.workloads import policy_gradient
from benchmarks.truth.workloads import ranking
from benchmarks.truth.workloads import segmentation
from benchmarks.truth.workloads import transformer
from benchmarks.truth.workloads import wgan_gp

WORKLOADS: Mapping[str, Callable[[], workload.Workload]] = {
  module.__name__.rpartition(".")[2]: module.make
  for module in (
    brier,
    transformer,
    lstm,
    ranking,
    neural_ode,
    segmentation,
    policy_gradient,
    diffusion,
    wgan_gp,
    lenet5,
    pinn,
    critic,
  )
}
