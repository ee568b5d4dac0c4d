// Single elements of any dtype, as double: labels, float64 rows and temperatures beyond float's range.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "logprobs_tiles.hpp"

namespace xrpo {

inline std::int64_t element_bytes(Dtype dtype) noexcept {
    return dtype == Dtype::F64 ? 8 : dtype == Dtype::F32 ? 4 : 2;
}

inline const void* advance(const void* base, Dtype dtype, std::int64_t elements) noexcept {
    return static_cast<const char*>(base) + elements * element_bytes(dtype);
}
inline void* advance(void* base, Dtype dtype, std::int64_t elements) noexcept {
    return static_cast<char*>(base) + elements * element_bytes(dtype);
}

inline double half_to_double(std::uint16_t bits) noexcept {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    double value;
    if (exponent == 31) {
        value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                              : std::numeric_limits<double>::infinity();
    } else {
        value = exponent == 0 ? std::ldexp(fraction, -24)
                              : std::ldexp(1024 + fraction, exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
}

// Rounds to nearest even.
inline std::uint16_t double_to_half(double value) noexcept {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isnan(value)) {
        return 0x7e00;
    }
    if (magnitude >= 65520.0) {
        return static_cast<std::uint16_t>(sign | 0x7c00);
    }
    int exponent;
    std::frexp(magnitude, &exponent);
    const int step = magnitude < 0x1p-14 ? -24 : exponent - 11;
    const auto count = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -step)));
    // A count of 2048 carries into the exponent by itself.
    const int biased = step == -24 ? count : ((step + 24) << 10) + count;
    return static_cast<std::uint16_t>(sign | biased);
}

inline std::uint16_t float_to_bf16(float value) noexcept {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) {
        return 0x7fc0;
    }
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline double load_element(Dtype dtype, const void* row, std::int64_t i) noexcept {
    switch (dtype) {
        case Dtype::F64:
            return static_cast<const double*>(row)[i];
        case Dtype::F32:
            return static_cast<double>(static_cast<const float*>(row)[i]);
        case Dtype::F16:
            return half_to_double(static_cast<const std::uint16_t*>(row)[i]);
        case Dtype::BF16:
            break;
    }
    const std::uint32_t wide = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(row)[i])
                               << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return static_cast<double>(value);
}

inline void store_element(Dtype dtype, void* row, std::int64_t i, double value) noexcept {
    switch (dtype) {
        case Dtype::F64:
            static_cast<double*>(row)[i] = value;
            return;
        case Dtype::F32:
            static_cast<float*>(row)[i] = static_cast<float>(value);
            return;
        case Dtype::F16:
            static_cast<std::uint16_t*>(row)[i] = double_to_half(value);
            return;
        case Dtype::BF16:
            static_cast<std::uint16_t*>(row)[i] = float_to_bf16(static_cast<float>(value));
            return;
    }
}

// Statistics per row are float, double for float64 rows.
inline double load_stat(Dtype dtype, const void* values, std::int64_t i) noexcept {
    return load_element(dtype == Dtype::F64 ? Dtype::F64 : Dtype::F32, values, i);
}
inline void store_stat(Dtype dtype, void* values, std::int64_t i, double value) noexcept {
    store_element(dtype == Dtype::F64 ? Dtype::F64 : Dtype::F32, values, i, value);
}

}  // namespace xrpo
