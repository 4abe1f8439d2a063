"""The loop that turns requests into steps of the model: see `loop.py`. Knows ids, not text."""
