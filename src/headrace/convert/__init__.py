"""From a source checkpoint to a container or a GGUF file: streaming, the same bytes every time."""

from headrace.checkpoint.layout import Recipe
from headrace.convert.gguf import GgufReport, convert_to_gguf
from headrace.convert.gguf_plan import GgufRecipe
from headrace.convert.run import ConvertReport, Progress, convert

__all__ = [
    "ConvertReport",
    "GgufRecipe",
    "GgufReport",
    "Progress",
    "Recipe",
    "convert",
    "convert_to_gguf",
]
