"""The base that every package uses: arguments, leaves, bits."""
