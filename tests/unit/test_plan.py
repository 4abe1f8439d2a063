from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.report import _plan_lines
from headrace.config import EngineConfig
from headrace.errors import ConfigError, MemoryBudgetError
from headrace.plan import MemoryPlan, ModelSizes, auto_ceiling, make_plan, mib_up, work_bytes

MIB = 1 << 20

# The shape of qwen3-30b-a3b with 12 layers, 4-bit experts and 8-bit dense weights.
BIG = ModelSizes(
    hidden_size=2048,
    q_size=4096,
    kv_size=512,
    vocab_size=151936,
    intermediate_size=0,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_moe_layers=12,
    max_context=40960,
    dense_bytes=570 * MIB,
    embedding_bytes=594 * MIB,
    kv_bytes_per_token=12 * 2 * 512 * 2,
    num_records=12 * 128,
    record_bytes=2654208,
    record_read_bytes=2654208,
    reader_bytes=0,
    tokenizer_bytes=70 * MIB,
)
DENSE = replace(
    BIG, num_moe_layers=0, num_experts_per_tok=0, num_records=0, record_bytes=0,
    record_read_bytes=0, intermediate_size=6144,
)  # fmt: skip


def plan(memory: int, sizes: ModelSizes = BIG, **options: Any) -> MemoryPlan:
    return make_plan(sizes, EngineConfig(memory=memory, **options), memory, num_threads=2)


def test_the_acceptance_budget_holds_plenty_of_slots() -> None:
    made = plan(1536 * MIB, context=4096)
    assert made.embedding == "drive"
    assert made.num_slots > 2 * made.working_set_records
    assert made.working_set_records == 96
    assert made.chunk >= 256
    assert made.cold_bytes_per_token == 96 * 2654208
    assert made.notes == ()


@settings(max_examples=200, deadline=None)
@given(
    memory=st.integers(300 * MIB, 8000 * MIB),
    context=st.integers(2, 40960),
    sequences=st.integers(1, 8),
    chunk=st.one_of(st.just("auto"), st.integers(1, 600)),
    embedding=st.sampled_from(["auto", "resident", "drive"]),
    sizes=st.sampled_from([BIG, DENSE]),
)
def test_the_parts_are_the_ceiling_and_the_floor_is_the_border(
    memory: int, context: int, sequences: int, chunk: Any, embedding: str, sizes: ModelSizes
) -> None:
    options: dict[str, Any] = {
        "context": context, "sequences": sequences, "chunk": chunk, "embedding": embedding,
    }  # fmt: skip
    try:
        made = plan(memory, sizes, **options)
    except MemoryBudgetError:
        floor = plan(1 << 40, sizes, **options).floor_bytes
        assert memory < floor
        made = plan(floor, sizes, **options)
        with pytest.raises(MemoryBudgetError):
            plan(floor - 1, sizes, **options)
    assert sum(count for _, count in made.parts()) == made.ceiling_bytes
    assert all(count >= 0 for _, count in made.parts())
    assert sizes.floor_slots <= made.num_slots <= sizes.num_records
    assert made.chunk <= context
    assert made.num_pages * 64 >= context * sequences


def test_more_memory_never_means_fewer_slots_until_the_chunk_grows() -> None:
    slots = [plan(m * MIB, chunk=64).num_slots for m in range(1000, 8000, 50)]
    assert slots == sorted(slots)
    assert slots[-1] == BIG.num_records


def test_where_slots_hold_little_the_chunk_may_take_half() -> None:
    """Read once per chunk, a model of 3.8 GiB wants a large one more than a few slots of 1536."""
    for memory in range(900, 1200, 50):
        made, least = plan(memory * MIB, context=512), plan(memory * MIB, context=512, chunk=16)
        assert made.chunk >= 128
        assert least.num_slots // 2 <= made.num_slots < least.num_slots


def test_everything_resident_takes_the_embedding_too() -> None:
    made = plan(8192 * MIB)
    assert made.is_resident and made.embedding == "resident" and made.chunk == 512
    assert made.expected_hit_rate == 1.0


def test_a_tied_head_has_no_embedding_of_its_own() -> None:
    assert plan(2048 * MIB, replace(BIG, embedding_bytes=0)).embedding == "tied"


def test_refusal_writes_the_sum_out() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(512 * MIB)
    text = str(caught.value)
    lines = [line.rsplit(maxsplit=2) for line in text.splitlines() if line.startswith("  ")]
    amounts = {name.strip(): float(count) for name, count, _ in lines}
    total = amounts.pop("sum")
    assert total == pytest.approx(sum(amounts.values()), abs=0.1 * len(amounts))
    assert amounts["dense weights"] == 570.0
    assert "10 expert slots" in amounts
    assert f"granted 512.0 MiB, needed {total:.1f} MiB" in text


