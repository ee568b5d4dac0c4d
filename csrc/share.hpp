// Sharing a whole budget in proportion to weights, by largest remainder, the same for any order of the
// prompts: the sum is exact, and equal remainders are told apart by a hash, never by position.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace xrpo {

inline std::uint64_t mix_bits(std::uint64_t x) noexcept {  // splitmix64's finaliser
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// Sum of finite values >= 0 that does not depend on their order: each is cut into two whole numbers of
// one common unit, and whole numbers add exactly.
inline double order_free_sum(const double* values, std::size_t count) noexcept {
    double largest = 0.0;
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, values[i]);
    if (!(largest > 0.0)) return 0.0;
    int size_bits = 1;
    while ((count >> size_bits) != 0) ++size_bits;
    int exponent = 0;
    std::frexp(largest, &exponent);
    const int bits = std::min(62 - size_bits, 52);
    const double fine = std::ldexp(1.0, bits);
    // Two factors: one alone overflows for subnormal weights.
    const double scale_a = std::ldexp(1.0, (bits - exponent) / 2);
    const double scale_b = std::ldexp(1.0, (bits - exponent) - (bits - exponent) / 2);
    std::int64_t high = 0, low = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const double scaled = values[i] * scale_a * scale_b;
        const auto whole = static_cast<std::int64_t>(scaled);
        high += whole;
        low += static_cast<std::int64_t>((scaled - static_cast<double>(whole)) * fine);
    }
    return (static_cast<double>(high) + static_cast<double>(low) / fine) / scale_a / scale_b;
}

// Shares `budget` in proportion to `weights`; reused buffers make repeated rounds free of allocation.
class LargestRemainder {
  public:
    // shares[i] = floor(budget w_i / sum w), the rest one each to the largest remainders. All weights
    // finite and >= 0 with a positive sum: the caller sees to that.
    void split(const std::vector<double>& weights, const std::vector<std::uint64_t>& ties,
               double weight_sum, std::int64_t budget, std::int64_t* shares) {
        const std::size_t count = weights.size();
        const double rate = static_cast<double>(budget) / weight_sum;
        remainders_.resize(count);
        std::array<std::int64_t, BUCKETS + 1> histogram{};
        std::int64_t given = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const double exact = weights[i] * rate;
            const auto whole = static_cast<std::int64_t>(exact);
            const double remainder = exact - static_cast<double>(whole);
            shares[i] = whole;
            given += whole;
            remainders_[i] = remainder;
            ++histogram[bucket_of(remainder)];
        }
        give_rest(histogram, ties, budget - given, shares);
    }

  private:
    static constexpr int BUCKETS = 4096;

    struct Candidate {
        double remainder;
        std::uint64_t tie;
        std::size_t index;
        bool operator<(const Candidate& other) const noexcept {
            if (remainder != other.remainder) return remainder > other.remainder;
            return tie != other.tie ? tie < other.tie : index < other.index;
        }
    };

    static std::size_t bucket_of(double remainder) noexcept {
        return static_cast<std::size_t>(remainder * BUCKETS);
    }

    // One each to the `rest` largest remainders. Whole buckets first; only the last one is ordered.
    void give_rest(const std::array<std::int64_t, BUCKETS + 1>& histogram,
                   const std::vector<std::uint64_t>& ties, std::int64_t rest, std::int64_t* shares) {
        if (rest <= 0) return;
        std::size_t last = BUCKETS;
        while (last > 0 && histogram[last] <= rest) rest -= histogram[last--];
        last_bucket_.clear();
        for (std::size_t i = 0; i < remainders_.size(); ++i) {
            const std::size_t bucket = bucket_of(remainders_[i]);
            if (bucket > last) ++shares[i];
            else if (bucket == last) last_bucket_.push_back({remainders_[i], ties[i], i});
        }
        if (rest <= 0) return;
        rest = std::min<std::int64_t>(rest, static_cast<std::int64_t>(last_bucket_.size()));
        std::nth_element(last_bucket_.begin(), last_bucket_.begin() + (rest - 1), last_bucket_.end());
        for (std::int64_t j = 0; j < rest; ++j) ++shares[last_bucket_[static_cast<size_t>(j)].index];
    }

    std::vector<double> remainders_;
    std::vector<Candidate> last_bucket_;
};

}  // namespace xrpo
