"""What each architecture computes: one file per `model_type`, found through `registry`.

A model says which operations run in which order. It knows nothing of where expert bytes are, of
threads, or of how the rows of a step were chosen.
"""