def test_less_than_a_working_set_is_said() -> None:
    tight = plan(plan(1 << 40, context=512).floor_bytes + 50 * MIB, context=512)
    assert tight.num_slots < tight.working_set_records
    assert "less than one token's working set" in tight.notes[0]


def test_context_is_the_models_at_most() -> None:
    assert plan(4096 * MIB).context == 4096
    assert plan(4096 * MIB, replace(BIG, max_context=512)).context == 512
    with pytest.raises(ConfigError, match="at most 40960 tokens"):
        plan(4096 * MIB, context=50000)


def test_measured_interpreter_replaces_the_estimate() -> None:
    config = EngineConfig(memory=1536 * MIB)
    made = make_plan(BIG, config, 1536 * MIB, num_threads=2, interpreter_bytes=200 * MIB)
    assert made.interpreter_bytes == 200 * MIB
    assert made.num_slots < plan(1536 * MIB).num_slots


def test_work_grows_with_rows() -> None:
    assert work_bytes(BIG, 512, 1, 4096) > 4 * 512 * 8 * 2048 + 4 * 151936
    assert work_bytes(BIG, 512, 1, 4096) > 3 * work_bytes(BIG, 128, 1, 4096) // 2


def test_states_of_attention_grow_with_the_context_up_to_their_most() -> None:
    one, two, longest = (work_bytes(BIG, 1, 1, tokens) for tokens in (64, 128, 40960))
    heads = BIG.q_size // 128
    state_bytes = 4 * (128 + 16)  # an accumulator, and a vector for maximum and sum
    assert two - one >= heads * state_bytes
    assert 4 * MIB <= longest - one < 6 * MIB
    assert work_bytes(BIG, 1, 1, 20480) == longest


def test_a_computing_thread_has_room_for_tiles() -> None:
    config = EngineConfig(memory=1536 * MIB)
    few, more = (make_plan(BIG, config, 1536 * MIB, num_threads=n) for n in (2, 3))
    assert more.readers_bytes - few.readers_bytes > MIB + 384 * 1024


def test_predicted_speed_follows_from_bandwidth_and_hits() -> None:
    made = plan(1536 * MIB)
    assert made.tokens_per_s(2e9, 0.0) == pytest.approx(2e9 / (96 * 2654208))
    assert made.tokens_per_s(2e9, 0.5) == pytest.approx(2 * 2e9 / (96 * 2654208))
    for rate in (1.0, 1 - 2**-52, 1 + 2**-52):
        assert made.tokens_per_s(2e9, rate) is None
        warm = replace(made, expected_hit_rate=rate, drive_bytes_per_s=2e9)
        assert warm.predicted_tokens_per_s(None) is None
        assert "not bound by the drive" in "\n".join(_plan_lines(warm, None))


def test_auto_leaves_headroom_and_counts_what_is_held_already(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {10 * 1024 * 1024} kB\n")
    available = 10 * 1024 * MIB
    assert auto_ceiling(0, tmp_path) == available - available // 10
    assert auto_ceiling(100 * MIB, tmp_path) == available + 100 * MIB - available // 10
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {512 * 1024} kB\n")
    assert auto_ceiling(0, tmp_path) == 256 * MIB
    with pytest.raises(ConfigError, match="--memory"):
        auto_ceiling(0, tmp_path / "empty")


def test_a_tied_embedding_cannot_stay_on_the_drive() -> None:
    tied = replace(BIG, embedding_bytes=0)
    assert plan(2048 * MIB, tied).embedding == "tied"
    with pytest.raises(ConfigError, match="output head as well"):
        plan(2048 * MIB, tied, embedding="drive")


def test_an_embedding_in_codes_is_always_resident() -> None:
    packed = replace(BIG, embedding_has_rows=False)
    made = plan(2048 * MIB, packed)
    assert not made.is_resident
    assert made.embedding == "resident"
    assert made.embedding_bytes == BIG.embedding_bytes
    floors = [plan(8192 * MIB, sizes).floor_bytes for sizes in (BIG, packed)]
    assert floors[1] >= floors[0] + BIG.embedding_bytes
    with pytest.raises(ConfigError, match="`embedding` cannot be `drive`"):
        plan(2048 * MIB, packed, embedding="drive")


def test_what_is_needed_is_never_written_as_less() -> None:
    assert mib_up(10 * MIB) == "10.0 MiB"
    assert mib_up(10 * MIB + 1) == "10.1 MiB"
