// The advantage of one score in its group.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace skyrl_fast {

enum class Estimator : int { kGrpo = 0, kDrGrpo = 1, kRloo = 2, kMaxRl = 3 };

constexpr double kAdvantageEpsilon = 1e-6;  // keeps a constant group finite

// The advantage of one score in its group of `count` scores; `std` is the unbiased deviation.
SKYRL_HD double advantage_of(Estimator estimator, double score, double mean, double std,
                             int64_t count) {
  switch (estimator) {
    case Estimator::kGrpo:
      return count == 1 ? score / (1.0 + kAdvantageEpsilon)
                        : (score - mean) / (std + kAdvantageEpsilon);
    case Estimator::kDrGrpo: return count == 1 ? score : score - mean;
    case Estimator::kRloo:
      return count == 1
                 ? 0.0
                 : (score - mean) * static_cast<double>(count) / static_cast<double>(count - 1);
    case Estimator::kMaxRl: return count == 1 ? score : (score - mean) / (mean + kAdvantageEpsilon);
  }
  return 0.0;
}

}  // namespace skyrl_fast
