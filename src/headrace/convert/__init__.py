"""From a source checkpoint to a container: streaming, resumable, the same bytes every time."""

from headrace.checkpoint.layout import Recipe
from headrace.convert.run import ConvertReport, Progress, convert

__all__ = ["ConvertReport", "Progress", "Recipe", "convert"]
