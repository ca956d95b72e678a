"""The base that every room uses: arguments, leaves, bits, trees."""
