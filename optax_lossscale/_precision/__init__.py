"""Policies, master weights, and the precision schedule."""
