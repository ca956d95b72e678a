"""This library and its peers, side by side in one run."""
