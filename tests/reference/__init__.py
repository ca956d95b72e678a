"""Plain-Python models, which the tests take as the truth.

A model of a rule has `scale` and `update(overflow)`, or `update(overflow,
amax)`, and shares no code with the library. A float32 is a Python float of the
same value. The double product of two float32 values is exact and their double
quotient is precise enough, so `float32` rounds either to the float32 result.
"""
