"""The pages of docs/guides do what they say, block by block."""
