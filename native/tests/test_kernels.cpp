// The kernels without Python: every instruction set against the scalar one, bit for bit, with sizes
// that leave tails. Inputs end exactly where their buffers end, so that a sanitizer sees any read
// beyond.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/format.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"
#include "kernels/memory_feed.h"
#include "kernels/moe.h"
#include "kernels/pack.h"
#include "kernels/router.h"
#include "kernels/sample.h"
#include "kernels/small_float.h"
#include "kernels_support.h"

namespace headrace::test {
namespace {

// Runs `call` under each instruction set and demands the scalar one's bits.
template <class Call>
void same_everywhere(Call&& call) {
  set_isa(Isa::Scalar);
  const std::vector<float> expected = call();
  for (Isa isa : available_isas()) {
    set_isa(isa);
    check(same_bits(call(), expected));
  }
}

std::vector<float> product(ThreadPool& pool, const std::vector<float>& x, int32_t num_rows,
                           const MatrixView& w) {
  std::vector<float> out(static_cast<size_t>(num_rows) * static_cast<size_t>(w.rows));
  float* const outs[1] = {out.data()};
  linears(pool, x.data(), num_rows, std::span(&w, 1), outs, "test");
  return out;
}

void test_linear(ThreadPool& pool) {
  Random random(1);
  for (Kind kind : kKinds) {
    for (auto [rows, cols] : {std::pair{1, 1}, {16, 64}, {35, 97}, {130, 160}}) {
      const Packed w(pool, random.floats(int64_t{rows} * cols), rows, cols, kind);
      for (int32_t num_rows : {1, 3, 9, 16, 29, 70}) {
        const std::vector<float> x = random.floats(int64_t{num_rows} * cols);
        same_everywhere([&] { return product(pool, x, num_rows, w.view()); });
      }
    }
  }
}

// More activations than a kernel keeps in tiles at a time.
void test_linear_of_long_rows() {
  Random random(7);
  ThreadPool pool(1);
  for (Kind kind : kKinds) {
    if (!is_quantised(kind.format)) continue;
    const Packed w(pool, random.floats(16 * 12000), 16, 12000, kind);
    const std::vector<float> x = random.floats(35 * 12000);
    same_everywhere([&] { return product(pool, x, 35, w.view()); });
  }
}

std::vector<float> one_row_products(ThreadPool& pool, const std::vector<float>& x, int32_t num_rows,
                                    const MatrixView& w) {
  std::vector<float> out;
  for (int32_t r = 0; r < num_rows; ++r) {
    const std::vector<float> row(x.begin() + r * w.cols, x.begin() + (r + 1) * w.cols);
    const std::vector<float> one = product(pool, row, 1, w);
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

// Any number of rows, from and to any places: each as in a call of its own, and nothing else
// written.
void test_rows_from_and_to_places() {
  constexpr int32_t kRows = 45, kCols = 200, kMost = 39;
  Random random(8);
  ThreadPool one(1);
  std::vector<int32_t> from(kMost), to(kMost);
  for (int32_t r = 0; r < kMost; ++r) {
    from[static_cast<size_t>(r)] = (r * 7 + 3) % 20;
    to[static_cast<size_t>(r)] = kMost - 1 - r;
  }
  for (Kind kind : kKinds) {
    const Packed w(one, random.floats(kRows * kCols), kRows, kCols, kind);
    const std::vector<float> x = random.floats(20 * kCols);
    const std::vector<float> rows = one_row_products(one, x, 20, w.view());
    const int32_t group = is_quantised(kind.format) ? kind.group : 32;
    const auto codes = QuantisedRows::of(one, x.data(), 20, kCols, group, "test");
    for (Isa isa : available_isas()) {
      for (int32_t num_rows = 1; num_rows <= kMost; ++num_rows) {
        std::vector<float> out(kMost * kRows, -1.0f);
        std::vector<float> expected = out;
        LinearArgs args = block_args(w.view(), 0, w.view().num_blocks(), out.data());
        args.x = x.data();
        if (is_quantised(kind.format)) codes.bind(args);
        args.num_rows = num_rows;
        args.in_rows = from.data();
        args.out_rows = to.data();
        kernel_table(isa).linear[static_cast<int>(kind.format)](args);
        for (int32_t r = 0; r < num_rows; ++r) {
          std::copy_n(rows.begin() + from[static_cast<size_t>(r)] * kRows, kRows,
                      expected.begin() + to[static_cast<size_t>(r)] * kRows);
        }
        check(same_bits(out, expected));
      }
    }
  }
}

void test_one_thread_or_many() {
  Random random(9);
  ThreadPool one(1), many(3);
  for (Kind kind : kKinds) {
    const Packed w(one, random.floats(330 * 96), 330, 96, kind);
    const std::vector<float> x = random.floats(37 * 96);
    for (Isa isa : available_isas()) {
      set_isa(isa);
      check(same_bits(product(one, x, 37, w.view()), product(many, x, 37, w.view())));
    }
  }
}

void test_linear_is_what_it_says(ThreadPool& pool) {
  Random random(2);
  for (Kind kind : kKinds) {
    const Packed w(pool, random.floats(40 * 100), 40, 100, kind);
    const std::vector<float> x = random.floats(100);
    std::vector<float> real(40 * 100);
    unpack(pool, w.view(), real.data());
    const std::vector<float> got = product(pool, x, 1, w.view());
    for (size_t o = 0; o < 40; ++o) {
      double exact = 0.0;
      for (size_t k = 0; k < 100; ++k) exact += double{x[k]} * double{real[o * 100 + k]};
      check(std::fabs(got[o] - exact) < (is_quantised(kind.format) ? 0.15 : 1e-5));
    }
  }
}

void test_interleave_equals_pack(ThreadPool& pool) {
  Random random(3);
  const std::vector<float> w = random.floats(37 * 50);
  const Packed packed(pool, w, 37, 50, {Format::F32, 1});
  std::vector<std::byte> out(static_cast<size_t>(packed.view().nbytes()));
  const int64_t bad = interleave_rows(reinterpret_cast<const std::byte*>(w.data()), Format::F32, 37,
                                      50, out.data());
  check(bad == -1);
  check(std::memcmp(out.data(), packed.view().data, out.size()) == 0);
}

// Every pattern of 16 bits, and the neighbours of f32's border: found exactly when not finite.
void test_interleave_finds_what_is_not_finite() {
  std::vector<std::byte> out(48 * 7 * 4);
  for (const Format format : {Format::BF16, Format::F16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      std::vector<uint16_t> values(37 * 7, 0x3c00);
      values[200] = static_cast<uint16_t>(bits);
      const float value =
          format == Format::F16 ? float_from_f16(values[200]) : float_from_bf16(values[200]);
      const int64_t bad = interleave_rows(reinterpret_cast<const std::byte*>(values.data()), format,
                                          37, 7, out.data());
      check(bad == (std::isfinite(value) ? -1 : 200));
    }
  }
  for (const uint32_t bits : {0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu, 0xff7fffffu,
                              0xff800000u, 0xffffffffu, 0x80000000u}) {
    std::vector<float> values(37 * 7, 1.0f);
    values[258] = std::bit_cast<float>(bits);
    values[257] = values[258];
    const int64_t bad = interleave_rows(reinterpret_cast<const std::byte*>(values.data()),
                                        Format::F32, 37, 7, out.data());
    check(bad == (std::isfinite(values[257]) ? -1 : 257));
  }
}

void test_small_floats() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = float_from_f16(half);
    if (!std::isnan(value)) check(f16_from_float(value) == half);
    const float brain = float_from_bf16(half);
    if (!std::isnan(brain)) check(bf16_from_float(brain) == half);
  }
  check(std::isnan(float_from_f16(f16_from_float(NAN))));
  check(f16_from_float(65520.0f) == 0x7c00);
  check(f16_from_float(65519.0f) == 0x7bff);
  check(f16_from_float(0x1p-25f) == 0);  // a tie, to even
  check(f16_from_float(0x1.8p-25f) == 1);
}

// Between neighbours, what is nearer wins, and at the middle the even one.
void test_halves_are_rounded_to_nearest_even() {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto lower = static_cast<uint16_t>(bits);
    const auto upper = static_cast<uint16_t>(bits + 1);
    const float middle = (float_from_f16(lower) + float_from_f16(upper)) / 2;  // exact
    for (const float sign : {1.0f, -1.0f}) {
      const uint16_t top = sign < 0 ? 0x8000 : 0;
      check(f16_from_float(sign * middle) == (top | (bits % 2 == 0 ? lower : upper)));
      check(f16_from_float(sign * std::nextafter(middle, 0.0f)) == (top | lower));
      check(f16_from_float(sign * std::nextafter(middle, INFINITY)) == (top | upper));
    }
  }
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xffffffffu}) {
    check(std::isnan(float_from_f16(f16_from_float(std::bit_cast<float>(bits)))));
    check(std::isnan(float_from_bf16(bf16_from_float(std::bit_cast<float>(bits)))));
  }
  check(f16_from_float(-INFINITY) == 0xfc00);
  check(bf16_from_float(std::bit_cast<float>(0x3f808000u)) == 0x3f80);
  check(bf16_from_float(std::bit_cast<float>(0x3f818000u)) == 0x3f82);
}

