// Eviction by expected next use: gives up the record whose next use is probably the farthest.
//
// Per layer and token a logistic model, learned while running, says how likely each expert is used
// within the next tokens. It sees how often the expert was used lately (four half-lives), whether
// the last token used it, and through one weight per pair of experts what else the last token used.
// The layer's place in the cycle counts as well: layers just passed come again a whole token later.
//
// Learning is causal and local: when the horizon of an earlier guess has passed, the guess is
// compared with what happened (one step of gradient descent on the log loss). Steps of several
// tokens are counted but not learned from: their rows may belong to different texts.
//
// Source: the horizon after Song et al., "Learning Relaxed Belady for Content Distribution Network
// Caching" (2020): all that matters is whether the next use comes within the time a record is held.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/policy.h"

namespace headrace::store {

class NextUsePolicy final : public Policy {
 public:
  explicit NextUsePolicy(const PolicyShape& shape);
  // What the model of every layer takes at most.
  static int64_t learned_bytes(const PolicyShape& shape);

 private:
  static constexpr int32_t kNumRates = 4;
  static constexpr int32_t kNumFeatures = kNumRates + 2;  // and a constant, and "just used"

  // One guess about the experts of a layer, until its horizon has passed.
  struct Guess {
    std::vector<float> features;   // [kNumFeatures, E]
    std::vector<int32_t> context;  // experts of the token before
    std::vector<float> was_used;   // [E], 1 once used within the horizon
  };
  struct Layer {
    std::vector<float> rates;  // [kNumRates, E], decayed share of tokens that used the expert
    std::vector<float> pairs;  // [E, E]: row = used by the last token; empty if there are too many
    std::vector<Guess> guesses;  // a ring
    int32_t num_guesses = 0;
    int32_t oldest = 0;
  };

  void rate(const Visit& visit) override;
  void rate_all() override;

  void start(int32_t num_active);
  void learn(Layer& layer, const Visit& visit);
  void correct(Layer& layer, const Guess& guess);
  void count(Layer& layer, const Visit& visit);
  void describe(const Layer& layer, std::span<const int32_t> last, Guess& guess) const;
  void score(const Layer& layer, const Guess& guess);

  int32_t num_active_ = 0;  // A, known from the first visit on
  int32_t horizon_ = 1;     // tokens
  float pair_rate_ = 0.0F;
  float weights_[kNumFeatures];
  float gradients_[kNumFeatures];  // sums of squares
  std::vector<Layer> layers_;
  std::vector<float> chance_;  // [E], scratch
  std::vector<Worth> worths_;  // [E], scratch
  Guess last_;                 // scratch
};

}  // namespace headrace::store
