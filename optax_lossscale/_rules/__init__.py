"""The rules that move the loss scale S."""