void test_rows_of_floats() {
  Random random(4);
  for (int32_t n : {1, 15, 16, 17, 47, 64, 130}) {
    const std::vector<float> x = random.floats(n);
    const std::vector<float> y = random.floats(n);
    same_everywhere([&] {
      const KernelTable& t = kernels();
      std::vector<float> out(static_cast<size_t>(n) * 8);
      float* o = out.data();
      t.rms_norm_row(x.data(), y.data(), 1e-5f, n, o);
      t.silu_mul(x.data(), y.data(), n, o + n);
      t.add(x.data(), y.data(), n, o + 2 * n);
      t.clamp(x.data(), 0.25f, n, o + 3 * n);
      std::copy(y.begin(), y.end(), o + 4 * n);
      t.fma_row(0.7f, x.data(), n, o + 4 * n);
      o[5 * n] = t.exp_sum(x.data(), t.max_of(x.data(), n), 0.8f, n, o + 6 * n);
      t.divide(x.data(), 3.0f, n, o + 7 * n);
      return out;
    });
  }
}

void test_exp_of_everything() {
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 0xff000000u; bits += 65521 * 7) {
    x.push_back(std::bit_cast<float>(bits));
  }
  x.push_back(std::numeric_limits<float>::infinity());
  const std::vector<float> ones(x.size(), 1.0f);
  std::erase_if(x, [](float v) { return std::isnan(v); });  // their payloads may differ
  same_everywhere([&] {
    std::vector<float> out(x.size());
    kernels().silu_mul(x.data(), ones.data(), static_cast<int64_t>(x.size()), out.data());
    return out;
  });
}

