"""Checkpoints with the shapes of named models and random weights, to measure a machine with.

Routers are made so that expert popularity is skewed and neighbouring tokens share experts, as in
trained models; `model.py` says how, and what was measured.
"""

from headrace.synth.shapes import SHAPES, SynthShape, find_shape
from headrace.synth.write import SynthReport, require_arguments, synthesize

__all__ = ["SHAPES", "SynthReport", "SynthShape", "find_shape", "require_arguments", "synthesize"]
