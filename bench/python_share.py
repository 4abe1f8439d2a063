"""Share of a decode step spent outside the native core, and where.

    headrace synth qwen3-30b-a3b big --layers 12
    python bench/python_share.py big [--memory 8GiB] [--tokens 64] [--repeat 5]

Every function and method of `headrace._core` is wrapped by two readings of the clock. What lies
between the end of one native call and the start of the next is Python's: it is booked under the
call that follows, so `before linears` is what it took to get there. The wrappers' own cost is
measured on a function that does nothing, and subtracted. A step is one `Stream.advance`: scheduler,
model, sampler, text, counters. A first answer fills memory and is not counted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

from headrace import LLM, ExpertConfig, SamplingParams, _core
from machine import Steal, describe

PROMPT = "The quick brown fox jumps over the lazy dog."


class Clock:
    """Books the time between native calls."""

    def __init__(self) -> None:
        self.python_ns: Counter[str] = Counter()
        self.num_calls = 0
        self.left_ns = perf_counter_ns()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its waiting time before booked under `name`."""

        def timed(*args: Any, **options: Any) -> Any:
            self.python_ns[name] += perf_counter_ns() - self.left_ns
            self.num_calls += 1
            try:
                return call(*args, **options)
            finally:
                self.left_ns = perf_counter_ns()

        return timed

    def reset(self) -> None:
        """Begin a step here."""
        self.python_ns.clear()
        self.num_calls = 0
        self.left_ns = perf_counter_ns()


def wrapper_ns() -> float:
    """What one wrapped call adds to Python's time."""
    clock = Clock()
    empty = clock.wrap("empty", lambda: None)
    samples = []
    for _ in range(200):
        clock.reset()
        for _ in range(100):
            empty()
        samples.append(clock.python_ns["empty"] / 100)
    return median(samples)


def wrap_core(clock: Clock) -> None:
    """Wrap what the native core offers: functions, and methods of its classes."""
    for name, item in list(vars(_core).items()):
        if name.startswith("_"):
            continue
        if isinstance(item, type):
            for method, call in list(vars(item).items()):
                is_context = method in ("__enter__", "__exit__")
                if callable(call) and (is_context or not method.startswith("_")):
                    setattr(item, method, as_method(clock, f"{name}.{method}", call))
        elif callable(item):
            setattr(_core, name, clock.wrap(name, item))


def as_method(clock: Clock, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """As Clock.wrap; a plain function binds to its object as the native method does."""
    return clock.wrap(name, call)


def measure(llm: LLM, clock: Clock, tokens: int, sampling: dict[str, Any]) -> None:
    """Decode one answer and print the medians over its steps."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **sampling)
    overhead = wrapper_ns()
    steps: list[tuple[int, Counter[str], int]] = []
    stream = llm.stream(PROMPT, params)
    stream.advance()  # the prefill
    while not stream.is_finished:
        clock.reset()
        start = perf_counter_ns()
        stream.advance()
        end = perf_counter_ns()
        clock.python_ns["the end of the step"] += end - clock.left_ns
        steps.append((end - start, clock.python_ns.copy(), clock.num_calls))
    names = {name for _, places, _ in steps for name in places}
    step_ms = median(total for total, _, _ in steps) / 1e6
    calls = median(number for _, _, number in steps)
    python_ms = median(places.total() - n * overhead for _, places, n in steps) / 1e6
    print(
        f"{sampling}: step {step_ms:.2f} ms, outside native calls {python_ms:.3f} ms = "
        f"{python_ms / step_ms:.1%} ({calls:.0f} calls, {overhead:.0f} ns each taken off)"
    )
    by_place = {name: median(places[name] for _, places, _ in steps) for name in names}
    for name, ns in sorted(by_place.items(), key=lambda item: -item[1])[:16]:
        print(f"    before {name:<24}{ns / 1e3:8.1f} us")


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(describe())
    with LLM(options.model, memory=options.memory, experts=ExpertConfig(history="off")) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=options.tokens, temperature=0.0))
        clock = Clock()
        wrap_core(clock)
        with Steal() as steal:
            for _ in range(options.repeat):
                measure(llm, clock, options.tokens, {"temperature": 0.0})
            measure(llm, clock, options.tokens, {"temperature": 0.8, "top_p": 0.95})
        print(f"steal {steal.share:.1%}")


if __name__ == "__main__":
    main()
