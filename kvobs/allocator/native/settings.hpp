// Sizes that follow from the settings; kvobs/allocator/settings.py is the same in Python.
#pragma once

#include "kvobs_core.h"

namespace kvobs {

constexpr uint64_t MIB = uint64_t{1} << 20;
constexpr uint64_t MIN_BLOCK = 512;
constexpr uint64_t SMALL_SIZE = MIB;
constexpr uint64_t SMALL_SEGMENT = 2 * MIB;
constexpr uint64_t MIN_LARGE_ALLOC = 10 * MIB;
constexpr uint64_t ROUND_LARGE = 2 * MIB;
// Sums of sizes below this cannot overflow.
constexpr uint64_t SIZE_LIMIT = uint64_t{1} << 60;

using Settings = kvobs_settings;

inline uint64_t round_up(uint64_t size, uint64_t step) { return (size + step - 1) / step * step; }

inline int bit_length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }

inline uint64_t next_division(uint64_t size, uint64_t divisions) {
    if ((size & (size - 1)) == 0) return size;
    const uint64_t floor = uint64_t{1} << (bit_length(size) - 1);
    const uint64_t step = floor >> (bit_length(divisions) - 1);
    if (step == 0) return floor << 1;
    const uint64_t below = size & ~(step - 1);
    return below == size ? below : below + step;
}

inline uint64_t round_size(const Settings &settings, uint64_t size) {
    if (size < MIN_BLOCK) return MIN_BLOCK;
    const int over = bit_length(size) - 21;
    const int index = over < 0 ? 0 : over >= KVOBS_INTERVALS ? KVOBS_INTERVALS - 1 : over;
    const uint64_t divisions = settings.roundup_power2_divisions[index];
    if (divisions > 1 && size / MIN_BLOCK >= divisions && size > MIN_BLOCK * divisions)
        return next_division(size, divisions);
    return round_up(size, MIN_BLOCK);
}

inline uint64_t segment_size(const Settings &settings, uint64_t rounded) {
    if (rounded <= SMALL_SIZE) return SMALL_SEGMENT;
    if (rounded < MIN_LARGE_ALLOC) return settings.large_segment_size;
    return round_up(rounded, ROUND_LARGE);
}

inline uint64_t page_size(const Settings &settings, bool small) {
    return small ? SMALL_SEGMENT : settings.large_segment_size;
}

inline bool valid(const Settings &settings) {
    // A fraction that is no number compares false and is refused.
    return settings.large_segment_size >= MIN_LARGE_ALLOC && settings.large_segment_size < SIZE_LIMIT &&
           settings.large_segment_size % MIN_BLOCK == 0 && settings.max_non_split_rounding < SIZE_LIMIT &&
           settings.garbage_collection_threshold >= 0.0 && settings.garbage_collection_threshold <= 1.0 &&
           settings.memory_fraction <= 1.0;
}

}  // namespace kvobs
