#include "store/next_use.h"

#include <algorithm>
#include <cmath>

namespace headrace::store {
namespace {

// Values tried: docs/experiments.md, 2026-12-02.
constexpr float kHalfLives[] = {2.0F, 8.0F, 32.0F, 128.0F};  // tokens
constexpr float kLeastRate = 1e-3F;
constexpr float kBias = -2.0F;
constexpr float kWeightRate = 0.1F;
constexpr float kPairRate = 0.02F;
constexpr int32_t kMaxHorizon = 8;
constexpr float kMaxLogit = 15.0F;
// Beyond this the weights of pairs would take memory that records need more.
constexpr size_t kMaxPairs = size_t{8} << 20;

float chance_of(float logit) {
  return 1.0F / (1.0F + std::exp(-std::clamp(logit, -kMaxLogit, kMaxLogit)));
}

bool has_pairs(const PolicyShape& shape) {
  const size_t experts = static_cast<size_t>(shape.num_experts);
  return static_cast<size_t>(shape.num_rows) * experts * experts <= kMaxPairs;
}

}  // namespace

int64_t NextUsePolicy::learned_bytes(const PolicyShape& shape) {
  const int64_t guess = (kNumFeatures + 1) + 1;  // context: at most all experts
  const int64_t pairs = has_pairs(shape) ? shape.num_experts : 0;
  const int64_t per_expert = kNumRates + kMaxHorizon * guess + pairs;
  return int64_t{sizeof(float)} * shape.num_rows * shape.num_experts * per_expert;
}

NextUsePolicy::NextUsePolicy(const PolicyShape& shape)
    : Policy(shape),
      layers_(index(shape.num_rows)),
      chance_(index(shape.num_experts)),
      worths_(index(shape.num_experts)) {
  const size_t experts = index(shape.num_experts);
  for (Layer& layer : layers_) {
    layer.rates.assign(kNumRates * experts, 0.0F);
    if (has_pairs(shape)) layer.pairs.assign(experts * experts, 0.0F);
  }
  for (size_t record = 0; record < count_.size(); ++record) {
    victims_.set_worth(static_cast<int32_t>(record), {-1.0 / kLeastRate});  // never used
  }
  std::fill(std::begin(weights_), std::end(weights_), 0.0F);
  std::fill(weights_, weights_ + kNumRates, 1.0F / kNumRates);
  std::fill(std::begin(gradients_), std::end(gradients_), 1e-2F);
}

// A record is held for about as many tokens as the slots hold working sets.
void NextUsePolicy::start(int32_t num_active) {
  num_active_ = num_active;
  const double working_set = static_cast<double>(shape_.num_rows) * num_active;
  horizon_ =
      std::clamp(static_cast<int32_t>(std::lround(shape_.num_slots / working_set)), 1, kMaxHorizon);
  pair_rate_ = kPairRate / std::sqrt(static_cast<float>(horizon_));
  const float usual = static_cast<float>(num_active) / static_cast<float>(shape_.num_experts);
  for (Layer& layer : layers_) {
    layer.guesses.resize(index(horizon_));
    for (float& rate : layer.rates) rate = rate > 0.0F ? rate : usual;
  }
}

void NextUsePolicy::rate(const Visit& visit) {
  const int32_t num_active =
      static_cast<int32_t>(visit.ids.size()) / std::max(visit.step_tokens, 1);
  if (num_active == 0) return;
  if (num_active_ == 0) start(num_active);
  Layer& layer = layers_[index(visit.row)];
  learn(layer, visit);
  count(layer, visit);
  const bool is_learned_from = visit.step_tokens == 1;
  const int32_t place = (layer.oldest + layer.num_guesses) % horizon_;
  Guess& guess = is_learned_from ? layer.guesses[index(place)] : last_;
  layer.num_guesses += is_learned_from ? 1 : 0;
  describe(layer, visit.ids.last(index(num_active)), guess);
  score(layer, guess);
  const double now = static_cast<double>(num_steps_) +
                     static_cast<double>(visit.row) / static_cast<double>(shape_.num_rows);
  const int32_t first = visit.row * shape_.num_experts;
  for (int32_t expert = 0; expert < shape_.num_experts; ++expert) {
    // As if uses came at a constant rate that makes one within `horizon_` tokens this likely.
    const double rate = -std::log1p(-static_cast<double>(chance_[index(expert)])) / horizon_;
    worths_[index(expert)] = {-(now + 1.0 / rate), last_use_[index(first + expert)]};
  }
  victims_.set_worths(first, worths_);
}

void NextUsePolicy::learn(Layer& layer, const Visit& visit) {
  if (visit.step_tokens != 1) {
    layer.num_guesses = 0;
    return;
  }
  for (int32_t i = 0; i < layer.num_guesses; ++i) {
    Guess& guess = layer.guesses[index((layer.oldest + i) % horizon_)];
    for (const int32_t expert : visit.ids) guess.was_used[index(expert)] = 1.0F;
  }
  if (layer.num_guesses < horizon_) return;
  correct(layer, layer.guesses[index(layer.oldest)]);
  layer.oldest = (layer.oldest + 1) % horizon_;
  --layer.num_guesses;
}

void NextUsePolicy::correct(Layer& layer, const Guess& guess) {
  score(layer, guess);
  const size_t experts = chance_.size();
  std::vector<float>& error = chance_;
  for (size_t e = 0; e < experts; ++e) error[e] = guess.was_used[e] - chance_[e];
  for (size_t f = 0; f < kNumFeatures; ++f) {
    float gradient = 0.0F;
    for (size_t e = 0; e < experts; ++e) gradient += guess.features[f * experts + e] * error[e];
    gradients_[f] += gradient * gradient;
    weights_[f] += kWeightRate * gradient / std::sqrt(gradients_[f]);
  }
  if (layer.pairs.empty()) return;
  for (const int32_t used : guess.context) {
    float* pairs = layer.pairs.data() + index(used) * experts;
    for (size_t e = 0; e < experts; ++e) pairs[e] += pair_rate_ * error[e];
  }
}

void NextUsePolicy::count(Layer& layer, const Visit& visit) {
  const size_t experts = chance_.size();
  const float tokens = static_cast<float>(visit.step_tokens);
  for (size_t r = 0; r < kNumRates; ++r) {
    const float kept = std::exp2(-tokens / kHalfLives[r]);
    float* rates = layer.rates.data() + r * experts;
    for (size_t e = 0; e < experts; ++e) {
      rates[e] = kept * rates[e] + (1.0F - kept) * static_cast<float>(visit.num_tokens[e]) / tokens;
    }
  }
}

void NextUsePolicy::describe(const Layer& layer, std::span<const int32_t> last,
                             Guess& guess) const {
  const size_t experts = chance_.size();
  guess.context.assign(last.begin(), last.end());
  guess.was_used.assign(experts, 0.0F);
  guess.features.assign(kNumFeatures * experts, 0.0F);
  const float usual = std::log(kLeastRate + static_cast<float>(num_active_) /
                                                static_cast<float>(shape_.num_experts));
  for (size_t i = 0; i < kNumRates * experts; ++i) {
    guess.features[i] = std::log(layer.rates[i] + kLeastRate) - usual;
  }
  float* just_used = guess.features.data() + kNumRates * experts;
  for (const int32_t expert : last) just_used[index(expert)] = 1.0F;
  std::fill(just_used + experts, just_used + 2 * experts, 1.0F);
}

void NextUsePolicy::score(const Layer& layer, const Guess& guess) {
  const size_t experts = chance_.size();
  std::fill(chance_.begin(), chance_.end(), kBias);
  for (size_t f = 0; f < kNumFeatures; ++f) {
    const float weight = weights_[f];
    const float* features = guess.features.data() + f * experts;
    for (size_t e = 0; e < experts; ++e) chance_[e] += weight * features[e];
  }
  if (!layer.pairs.empty()) {
    for (const int32_t used : guess.context) {
      const float* pairs = layer.pairs.data() + index(used) * experts;
      for (size_t e = 0; e < experts; ++e) chance_[e] += pairs[e];
    }
  }
  for (float& chance : chance_) chance = chance_of(chance);
}

void NextUsePolicy::rate_all() {
  if (num_active_ > 0 || num_steps_ > 0) return;  // a rebase: nothing here hangs on counts
  const double settled = shape_.half_life_tokens / std::log(2.0);
  for (size_t record = 0; record < count_.size(); ++record) {
    const size_t row = record / index(shape_.num_experts);
    const size_t expert = record % index(shape_.num_experts);
    const float share = static_cast<float>(std::min(count_[record] / settled, 1.0));
    for (size_t r = 0; r < kNumRates; ++r) {
      layers_[row].rates[r * index(shape_.num_experts) + expert] = share;
    }
    victims_.set_worth(static_cast<int32_t>(record), {-1.0 / (kLeastRate + share)});
  }
}

}  // namespace headrace::store
