"""Which settings make a model fastest on this machine: found by short runs, one setting at a time.

Each run is a process of its own, under the same ceiling, and answers the same prompt greedily: the
ids must be those of the first run, or something is broken, and that is an error. Only seconds
count. A gain below 3 % or 50 ms is noise; a larger one must hold again in the reverse order.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config import (
    POLICIES,
    TUNE_MINUTES,
    TUNE_TOKENS,
    EngineConfig,
    SamplingParams,
)
from headrace.errors import ConfigError, EngineError, MemoryBudgetError
from headrace.inspect import open_model
from headrace.llm import LLM, resolve_model
from headrace.metrics import resident_bytes
from headrace.plan import auto_ceiling
from headrace.tuned import (
    Settings,
    Tuned,
    default_path,
    describe_settings,
    is_open,
    machine_identity,
    save_tuned,
    with_settings,
)

_REFUSED = 3  # exit status of a run whose settings cannot be
LEAST_GAIN = 0.03
LEAST_SECONDS = 0.05  # of a run, gained: less is noise whatever its share
PROMPT = (
    "The mill stood where the river bent, and every morning the miller walked along the headrace "
    "to see how high the water was. In spring it came over the boards, brown and quick, and he "
    "opened both gates; in August it was a thread, and he waited for it as one waits for a guest. "
    "What he ground in a day depended on nothing else: not on the stones, which were good, nor on "
    "his arms, which were strong. He wrote the height of the water into a book, and beside it the "
    "number of sacks, and after twenty years he could tell the one from the other without looking."
)


@dataclass(frozen=True)
class Measured:
    """One run of the task."""

    ids: tuple[int, ...]
    prefill_s: float
    decode_s: float
    num_slots: int
    num_records: int
    hit_rate: float
    readers: int
    block_bytes: int
    threads: int
    chunk: int
    policy: str

    @property
    def seconds(self) -> float:
        """What is made small."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Row:
    """One candidate, and what became of it."""

    name: str
    value: int | str
    seconds: float | None  # None: it was refused
    gain: float | None  # against the best so far; 0.1 is a tenth faster
    verdict: str
    is_taken: bool = False


@dataclass(frozen=True)
class Found:
    """What a search found."""

    settings: Settings
    before: Measured
    after: Measured
    rows: tuple[Row, ...]
    is_complete: bool  # False: time was up


Measure = Callable[[Settings], Measured]


