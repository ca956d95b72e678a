"""What every room stands on: arguments, leaves, bits, trees."""
