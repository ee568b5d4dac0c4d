// Sharing a whole budget in proportion to weights, by largest remainder, the same for any order of the
// prompts: the sum is exact, and equal remainders are told apart by a hash, never by position.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "thread_pool.hpp"

namespace xrpo {

inline std::uint64_t mix_bits(std::uint64_t x) noexcept {  // splitmix64's finaliser
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// Parts of a long loop, on several threads from PART prompts on. What a part gives (a maximum, an exact
// sum, counts) must not depend on who runs it, nor on where the parts are cut.
constexpr std::size_t PART = std::size_t{1} << 17, MAX_PARTS = 8;

inline std::size_t num_parts(std::size_t count) noexcept {
    return std::clamp<std::size_t>(count / PART, 1, MAX_PARTS);
}

template <class Visit>
void in_parts(std::size_t count, const Visit& visit) {
    const std::size_t parts = num_parts(count);
    if (parts == 1) return visit(std::size_t{0}, std::size_t{0}, count);
    const auto num_threads = static_cast<int>(std::thread::hardware_concurrency());
    parallel_for(static_cast<std::int64_t>(parts), std::max(num_threads, 1), [&](std::int64_t p) {
        const auto part = static_cast<std::size_t>(p);
        visit(part, count * part / parts, count * (part + 1) / parts);
    });
}

// Visits begin .. end-1 in eight chains: with one, each addition or comparison would wait for the last.
constexpr std::size_t LANES = 8;

template <class Visit>
void in_lanes(std::size_t begin, std::size_t end, const Visit& visit) {
    std::size_t i = begin;
    for (; i + LANES <= end; i += LANES)
        for (std::size_t lane = 0; lane < LANES; ++lane) visit(i + lane, lane);
    for (; i < end; ++i) visit(i, 0);
}

// Visits blocks that stay in the nearest cache.
template <class Visit>
void in_blocks(std::size_t begin, std::size_t end, const Visit& visit) {
    constexpr std::size_t BLOCK = 2048;
    for (; begin < end; begin += BLOCK) visit(begin, std::min(begin + BLOCK, end));
}

inline double largest_of(const std::vector<double>& values) {
    std::array<double, MAX_PARTS> largest{};
    in_parts(values.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        std::array<double, LANES> mine{};
        in_lanes(begin, end, [&](std::size_t i, std::size_t lane) {
            mine[lane] = std::max(mine[lane], values[i]);
        });
        largest[part] = *std::max_element(mine.begin(), mine.end());
    });
    return *std::max_element(largest.begin(), largest.end());
}

// Sum of value(i) in [0, top], top <= 1e290, that does not depend on the order of the values. Adding and
// subtracting `big` rounds a value to a multiple of a unit so coarse that `count` of them add without
// error; what the rounding left is summed the same way in a finer unit (Demmel and Nguyen, ARITH 2013).
template <class Value>
double order_free_sum(std::size_t count, double top, const Value& value) {
    if (!(top > 0.0)) return 0.0;
    int exponent = 0, size_bits = 1;
    std::frexp(top, &exponent);
    while ((count >> size_bits) != 0) ++size_bits;
    const double big = std::ldexp(1.5, exponent + size_bits);
    const double fine = std::ldexp(big, size_bits - 52);
    std::array<double, MAX_PARTS> high{}, low{};
    in_parts(count, [&](std::size_t part, std::size_t begin, std::size_t end) {
        std::array<double, LANES> heads{}, tails{};
        in_lanes(begin, end, [&](std::size_t i, std::size_t lane) {
            const double term = value(i);
            const double head = (term + big) - big;
            heads[lane] += head;
            tails[lane] += ((term - head) + fine) - fine;
        });
        high[part] = std::accumulate(heads.begin(), heads.end(), 0.0);
        low[part] = std::accumulate(tails.begin(), tails.end(), 0.0);
    });
    return std::accumulate(high.begin(), high.end(), 0.0) +
           std::accumulate(low.begin(), low.end(), 0.0);
}

inline double order_free_sum(const std::vector<double>& values) {
    const auto value = [&](std::size_t i) { return values[i]; };
    return order_free_sum(values.size(), largest_of(values), value);
}

// Shares a budget below 2^31 in proportion to weights. Simple loops over reused buffers, and weights
// computed afresh where they are needed: memory is what a round of a million prompts waits for.
class LargestRemainder {
  public:
    // shares[i] = floor(budget w_i / sum w), the rest one each to the largest remainders. weight(i) lies
    // in [0, top] and adds to weight_sum > 0: the caller sees to that.
    template <class Weight>
    void split(const Weight& weight, double top, double weight_sum, std::int64_t budget,
               const std::vector<std::uint64_t>& ties, std::int64_t* shares) {
        const std::size_t count = ties.size();
        const double rate = static_cast<double>(budget) / weight_sum;
        // A share times 2^bits in one integer: the whole part, and the bucket of the remainder.
        int bits = 12;
        while (bits > 0 && std::ldexp(top * rate, bits) > 2e9) --bits;
        const double scale = std::ldexp(1.0, bits);
        const std::int32_t mask = (1 << bits) - 1;
        packed_.resize(count);
        candidates_.resize(count);
        // Two counts of each bucket: with equal remainders one would wait for itself.
        const std::size_t table = 2 * (static_cast<std::size_t>(mask) + 1);
        histogram_.assign(num_parts(count) * table, 0);
        std::int32_t* packed = packed_.data();
        std::array<std::int64_t, MAX_PARTS> given{};
        in_parts(count, [&](std::size_t part, std::size_t first, std::size_t after) {
            std::int32_t* histogram = histogram_.data() + part * table;
            in_blocks(first, after, [&](std::size_t begin, std::size_t end) {
                for (std::size_t i = begin; i < end; ++i)
                    packed[i] = static_cast<std::int32_t>(weight(i) * rate * scale);
                std::int64_t whole = 0;
                for (std::size_t i = begin; i < end; ++i) whole += packed[i] >> bits;
                given[part] += whole;
                for (std::size_t i = begin; i < end; ++i)
                    ++histogram[2 * static_cast<std::size_t>(packed[i] & mask) + i % 2];
            });
        });
        std::int64_t rest = std::accumulate(given.begin(), given.end(), budget,
                                            [](std::int64_t a, std::int64_t b) { return a - b; });
        for (std::size_t k = table; k < histogram_.size(); ++k) histogram_[k % table] += histogram_[k];
        const std::int32_t last = last_bucket(rest, mask);
        // Each part's candidates lie where the part begins, and then close up.
        std::array<std::size_t, MAX_PARTS> begins{}, ends{};
        in_parts(count, [&](std::size_t part, std::size_t first, std::size_t after) {
            std::uint32_t* candidate = candidates_.data() + first;
            in_blocks(first, after, [&](std::size_t begin, std::size_t end) {
                for (std::size_t i = begin; i < end; ++i)
                    shares[i] = (packed[i] >> bits) + ((packed[i] & mask) > last);
                for (std::size_t i = begin; i < end; ++i) {
                    *candidate = static_cast<std::uint32_t>(i);
                    candidate += (packed[i] & mask) == last;
                }
            });
            begins[part] = first;
            ends[part] = static_cast<std::size_t>(candidate - candidates_.data());
        });
        auto closed = candidates_.begin();
        for (std::size_t part = 0; part < num_parts(count); ++part)
            closed = std::copy(candidates_.begin() + static_cast<std::ptrdiff_t>(begins[part]),
                               candidates_.begin() + static_cast<std::ptrdiff_t>(ends[part]), closed);
        const std::int64_t num_candidates = closed - candidates_.begin();
        if (rest > 0 && rest < num_candidates) order(num_candidates, rest, weight, rate, ties);
        for (std::int64_t j = 0; j < rest; ++j) ++shares[candidates_[static_cast<std::size_t>(j)]];
    }

