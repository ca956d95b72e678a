"""The pages of docs/recipes do what they say, block by block."""