void test_quantise_row_refuses_what_is_not_finite() {
  for (Isa isa : available_isas()) {
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x(40, 1.0f);
      x[39] = bad;
      std::vector<int8_t> codes(64);
      std::vector<float> scales(2);
      std::vector<int32_t> sums(2);
      const KernelTable& table = kernel_table(isa);
      check(!table.quantise_row(x.data(), 40, 32, codes.data(), scales.data(), sums.data()));
      x[39] = 1.0f;
      check(table.quantise_row(x.data(), 40, 32, codes.data(), scales.data(), sums.data()));
      check(codes[0] == 127 && codes[39] == 127 && codes[40] == 0);
      check(sums[0] == 32 * 127 && sums[1] == 8 * 127);
    }
  }
}

void test_attention(ThreadPool& pool) {
  Random random(5);
  for (int32_t head_dim : {16, 40, 64}) {
    const KvShape shape{1, 4, 2, head_dim, 32, Format::F16};
    const std::shared_ptr<std::byte> memory = aligned_bytes(shape.nbytes());
    std::fill_n(memory.get(), shape.nbytes(), std::byte{0xff});  // NaN wherever nothing was written
    const KvPool kv(shape, memory);
    constexpr int32_t kTokens = 75;
    std::vector<int32_t> positions(kTokens), sequences(kTokens, 0);
    for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;
    const int32_t pages[3] = {2, 0, 3};
    const StepRows rows{positions.data(), sequences.data(), pages, kTokens, 1, 3};
    check_step_rows(32, 4, 0, rows, "test");
    const std::vector<float> k = random.floats(int64_t{kTokens} * 2 * head_dim);
    const std::vector<float> v = random.floats(int64_t{kTokens} * 2 * head_dim);
    const std::vector<float> q = random.floats(int64_t{kTokens} * 6 * head_dim);
    kv_write(pool, kv, 0, k.data(), v.data(), rows);
    same_everywhere([&] {
      std::vector<float> out(q.size());
      paged_attention(pool, kv, 0, q.data(), 6, {0.2f, 0, nullptr}, rows, out.data());
      check(std::isfinite(out.back()));
      return out;
    });
    const int32_t bad_pages[3] = {2, 4, 3};
    const StepRows bad{positions.data(), sequences.data(), bad_pages, kTokens, 1, 3};
    check(throws(ErrorKind::Shape, [&] { check_step_rows(32, 4, 0, bad, "test"); }));
  }
}