  private:
    // The bucket of the `rest`-th largest remainder; takes the buckets above it off `rest`.
    std::int32_t last_bucket(std::int64_t& rest, std::int32_t mask) {
        if (rest <= 0) return mask + 1;
        const std::int32_t* histogram = histogram_.data();
        std::int32_t last = mask;
        for (; last > 0; --last) {
            const std::int32_t size = histogram[2 * last] + histogram[2 * last + 1];
            if (size >= rest) break;
            rest -= size;
        }
        return last;
    }

    // Puts the `rest` candidates with the largest remainders first, ties by hash.
    template <class Weight>
    void order(std::int64_t num_candidates, std::int64_t rest, const Weight& weight, double rate,
               const std::vector<std::uint64_t>& ties) {
        if (order_equal(num_candidates, rest, weight, ties)) return;
        const auto remainder = [&](std::uint32_t i) {
            const double exact = weight(i) * rate;
            return exact - static_cast<std::int32_t>(exact);
        };
        const auto begin = candidates_.begin();
        std::nth_element(begin, begin + rest, begin + num_candidates,
                         [&](std::uint32_t i, std::uint32_t j) {
                             const double a = remainder(i), b = remainder(j);
                             if (a != b) return a > b;
                             return ties[i] != ties[j] ? ties[i] < ties[j] : i < j;
                         });
    }

    // The same where all their weights are equal, else false. Common: rewards of 0 or 1 leave a third of
    // the prompts in one tie. Hashes are uniform, so only a window about the cut's quantile is ordered.
    template <class Weight>
    bool order_equal(std::int64_t num_candidates, std::int64_t rest, const Weight& weight,
                     const std::vector<std::uint64_t>& ties) {
        const double first = weight(candidates_[0]);
        const double frac = static_cast<double>(rest) / static_cast<double>(num_candidates);
        chosen_.resize(candidates_.size());
        window_.resize(candidates_.size());
        std::int64_t num_chosen = 0, num_inside = 0;
        for (double width = 0.01; rest < num_chosen || rest >= num_chosen + num_inside; width *= 10.0) {
            const auto low = static_cast<std::uint64_t>(std::max(frac - width, 0.0) * 0x1p52);
            const auto high = static_cast<std::uint64_t>(std::min(frac + width, 1.0) * 0x1p52);
            std::uint32_t* chosen = chosen_.data();
            std::uint32_t* window = window_.data();
            bool are_equal = true;
            for (std::int64_t j = 0; j < num_candidates; ++j) {
                const std::uint32_t i = candidates_[static_cast<std::size_t>(j)];
                const std::uint64_t hash = ties[i] >> 12;
                *chosen = *window = i;
                chosen += hash < low;
                window += (hash >= low) & (hash < high);
                are_equal &= weight(i) == first;
            }
            if (!are_equal) return false;
            num_chosen = chosen - chosen_.data();
            num_inside = window - window_.data();
        }
        const auto cut = window_.begin() + (rest - num_chosen);
        std::nth_element(window_.begin(), cut, window_.begin() + num_inside,
                         [&](std::uint32_t i, std::uint32_t j) {
                             return ties[i] != ties[j] ? ties[i] < ties[j] : i < j;
                         });
        std::copy(window_.begin(), cut, chosen_.begin() + num_chosen);
        candidates_.swap(chosen_);
        return true;
    }

    std::vector<std::int32_t> packed_, histogram_;
    std::vector<std::uint32_t> candidates_, chosen_, window_;
};

}  // namespace xrpo
