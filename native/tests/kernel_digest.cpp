// Every kernel's results on fixed inputs, one number per case. The numbers are written down in
// kernel_digests.txt, and every instruction set of every processor must find the same ones: that is
// how results are compared between machines that never meet.
//
//   kernel_digest         prints the scalar kernels' digests; so the file is made
//   kernel_digest FILE    compares each instruction set of this processor with FILE, or each of
//                         x86 if it was built with HEADRACE_EMULATED
#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "kernels/attention.h"
#include "kernels/gguf_blocks.h"
#include "kernels/kernel_table.h"
#include "kernels/latent.h"
#include "kernels/linear.h"
#include "kernels/memory_feed.h"
#include "kernels/moe.h"
#include "kernels/quantise.h"
#include "kernels/rope.h"
#include "kernels/router.h"
#include "kernels/sample.h"
#include "kernels_support.h"

namespace headrace::test {
namespace {

// FNV-1a over words.
class Digest {
 public:
  // Processors differ in a NaN's sign and payload, and only there.
  void add(float x) { word(x != x ? 0x7fc00000u : std::bit_cast<uint32_t>(x)); }
  void add(int32_t x) { word(static_cast<uint32_t>(x)); }
  void add(int8_t x) { word(static_cast<uint8_t>(x)); }
  void add(std::byte x) { word(static_cast<uint8_t>(x)); }
  template <class T>
  void add(const std::vector<T>& values) {
    for (const T& value : values) add(value);
  }

  uint64_t value() const { return hash_; }

 private:
  void word(uint32_t x) { hash_ = (hash_ ^ x) * 0x100000001b3u; }

