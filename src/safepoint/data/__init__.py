"""Where in the input: orders, samplers, loaders and cursors whose position is a number."""
