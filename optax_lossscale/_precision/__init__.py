"""Policies, master weights, and low precision for a part of training."""
