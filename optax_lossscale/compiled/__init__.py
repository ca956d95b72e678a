"""Compiles a step for absent devices, and reports on the result."""

from optax_lossscale.compiled._compile_report import compile_report
from optax_lossscale.compiled._compile_report import CompiledStep
from optax_lossscale.compiled._compile_report import CompileReport

__all__ = [
  "CompileReport",
  "CompiledStep",
  "compile_report",
]
