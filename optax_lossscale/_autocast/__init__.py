"""Mixed precision for any function."""