  uint64_t hash_ = 0xcbf29ce484222325u;
};

struct Case {
  std::string name;
  std::function<void(ThreadPool&, Digest&)> run;
};
using Cases = std::vector<Case>;

std::string name_of(Kind kind) {
  return std::string(format_name(kind.format)) + "/" + std::to_string(kind.group);
}

std::vector<float> scaled(std::vector<float> values, float factor) {
  for (float& value : values) value *= factor;
  return values;
}

// ---- products

struct MatrixShape {
  int32_t rows, cols;
  float factor;  // of the weights: small ones have subnormal scales
};
constexpr MatrixShape kMatrixShapes[] = {
    {1, 1, 1.0f}, {16, 64, 1.0f}, {35, 97, 3e-6f}, {130, 160, 1.0f}, {17, 515, 40.0f}};

void add_products(Digest& digest, ThreadPool& pool, const MatrixView& w, int32_t num_rows) {
  Random random(static_cast<uint64_t>(num_rows));
  const std::vector<float> x = random.floats(int64_t{num_rows} * w.cols);
  std::vector<float> out(static_cast<size_t>(num_rows) * static_cast<size_t>(w.rows));
  float* const outs[1] = {out.data()};
  linears(pool, x.data(), num_rows, std::span(&w, 1), outs, "digest");
  digest.add(out);
}

void run_linear(ThreadPool& pool, Digest& digest, Kind kind, MatrixShape shape) {
  const auto [rows, cols, factor] = shape;
  Random random(7);
  const Packed w(pool, scaled(random.floats(int64_t{rows} * cols), factor), rows, cols, kind);
  digest.add(std::vector<std::byte>(w.view().data, w.view().data + w.view().nbytes()));
  for (int32_t num_rows = 1; num_rows <= 20; ++num_rows) {
    add_products(digest, pool, w.view(), num_rows);
  }
  for (const int32_t num_rows : {33, 70}) add_products(digest, pool, w.view(), num_rows);
}

void add_linear(Cases& cases) {
  for (const Kind kind : kKinds) {
    for (const MatrixShape& shape : kMatrixShapes) {
      cases.push_back(
          {"linear " + name_of(kind) + " " + std::to_string(shape.rows) + "x" +
               std::to_string(shape.cols),
           [=](ThreadPool& pool, Digest& digest) { run_linear(pool, digest, kind, shape); }});
    }
  }
  cases.push_back({"linear mxfp4/32 with the least scales", [](ThreadPool& pool, Digest& digest) {
                     for (const float factor : {0x1p-124f, 0x1p-123f, 0x1p-122f}) {
                       run_linear(pool, digest, {Format::MXFP4, 32}, {20, 70, factor});
                     }
                   }});
}

void run_search(ThreadPool& pool, Digest& digest, Kind kind, MatrixShape shape) {
  const auto [rows, cols, factor] = shape;
  Random random(11);
  const std::vector<float> weights = scaled(random.floats(int64_t{rows} * cols), factor);
  std::vector<float> importance = random.floats(cols);
  for (float& value : importance) value = value < 0.0f ? 0.0f : value;
  const RowMajor source{reinterpret_cast<const std::byte*>(weights.data()), Format::F32, rows,
                        cols};
  std::vector<std::byte> packed(
      static_cast<size_t>(packed_bytes(kind.format, rows, cols, kind.group)));
  for (const bool is_weighted : {false, true}) {
    const float* counts = is_weighted ? importance.data() : nullptr;
    quantise(pool, source, kind.format, kind.group, counts, "digest", packed.data());
    digest.add(packed);
  }
}

void add_search(Cases& cases) {
  for (const Kind kind : kKinds) {
    if (!can_search(kind.format)) continue;
    cases.push_back({"search " + name_of(kind), [=](ThreadPool& pool, Digest& digest) {
                       for (const MatrixShape& shape : kMatrixShapes) {
                         run_search(pool, digest, kind, shape);
                       }
                     }});
  }
}

void add_quantised(Digest& digest, const std::vector<float>& x, int32_t group) {
  const auto cols = static_cast<int32_t>(x.size());
  const size_t groups = static_cast<size_t>(num_groups(cols, group));
  std::vector<int8_t> codes(groups * static_cast<size_t>(group));
  std::vector<float> scales(groups);
  std::vector<int32_t> sums(groups);
  digest.add(int32_t{
      kernels().quantise_row(x.data(), cols, group, codes.data(), scales.data(), sums.data())});
  digest.add(codes);
  digest.add(scales);
  digest.add(sums);
}

void run_quantise_row(ThreadPool&, Digest& digest) {
  Random random(8);
  std::vector<float> ties = {127.0f};  // the largest of a group, so that its scale is 1
  for (float x = -12.5f; x < 13.0f; x += 1.0f) ties.push_back(x);
  for (const int32_t group : {32, 64}) {
    add_quantised(digest, ties, group);
    for (const int32_t cols : {1, 31, 32, 33, 64, 97, 515}) {
      for (const float factor : {0.0f, 1e-41f, 1.5e-36f, 1.0f, 3e38f}) {
        add_quantised(digest, scaled(random.floats(cols), factor), group);
      }
    }
  }
}

// ---- rows of floats

// Ordinary numbers, with zeros of both signs, subnormal numbers, infinities and NaN among them.
std::vector<float> rough_floats(Random& random, int64_t count) {
  constexpr float kRough[] = {0.0f,   -0.0f,    1e-41f,    -3e-39f, 1e30f,
                              -2e-9f, INFINITY, -INFINITY, NAN,     88.5f};
  std::vector<float> values = random.floats(count);
  for (size_t i = 3; i < values.size(); i += 7) values[i] = kRough[i / 7 % std::size(kRough)];
  return values;
}

void run_float_rows(ThreadPool&, Digest& digest) {
  const KernelTable& t = kernels();
  Random random(9);
  for (const int32_t n : {1, 5, 15, 16, 17, 31, 47, 64, 130, 999}) {
    const std::vector<float> x = random.floats(n);
    const std::vector<float> rough = rough_floats(random, n);
    std::vector<float> out(x.size());
    const auto record = [&](const std::vector<float>& in, const auto& op) {
      std::copy(x.begin(), x.end(), out.begin());
      op(in.data());
      digest.add(out);
    };
    for (const std::vector<float>& in : {x, rough}) {
      record(in, [&](const float* p) { t.rms_norm_row(p, x.data(), 1e-5f, n, out.data()); });
      record(in, [&](const float* p) { t.silu_mul(p, x.data(), n, out.data()); });
      record(in, [&](const float* p) { t.add(p, x.data(), n, out.data()); });
      record(in, [&](const float* p) { t.clamp(p, 0.25f, n, out.data()); });
      record(in, [&](const float* p) { t.fma_row(0.7f, p, n, out.data()); });
      record(in, [&](const float* p) { t.divide(p, 3.0f, n, out.data()); });
      record(in, [&](const float* p) { digest.add(t.exp_sum(p, 0.9f, 0.8f, n, out.data())); });
      digest.add(t.max_of(in.data(), n));
      digest.add(int32_t{t.has_nan(in.data(), n)});
      digest.add(std::bit_cast<int32_t>(t.read_bytes(in.data(), int64_t{n} * 4 - 1)));
    }
  }
}

// exp of floats all over the range, and of both infinities.
void run_exp(ThreadPool&, Digest& digest) {
  std::vector<float> x = {INFINITY, -INFINITY};
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 3001 * 128) {
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  std::vector<float> out(x.size());
  kernels().exp_sum(x.data(), 0.0f, 1.0f, static_cast<int64_t>(x.size()), out.data());
  digest.add(out);
}

// Every bit pattern of the sixteen-bit types, ending in a tail.
void run_widen(ThreadPool&, Digest& digest) {
  std::vector<uint16_t> halves(65536 + 7);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> out(halves.size());
  for (const Format dtype : {Format::F16, Format::BF16}) {
    kernels().widen(dtype, halves.data(), static_cast<int64_t>(halves.size()), out.data());
    digest.add(out);
  }
  kernels().widen(Format::F32, std::vector<float>(out).data(), 77, out.data());
  digest.add(out);
}

void run_rope(ThreadPool&, Digest& digest) {
  Random random(10);
  for (const int32_t half : {1, 12, 32, 64}) {
    const int32_t positions[] = {0, 1, 77, 4095, 1000003};
    const size_t angles = std::size(positions) * static_cast<size_t>(half);
    std::vector<float> frequencies(static_cast<size_t>(half));
    for (float& f : frequencies) f = (random.centred() + 1.0f) * 0.5f;
    std::vector<float> cos(angles), sin(angles);
    rope_angles(positions, 5, frequencies.data(), half, 1.25f, cos.data(), sin.data());
    digest.add(cos);
    digest.add(sin);
    const int32_t head_dim = 2 * half + 5;
    const std::vector<float> x = random.floats(head_dim);
    std::vector<float> out(x.size());
    for (int32_t t = 0; t < 5; ++t) {
      kernels().rope_head(x.data(), cos.data() + t * half, sin.data() + t * half, half, head_dim,
                          out.data());
      digest.add(out);
    }
  }
}

void add_rows(Cases& cases) {
  cases.push_back({"quantise_row", run_quantise_row});
  cases.push_back({"rows of floats", run_float_rows});
  cases.push_back({"exp", run_exp});
  cases.push_back({"widen", run_widen});
  cases.push_back({"rope", run_rope});
}

// ---- attention

struct AttentionShape {
  Format dtype;
  int32_t num_heads, num_kv_heads, head_dim, page_tokens;
  int32_t window;  // 0: none, and no sinks

