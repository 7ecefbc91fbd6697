// Where segments come from: the caller's callbacks, or a simulated device that only counts.
#pragma once

#include "settings.hpp"

namespace kvobs {

constexpr uint64_t FIRST_SEGMENT = 0x7f0000000000;
constexpr uint64_t FIRST_RESERVATION = uint64_t{1} << 50;
constexpr uint64_t UNLIMITED_RANGE = uint64_t{1} << 40;
constexpr uint64_t ADDRESS_LIMIT = uint64_t{1} << 63;
constexpr uint64_t SIMULATED_END = uint64_t{1} << 62;  // so that no sum of sizes overflows

class Device {
public:
    Device(uint64_t capacity, const kvobs_device *callbacks) : capacity_(capacity), simulated_(callbacks == nullptr) {
        if (callbacks) callbacks_ = *callbacks;
    }

    uint64_t capacity() const { return capacity_; }

    uint64_t malloc(uint64_t size) {
        if (!simulated_) return usable(callbacks_.malloc(callbacks_.user, size));
        if (next_segment_ >= SIMULATED_END - size || !take(size)) return 0;
        const uint64_t address = next_segment_;
        next_segment_ = round_up(address + size, ROUND_LARGE);
        return address;
    }

    void free(uint64_t address, uint64_t size) {
        if (simulated_) used_ -= size;
        else callbacks_.free(callbacks_.user, address, size);
    }

    // Address space of one expandable segment: 1 1/8 of the device, so that pages can move to the end.
    uint64_t range() const { return capacity_ ? capacity_ + capacity_ / 8 : UNLIMITED_RANGE; }

    uint64_t reserve(uint64_t size) {
        if (!simulated_) return usable(callbacks_.reserve(callbacks_.user, size));
        if (next_reservation_ >= SIMULATED_END - size) return 0;
        const uint64_t base = next_reservation_;
        next_reservation_ += round_up(size, ROUND_LARGE);
        return base;
    }

    void unreserve(uint64_t address, uint64_t size) {
        if (!simulated_ && callbacks_.unreserve) callbacks_.unreserve(callbacks_.user, address, size);
    }

    bool map(uint64_t address, uint64_t size) {
        return simulated_ ? take(size) : callbacks_.map(callbacks_.user, address, size) != 0;
    }

    void unmap(uint64_t address, uint64_t size) {
        if (simulated_) used_ -= size;
        else callbacks_.unmap(callbacks_.user, address, size);
    }

private:
    static uint64_t usable(uint64_t address) { return address < ADDRESS_LIMIT ? address : 0; }

    bool take(uint64_t size) {
        if (capacity_ && (size > capacity_ || used_ > capacity_ - size)) return false;
        used_ += size;
        return true;
    }

    uint64_t capacity_;
    uint64_t used_ = 0;
    uint64_t next_segment_ = FIRST_SEGMENT;
    uint64_t next_reservation_ = FIRST_RESERVATION;
    bool simulated_;
    kvobs_device callbacks_{};
};

}  // namespace kvobs