void test_moe(ThreadPool& pool) {
  Random random(6);
  const std::vector<int32_t> ids = {4, 9, 1, 1, 4, 9};
  const std::vector<float> weights = random.floats(6);
  for (Kind kind : kKinds) {
    const Experts experts = make_experts(pool, random, kind, 70, 40, 3);
    const std::vector<float> x = random.floats(2 * 70);
    const RoutedTokens tokens{x.data(), ids.data(), weights.data(), 2, 70, 3};
    const auto run = [&](std::vector<int32_t> order, int32_t step) {
      MemoryFeed feed(experts.layout, {1, 4, 9}, experts.pointers, std::move(order), step);
      std::vector<float> out(x.size());
      moe_ffn(pool, tokens, feed, out.data());
      check(feed.rewind());
      return out;
    };
    same_everywhere([&] { return run({0, 1, 2}, 1); });
    const std::vector<float> expected = run({0, 1, 2}, 3);
    check(same_bits(run({2, 1, 0}, 1), expected));
    check(same_bits(run({1, 2, 0}, 2), expected));
    MemoryFeed missing(experts.layout, {1, 4}, {experts.pointers[0], experts.pointers[1]}, {0, 1},
                       1);
    std::vector<float> out(x.size());
    check(throws(ErrorKind::Shape, [&] { moe_ffn(pool, tokens, missing, out.data()); }));
  }
}

void test_router_and_sampling(ThreadPool& pool) {
  std::vector<float> logits = {1.0f, 3.0f, 3.0f, -2.0f, 0.0f};
  int32_t ids[2];
  float weights[2];
  router_topk(pool, logits.data(), 1, 5, 2, true, ids, weights);
  check(ids[0] == 1 && ids[1] == 2 && weights[0] == 0.5f && weights[1] == 0.5f);
  check(sample(logits.data(), 5, {.temperature = 0.0f}) == 1);
  for (int64_t position = 0; position < 200; ++position) {
    const SampleParams params{.temperature = 1.0f, .top_k = 2, .seed = 3, .position = position};
    const int32_t token = sample(logits.data(), 5, params);
    check(token == 1 || token == 2);
    check(token == sample(logits.data(), 5, params));
    const double u = uniform(3, position);
    check(u >= 0.0 && u < 1.0);
  }
  logits[3] = NAN;
  check(throws(ErrorKind::Numeric, [&] { sample(logits.data(), 5, {}); }));
  check(throws(ErrorKind::Numeric,
               [&] { router_topk(pool, logits.data(), 1, 5, 2, true, ids, weights); }));
}

void run_everything() {
  for (int32_t threads : {1, 3}) {
    ThreadPool pool(threads);
    test_linear(pool);
    test_linear_is_what_it_says(pool);
    test_interleave_equals_pack(pool);
    test_attention(pool);
    test_moe(pool);
    test_router_and_sampling(pool);
  }
  test_linear_of_long_rows();
  test_rows_from_and_to_places();
  test_one_thread_or_many();
  test_small_floats();
  test_halves_are_rounded_to_nearest_even();
  test_interleave_finds_what_is_not_finite();
  test_rows_of_floats();
  test_exp_of_everything();
  test_quantise_row_refuses_what_is_not_finite();
}

}  // namespace
}  // namespace headrace::test

int main() {
  headrace::test::run_everything();
  return 0;
}
