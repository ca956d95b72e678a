"""Experiments.

This module promises nothing: any version may change or remove its names.
`scale_cotangent` gives a part of a model a loss scale of its own.
"""

from optax_lossscale.experimental._scale_cotangent import scale_cotangent

__all__ = ["scale_cotangent"]
