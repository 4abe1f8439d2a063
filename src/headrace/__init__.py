"""headrace runs mixture-of-experts language models that are larger than the machine's memory.

from headrace import LLM, SamplingParams

with LLM("demo", memory="1GiB") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64)).text)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import EngineConfig, ExpertConfig, SamplingParams
    from headrace.errors import (
        CheckpointError,
        ConfigError,
        EngineError,
        ExpertReadError,
        MemoryBudgetError,
        NumericError,
        RequestError,
        ShapeError,
        UnsupportedModelError,
    )
    from headrace.llm import LLM, Completion, Score, Stream
    from headrace.metrics import Receipt
    from headrace.plan import MemoryPlan

__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "ExpertConfig",
    "ExpertReadError",
    "MemoryBudgetError",
    "MemoryPlan",
    "NumericError",
    "Receipt",
    "RequestError",
    "SamplingParams",
    "Score",
    "ShapeError",
    "Stream",
    "UnsupportedModelError",
]

_HOMES = {
    "config": ("EngineConfig", "ExpertConfig", "SamplingParams"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "EngineError",
        "ExpertReadError",
        "MemoryBudgetError",
        "NumericError",
        "RequestError",
        "ShapeError",
        "UnsupportedModelError",
    ),
    "llm": ("LLM", "Completion", "Score", "Stream"),
    "metrics": ("Receipt",),
    "plan": ("MemoryPlan",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `headrace --help` need not wait."""
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"headrace.{module}"), name)
    raise AttributeError(f"module `headrace` has no attribute `{name}`")