def candidates(base: Measured, config: EngineConfig) -> dict[str, list[int | str]]:
    """Values worth a try around what a run without settings used; options given are left alone."""
    cores = os.cpu_count() or 1
    values: dict[str, list[int | str]] = {
        "readers": [base.readers * 2, max(1, base.readers // 2), base.readers * 4],
        "block_bytes": [base.block_bytes * 2, max(4096, base.block_bytes // 2)],
        "read_ahead": [config.experts.read_ahead * 2, max(1, config.experts.read_ahead // 2)],
        "policy": [policy for policy in POLICIES if policy != base.policy],
        "lookahead": [value for value in ("auto", "off") if value != config.experts.lookahead],
        "slots": [base.num_slots * 7 // 8, base.num_slots * 3 // 4],
        "threads": [max(1, cores // 2), cores, max(1, cores - 1), 2 * cores],
        "chunk": [base.chunk * 2, max(1, base.chunk // 2)],
    }
    if base.num_records == 0 or base.num_slots >= base.num_records:
        # Nothing is read again: only computing can be faster.
        values = {name: values[name] for name in ("threads", "chunk")}
    used: dict[str, int | str] = {"threads": base.threads, "chunk": base.chunk}
    values["chunk"] = [v for v in values["chunk"] if isinstance(v, int) and v <= 512]
    return {
        name: [value for value in dict.fromkeys(tried) if value != used.get(name)]
        for name, tried in values.items()
        if is_open(config, name)
    }


def search(
    measure: Measure,
    config: EngineConfig,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Row], None] = lambda _: None,
) -> Found:
    """Try one setting after the other, keeping each that is faster twice.

    Args:
        measure: runs the task with settings.
        config: what the caller fixed.
        seconds: time for all of it; the measurement it ends in is finished.
        clock: seconds.
        progress: sees each row.

    Raises:
        EngineError: a candidate answered with other ids.
    """
    end = clock() + seconds
    measure({})  # the first run reads from the drive what later ones find in memory
    base = best = measure({})
    settings: Settings = {}
    rows: list[Row] = []

    def runs_left() -> Iterator[tuple[str, int | str]]:
        for name, values in candidates(base, config).items():
            for value in values:
                yield name, value

    for name, value in runs_left():
        if clock() >= end:
            return Found(settings, base, best, tuple(rows), is_complete=False)
        row, best_now, candidate = _try(measure, settings, best, base.ids, name, value)
        rows.append(row)
        progress(row)
        if row.is_taken and candidate is not None:
            settings, best = {**settings, name: value}, candidate
        else:
            best = best_now
    return Found(settings, base, best, tuple(rows), is_complete=True)


def _try(
    measure: Measure,
    settings: Settings,
    best: Measured,
    ids: tuple[int, ...],
    name: str,
    value: int | str,
) -> tuple[Row, Measured, Measured | None]:
    """Measure old and new, and if it looks like a gain, new and old.

    Returns:
        The row, the latest measurement of the old settings, and one of the new if it was run.
    """
    wanted = {**settings, name: value}
    try:
        new = _checked(measure(wanted), ids, wanted)
    except ConfigError as error:
        return Row(name, value, None, None, f"refused: {str(error).splitlines()[0]}"), best, None
    gain = best.seconds / new.seconds - 1
    if gain < LEAST_GAIN or best.seconds - new.seconds < LEAST_SECONDS:
        verdict = "slower" if gain < -LEAST_GAIN else "no gain"
        return Row(name, value, new.seconds, gain, verdict), best, new
    again = _checked(measure(wanted), ids, wanted)
    old = _checked(measure(settings), ids, settings)
    reverse = old.seconds / again.seconds - 1
    both = (best.seconds + old.seconds) / (new.seconds + again.seconds) - 1
    is_taken = min(reverse, both) >= LEAST_GAIN and old.seconds - again.seconds >= LEAST_SECONDS
    verdict = "taken" if is_taken else f"not confirmed: {100 * reverse:+.1f} % in reverse order"
    return Row(name, value, again.seconds, both, verdict, is_taken), old, again


def _checked(measured: Measured, ids: tuple[int, ...], settings: Settings) -> Measured:
    if measured.ids != ids:
        at = next(
            (
                i
                for i, pair in enumerate(zip(measured.ids, ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(measured.ids), len(ids)),
        )
        raise EngineError(
            f"a setting changed the answer: {describe_settings(settings)}\n"
            f"token {at}: expected {ids[at : at + 1]}, got {measured.ids[at : at + 1]}\n"
            "hint: no setting may do that; this is a bug in headrace"
        )
    return measured


# Runs in processes of their own


class Runner:
    """Measures a model under one ceiling, each time in a new process."""

    def __init__(self, model: str | Path, config: EngineConfig, tokens: int) -> None:
        self.path = resolve_model(model)
        memory = config.memory
        if memory == "auto":
            memory = auto_ceiling(resident_bytes() or 0)
        self.ceiling_bytes = memory
        experts = replace(
            config.experts, history="off" if config.experts.history == "off" else "read"
        )
        self._config = replace(config, memory=memory, tuned=False, experts=experts)
        self._tokens = tokens

    def __call__(self, settings: Settings) -> Measured:
        """Run the task with settings.

        Raises:
            ConfigError: the settings were refused.
            EngineError: the run failed in any other way.
        """
        config = with_settings(self._config, settings)
        # -P: a checkpoint's folder may hold modules of any name, and may be the working one.
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from headrace.tune import run_task; run_task()"],
            input=pickle.dumps((self.path, config, self._tokens)),
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            kind = ConfigError if done.returncode == _REFUSED else EngineError
            last = lines[-1] if lines else f"the run ended with status {done.returncode}"
            raise kind(json.loads(last) if last.startswith('"') else last)
        measured: Measured = pickle.loads(done.stdout)
        return measured


def run_task() -> None:
    """In the process of one run: read the task from stdin, write what was measured to stdout."""
    path, config, tokens = pickle.loads(sys.stdin.buffer.read())
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        with LLM(path, config) as llm:
            room = max(1, llm.plan.context - tokens)
            result = llm.generate(llm.tokenizer.encode(PROMPT)[:room], params)
            measured = _measured(llm, result)
    except (ConfigError, MemoryBudgetError) as error:
        print(json.dumps(str(error)), file=sys.stderr)  # a line
        sys.exit(_REFUSED)
    except EngineError as error:
        sys.exit(json.dumps(str(error)))
    sys.stdout.buffer.write(pickle.dumps(measured))


def _measured(llm: LLM, result: Any) -> Measured:
    receipt = result.receipt
    return Measured(
        ids=result.ids,
        prefill_s=receipt.prefill_s,
        decode_s=receipt.decode_s,
        num_slots=receipt.num_slots,
        num_records=llm.plan.num_records,
        hit_rate=receipt.expert_hit_rate,
        readers=receipt.readers,
        block_bytes=receipt.block_bytes,
        threads=receipt.threads,
        chunk=llm.plan.chunk,
        policy=llm.store.policy if llm.store is not None else "none",
    )


def tune(
    model: str | Path,
    config: EngineConfig,
    *,
    minutes: float = TUNE_MINUTES,
    tokens: int = TUNE_TOKENS,
    path: Path | None = None,
    progress: Callable[[Row], None] = lambda _: None,
) -> tuple[Found, Mapping[str, Any]]:
    """Search, and keep what was found for this model and machine.

    Args:
        model: a checkpoint.
        config: what is fixed: every field that is not at its default.
        minutes: time for all of it.
        tokens: decoded in each run.
        path: where to keep it; None is the user's cache directory.
        progress: sees each candidate.

    Returns:
        What was found, and `ceiling_bytes`, `machine` and `saved`, the file it is kept in
        (None if time was up before anything was found).

    Raises:
        EngineError: a setting changed the answer, or the model cannot be run.
    """
    runner = Runner(model, config, tokens)
    _, checkpoint = open_model(runner.path, config.experts.drive)
    found = search(runner, config, seconds=60 * minutes, progress=progress)
    machine = machine_identity(checkpoint)
    path = path or default_path(checkpoint.fingerprint)
    tuned = Tuned(
        ceiling_bytes=runner.ceiling_bytes,
        settings=dict(found.settings),
        seconds_before=found.before.seconds,
        seconds_after=found.after.seconds,
        tuned_at=time.time(),
    )
    is_news = bool(found.settings) or found.is_complete  # else an earlier find is worth more
    if is_news:
        save_tuned(path, checkpoint.fingerprint, machine, tuned)
    saved = str(path) if is_news else None
    return found, {"ceiling_bytes": runner.ceiling_bytes, "machine": machine, "saved": saved}
