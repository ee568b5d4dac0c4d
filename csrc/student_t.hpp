// Quantiles of Student's t from + - * / and sqrt alone: libm's exp and log differ between machines in
// the last bit, and a plan must not.
//
//   f(t)  = c (1 + t^2/v)^-(v+1)/2,  c = R(v/2) / sqrt(pi v),  R(x) = Gamma(x + 1/2) / Gamma(x)
//   tail:    1 - F(t) = f(t) t M,  1/(2M) the continued fraction of I_x(v/2, 1/2), x = v / (v + t^2)
//   centre:  F(t) - 1/2 = f(t) t sum_k [((v+1)/2)_k / (3/2)_k] z^k,  z = t^2 / (v + t^2)
//
// Both are free of cancellation, so Newton's method reaches a relative error below 1e-12 at the given
// double p. Sources: Didonato and Morris, ACM TOMS 18 (1992) 360 (the fraction, which stays accurate at
// large v), DLMF 8.17 (incomplete beta), DLMF 5.11 (ratio of gamma functions).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace xrpo {

namespace portable {

// ln 2 in two parts: the first has 32 trailing zero bits, so a multiple of it is exact.
constexpr double LN2_HIGH = 0x1.62e42fee00000p-1;
constexpr double LN2_LOW = 0x1.a39ef35793c76p-33;

// 2 atanh(z) = 2 (z + z^3/3 + z^5/5 + ...) for |z| <= 0.172; the terms left out are below 1e-17.
inline double twice_atanh(double z) noexcept {
    constexpr double INVERSE[12] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                                    1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23, 1.0 / 25};
    const double square = z * z, fourth = square * square;
    double even = INVERSE[10], odd = INVERSE[11];  // two chains: half the latency
    for (int k = 8; k >= 0; k -= 2) {
        even = even * fourth + INVERSE[k];
        odd = odd * fourth + INVERSE[k + 1];
    }
    return 2.0 * (z + z * square * (even + square * odd));
}

// Natural logarithm of a positive finite x.
inline double log(double x) noexcept {
    int exponent = 0;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752) {
        m *= 2.0;
        --exponent;
    }
    const double series = twice_atanh((m - 1.0) / (m + 1.0));
    return exponent * LN2_HIGH + (series + exponent * LN2_LOW);
}

// log(1 + y) for y >= 0.
inline double log1p(double y) noexcept {
    return y < 0.4 ? twice_atanh(y / (2.0 + y)) : log(1.0 + y);
}

inline double exp(double x) noexcept {
    if (x < -800.0) return 0.0;
    if (x > 800.0) return HUGE_VAL;
    const double k = std::floor(x * 1.4426950408889634 + 0.5);
    const double r = (x - k * LN2_HIGH) - k * LN2_LOW;
    double sum = 1.0;
    for (int i = 14; i >= 1; --i) sum = 1.0 + sum * r / i;
    return std::ldexp(sum, static_cast<int>(k));
}

}  // namespace portable

// Gamma(x + 1/2) / Gamma(x), x >= 1/2: lgamma differences would lose nine digits at x = 5e5.
inline double gamma_half_ratio(double x) noexcept {
    double factor = 1.0;
    for (; x < 17.0; x += 1.0) factor *= x / (x + 0.5);
    const double shifted = x - 0.25;
    const double u = 1.0 / (shifted * shifted);
    // -E_2k / (k 4^(2k+1)) with Euler's numbers E_2k, k = 1..5.
    const double series =
        u * (1.0 / 64 +
             u * (-5.0 / 2048 + u * (61.0 / 49152 + u * (-1385.0 / 1048576 + u * (50521.0 / 20971520)))));
    return factor * std::sqrt(shifted) * portable::exp(series);
}

// Student's t with v degrees of freedom (v >= 1, finite, need not be whole).
class StudentT {
  public:
    explicit StudentT(double df) noexcept
        : v_(df), root_v_(std::sqrt(df)), c_(gamma_half_ratio(0.5 * df) / std::sqrt(PI * df)) {}

    // The t with F(t) = p, for p in (0, 1).
    double quantile(double p) const noexcept {
        const double q = p < 0.5 ? p : 1.0 - p;
        const bool in_tail = portable::log(q) < log_tail(SPLIT, tail_ratio(SPLIT));
        const double t = in_tail ? tail_quantile(q) : central_quantile(0.5 - q);
        return p < 0.5 ? -t : t;
    }

  private:
    static constexpr double PI = 3.14159265358979323846;
    static constexpr double SPLIT = 2.0;  // the fraction converges fast from sqrt(3) on
    static constexpr double SMALLEST_STEP = 4e-16;
    static constexpr int MAX_STEPS = 60;
    static constexpr int MAX_TERMS = 100000;