  std::string name() const {
    return std::string(format_name(dtype)) + " " + std::to_string(num_heads) + "/" +
           std::to_string(num_kv_heads) + " heads of " + std::to_string(head_dim) +
           (window == 0 ? "" : ", window and sinks");
  }
};

// NaN wherever a step writes nothing.
std::shared_ptr<std::byte> stale_bytes(int64_t count) {
  const std::shared_ptr<std::byte> bytes = aligned_bytes(count);
  std::fill_n(bytes.get(), count, std::byte{0xff});
  return bytes;
}

// Two sequences: 75 rows of a prompt, then one row each at places that end and begin a page.
template <class Step>
void run_two_sequences(const AttentionShape& shape, Step&& step) {
  constexpr int32_t kTokens = 75, kNumPages = 8;
  const int32_t pages[kNumPages] = {2, 0, 3, 6, 1, 7, 5, 4};  // four a sequence
  const std::vector<float> sinks = Random(15).floats(shape.num_heads);
  const AttentionParams params{0.3f, shape.window, shape.window == 0 ? nullptr : sinks.data()};
  const auto call = [&](const std::vector<int32_t>& positions,
                        const std::vector<int32_t>& sequences) {
    const auto count = static_cast<int32_t>(positions.size());
    const StepRows rows{positions.data(), sequences.data(), pages, count, 2, 4};
    check_step_rows(shape.page_tokens, kNumPages, shape.window, rows, "digest");
    step(rows, params);
  };
  for (const int32_t sequence : {0, 1}) {
    std::vector<int32_t> positions(kTokens);
    for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;
    call(positions, std::vector<int32_t>(kTokens, sequence));
  }
  for (int32_t t = kTokens; t < kTokens + 25; ++t) call({t, t}, {0, 1});
}

void run_attention(ThreadPool& pool, Digest& digest, const AttentionShape& shape) {
  const KvShape kv_shape{1, 8, shape.num_kv_heads, shape.head_dim, shape.page_tokens, shape.dtype};
  const KvPool kv(kv_shape, stale_bytes(kv_shape.nbytes()));
  Random random(11);
  run_two_sequences(shape, [&](const StepRows& rows, const AttentionParams& params) {
    const int64_t kv_items = int64_t{rows.num_rows} * shape.num_kv_heads * shape.head_dim;
    const std::vector<float> k = random.floats(kv_items);
    const std::vector<float> v = random.floats(kv_items);
    const std::vector<float> q =
        random.floats(int64_t{rows.num_rows} * shape.num_heads * shape.head_dim);
    kv_write(pool, kv, 0, k.data(), v.data(), rows);
    std::vector<float> out(q.size());
    paged_attention(pool, kv, 0, q.data(), shape.num_heads, params, rows, out.data());
    digest.add(out);
  });
}

// A latent is head_dim values and 16 of rope.
void run_latent(ThreadPool& pool, Digest& digest, const AttentionShape& shape) {
  const LatentShape latent{1, 8, shape.head_dim, 16, shape.page_tokens, shape.dtype};
  const LatentPool latents(latent, stale_bytes(latent.nbytes()));
  Random random(16);
  run_two_sequences(shape, [&](const StepRows& rows, const AttentionParams& params) {
    const std::vector<float> written = random.floats(int64_t{rows.num_rows} * latent.width());
    const int64_t num_queries = int64_t{rows.num_rows} * shape.num_heads;
    const std::vector<float> q = random.floats(num_queries * latent.width());
    latent_write(pool, latents, 0, written.data(), rows);
    std::vector<float> out(static_cast<size_t>(num_queries * latent.latent_dim));
    latent_attention(pool, latents, 0, q.data(), shape.num_heads, params, rows, out.data());
    digest.add(out);
  });
}

void add_attention(Cases& cases) {
  const auto add = [&](const char* op, auto run, const AttentionShape& shape) {
    cases.push_back({std::string(op) + " " + shape.name(),
                     [=](ThreadPool& pool, Digest& digest) { run(pool, digest, shape); }});
  };
  for (const Format dtype : {Format::F32, Format::F16, Format::BF16, Format::Q8}) {
    add("attention", run_attention, {dtype, 6, 2, dtype == Format::Q8 ? 32 : 16, 32, 0});
    if (dtype != Format::Q8) add("attention", run_attention, {dtype, 5, 1, 40, 48, 0});
    add("attention", run_attention, {dtype, 8, 8, 64, 32, 0});
    add("attention", run_attention, {dtype, 8, 2, 128, 64, 0});
    add("attention", run_attention, {dtype, 8, 2, 64, 32, 21});
    add("latent", run_latent, {dtype, 5, 1, 48, 32, 0});
    add("latent", run_latent, {dtype, 16, 1, 112, 32, 40});
  }
}

// ---- mixtures

void run_moe(ThreadPool& pool, Digest& digest, Kind kind) {
  constexpr int32_t kHidden = 70, kInner = 45, kExperts = 5, kChosen = 2;
  Random random(12);
  const Experts experts = make_experts(pool, random, kind, kHidden, kInner, kExperts);
  for (const int32_t num_tokens : {1, 2, 5, 40}) {
    const std::vector<float> x = random.floats(int64_t{num_tokens} * kHidden);
    const std::vector<float> logits = random.floats(int64_t{num_tokens} * kExperts);
    const size_t chosen = static_cast<size_t>(num_tokens) * kChosen;
    std::vector<int32_t> ids(chosen);
    std::vector<float> weights(chosen);
    router_topk(pool, logits.data(), num_tokens, kExperts, kChosen, true, ids.data(),
                weights.data());
    digest.add(ids);
    digest.add(weights);
    const RoutedTokens tokens{x.data(), ids.data(), weights.data(), num_tokens, kHidden, kChosen};
    MemoryFeed feed(experts.layout, {0, 1, 2, 3, 4}, experts.pointers, {3, 0, 4, 1, 2}, 2);
    std::vector<float> out(x.size());
    moe_ffn(pool, tokens, feed, out.data());
    digest.add(out);
    const ExpertLayout& layout = experts.layout;
    const std::byte* record = experts.pointers[0];
    swiglu_ffn(pool, x.data(), num_tokens, MatrixView::of(layout.gate, record),
               MatrixView::of(layout.up, record), MatrixView::of(layout.down, record), out.data());
    digest.add(out);
  }
}

void run_router(ThreadPool& pool, Digest& digest) {
  Random random(13);
  for (const int32_t num_experts : {5, 64, 130}) {
    std::vector<float> logits = random.floats(int64_t{3} * num_experts);
    logits[2] = logits[4];  // a tie
    for (const bool renormalize : {false, true}) {
      std::vector<int32_t> ids(3 * 4);
      std::vector<float> weights(ids.size());
      router_topk(pool, logits.data(), 3, num_experts, 4, renormalize, ids.data(), weights.data());
      digest.add(ids);
      digest.add(weights);
    }
  }
}

void add_mixtures(Cases& cases) {
  for (const Kind kind : kKinds) {
    cases.push_back({"mixture " + name_of(kind),
                     [=](ThreadPool& pool, Digest& digest) { run_moe(pool, digest, kind); }});
  }
  cases.push_back({"router", run_router});
}

// ---- sampling

void run_sampling(ThreadPool& pool, Digest& digest) {
  Random random(14);
  for (const int32_t vocab : {3, 50, 1001}) {
    std::vector<float> logits = scaled(random.floats(vocab), 6.0f);
    logits[1] = -INFINITY;
    std::vector<float> out(logits.size());
    log_softmax(pool, logits.data(), 1, vocab, out.data());
    digest.add(out);
    const int32_t seen[] = {0, 2};
    const int32_t counts[] = {0, 3};
    apply_penalties(logits.data(), vocab, {seen, counts, 2, 1.1f, 0.2f, 0.3f}, out.data());
    digest.add(out);
    for (const SampleParams& base :
         {SampleParams{.temperature = 0.0f}, SampleParams{.temperature = 0.7f, .top_p = 0.9f},
          SampleParams{.top_k = 2, .seed = 5}, SampleParams{.min_p = 0.05f, .seed = 1u << 31}}) {
      SampleParams params = base;
      for (params.position = 0; params.position < 100; ++params.position) {
        digest.add(sample(logits.data(), vocab, params));
      }
    }
  }
}

// ---- blocks of foreign files

// Those whose nibbles stand for numbers of a table.
void run_repack(ThreadPool&, Digest& digest) {
  Random random(15);
  for (const int32_t id : {20, 23, 39}) {
    const GgufType& type = gguf_type(id);
    const int32_t exponent_at = type.tightest == Format::MXFP4 ? 0 : 1;
    for (const int32_t blocks : {1, 3, 11}) {
      const int32_t rows = 21, cols = blocks * type.block;
      std::vector<std::byte> source(static_cast<size_t>(rows * blocks * type.nbytes));
      for (size_t i = 0; i < source.size(); ++i) {
        source[i] = static_cast<std::byte>((random.centred() + 1.0f) * 128.0f);
        if (static_cast<int32_t>(i) % type.nbytes == exponent_at) source[i] = std::byte{0x34};
      }
      std::vector<std::byte> packed(static_cast<size_t>(packed_bytes(Format::Q8F, rows, cols, 32)));
      repack_gguf(source.data(), type, rows, cols, Format::Q8F, 32, packed.data());
      digest.add(packed);
    }
  }
}

// ---- all of them

Cases all_cases() {
  Cases cases;
  add_linear(cases);
  add_rows(cases);
  add_attention(cases);
  add_mixtures(cases);
  cases.push_back({"sampling", run_sampling});
  add_search(cases);
  cases.push_back({"blocks with tables of numbers", run_repack});
  return cases;
}

std::string digest_of(ThreadPool& pool, const Case& which) {
  Digest digest;
  which.run(pool, digest);
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, digest.value());
  return text;
}

// Lines "digest name"; the number of lines that differ or are missing on either side.
int count_differences(ThreadPool& pool, const Cases& cases,
                      std::map<std::string, std::string> expected) {
  int differences = 0;
  for (const Case& which : cases) {
    const std::string found = digest_of(pool, which);
    std::string& wanted = expected[which.name];
    if (found != wanted) {
      std::printf("%s: `%s` is %s, expected %s\n", isa_name(current_isa()), which.name.c_str(),
                  found.c_str(), wanted.empty() ? "nothing" : wanted.c_str());
      ++differences;
    }
    expected.erase(which.name);
  }
  for (const auto& [name, digest] : expected) std::printf("`%s` is no case\n", name.c_str());
  return differences + static_cast<int>(expected.size());
}

std::map<std::string, std::string> read_digests(const char* path) {
  std::ifstream file(path);
  check(file.good(), std::string("cannot open ") + path);
  std::map<std::string, std::string> digests;
  for (std::string line; std::getline(file, line);) {
    if (line.size() > 17) digests[line.substr(17)] = line.substr(0, 16);
  }
  return digests;
}

std::vector<Isa> sets_to_compare() {
#if defined(HEADRACE_EMULATED)
  return {Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx};
#else
  return available_isas();
#endif
}

int compare(ThreadPool& pool, const char* path) {
  const Cases cases = all_cases();
  const std::map<std::string, std::string> expected = read_digests(path);
  int differences = 0;
  for (const Isa isa : sets_to_compare()) {
    set_isa(isa);
    const int here = count_differences(pool, cases, expected);
    std::printf("%s: %zu cases, %d differ\n", isa_name(isa), cases.size(), here);
    differences += here;
  }
  return differences == 0 ? 0 : 1;
}

void print(ThreadPool& pool) {
  set_isa(Isa::Scalar);
  for (const Case& which : all_cases()) {
    std::printf("%s %s\n", digest_of(pool, which).c_str(), which.name.c_str());
  }
}

}  // namespace
}  // namespace headrace::test

int main(int count, char** arguments) {
  headrace::ThreadPool pool(2);
  if (count == 2) return headrace::test::compare(pool, arguments[1]);
  headrace::test::print(pool);
  return 0;
}
