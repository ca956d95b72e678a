"""`python -m benchmarks truth`: what loss scaling does to real training."""