    // log(1 + t^2/v), also where t^2 overflows.
    double log_kernel(double t) const noexcept {
        const double scaled = t / root_v_;
        return scaled > 1e10 ? 2.0 * portable::log(scaled) : portable::log1p(scaled * scaled);
    }

    double density(double t) const noexcept {
        return c_ * portable::exp(-0.5 * (v_ + 1.0) * log_kernel(t));
    }

    double log_tail(double t, double ratio) const noexcept {
        return portable::log(c_ * ratio) + portable::log(t) - 0.5 * (v_ + 1.0) * log_kernel(t);
    }

    // M = (1 - F(t)) / (t f(t)), by Lentz's method.
    double tail_ratio(double t) const noexcept {
        const double a = 0.5 * v_, b = 0.5;
        const double square = (t / root_v_) * (t / root_v_);
        const double x = 1.0 / (1.0 + square);
        const double y = square < 1e300 ? square * x : 1.0;
        double value = a * (a * y - b * x + 1.0) / (a + 1.0);
        double c = value, d = 0.0;
        for (int n = 1; n < MAX_TERMS; ++n) {
            const double middle = a + 2.0 * n - 1.0;
            const double numerator =
                (a + n - 1.0) / middle * ((a + b + n - 1.0) / middle) * n * (b - n) * x * x;
            const double denominator = n + n * (b - n) * x / middle +
                                       (a + n) * (a * y - b * x + 1.0 + n * (1.0 + y)) / (middle + 2.0);
            d = 1.0 / (denominator + numerator * d);
            c = denominator + numerator / c;
            value *= c * d;
            if (std::fabs(c * d - 1.0) < 2e-16) break;
        }
        return 0.5 / value;
    }

    // Newton on log tail over log t: concave, hence convergent from any start.
    double tail_quantile(double q) const noexcept {
        const double log_q = portable::log(q);
        double t = std::fmax(SPLIT, std::sqrt(-2.0 * log_q));
        for (int i = 0; i < MAX_STEPS; ++i) {
            const double ratio = tail_ratio(t);
            const double step = (log_tail(t, ratio) - log_q) * ratio;
            // Never below the split: the fraction converges slowly there.
            t = std::fmax(SPLIT, t * portable::exp(step));
            if (std::fabs(step) < SMALLEST_STEP) break;
        }
        return t;
    }

    // Newton on F(t) - 1/2 = d from below: concave, hence monotone.
    double central_quantile(double d) const noexcept {
        double t = d / c_;
        for (int i = 0; i < MAX_STEPS && t > 0.0; ++i) {
            const double z = t * t / (v_ + t * t);
            double term = 1.0, sum = 1.0;
            for (int k = 0; term > 1e-17 * sum; ++k) {
                term *= (0.5 * (v_ + 1.0) + k) / (1.5 + k) * z;
                sum += term;
            }
            const double f = density(t);
            const double step = d / f - t * sum;
            t += step;
            if (std::fabs(step) < SMALLEST_STEP * t) break;
        }
        return t;
    }

    double v_, root_v_, c_;
};

inline double student_t_quantile(double p, double df) noexcept { return StudentT(df).quantile(p); }

// shrinkage(n) = t_{n-1} / sqrt(n) - t_n / sqrt(n+1) at one confidence level, tabulated as n grows:
// what one more rollout takes off the half-width, per unit of standard deviation.
class ShrinkageTable {
  public:
    explicit ShrinkageTable(double confidence) : p_(0.5 * (1.0 + confidence)) {}

    // Makes shrinkage(n) available for 2 <= n <= largest.
    void grow(std::int64_t largest) {
        if (largest < static_cast<std::int64_t>(values_.size())) return;
        if (values_.empty()) {
            values_.assign(2, 0.0);
            half_width_ = student_t_quantile(p_, 1.0) / std::sqrt(2.0);
        }
        for (auto n = static_cast<std::int64_t>(values_.size()); n <= largest; ++n) {
            const double next = student_t_quantile(p_, static_cast<double>(n)) /
                                std::sqrt(static_cast<double>(n + 1));
            values_.push_back(half_width_ - next);
            half_width_ = next;
        }
    }

    double operator[](std::int64_t n) const noexcept { return values_[static_cast<size_t>(n)]; }
    const double* data() const noexcept { return values_.data(); }

  private:
    double p_;
    double half_width_ = 0.0;
    std::vector<double> values_;
};

}  // namespace xrpo
