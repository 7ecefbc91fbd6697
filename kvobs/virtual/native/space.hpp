// The addresses of one virtual device, and the host's memory behind those that are in use.
#pragma once

#include <sys/mman.h>

#include <deque>
#include <iterator>
#include <map>

#include "settings.hpp"

namespace kvobs::vgpu {

// How long the calls of a driver take; 0: no time is spent. Modelled, from the profile that kvobs/virtual names.
struct Latencies {
    uint64_t malloc_ns = 0, free_ns = 0, map_page_ns = 0, unmap_page_ns = 0;
    bool any() const { return malloc_ns || free_ns || map_page_ns || unmap_page_ns; }
};

void pass_time(uint64_t ns);  // busy for the last part, so that it is met within microseconds

// Segments take the lowest address where they fit, so that a program gets the same addresses, counted from the
// beginning of the space, in every run. Memory of the host is used only where something was written.
class Space {
public:
    explicit Space(uint64_t capacity)
        : capacity_(capacity), size_(round_up(64 * capacity, ROUND_LARGE) + (uint64_t{1} << 40)) {
        void *found = mmap(nullptr, size_ + ROUND_LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return;
        found_ = found;
        base_ = round_up(reinterpret_cast<uint64_t>(found), ROUND_LARGE);
        madvise(found, size_, MADV_DONTDUMP);
        holes_[0] = size_;
    }
    ~Space() {  // only of a device that could not be set up with the others
        if (found_) munmap(found_, size_ + ROUND_LARGE);
    }
    Space(const Space &) = delete;
    Space &operator=(const Space &) = delete;

    bool usable() const { return base_ != 0; }
    uint64_t base() const { return base_; }
    uint64_t capacity() const { return capacity_; }
    uint64_t used() const { return used_; }
    bool holds(uint64_t address) const { return address - base_ < size_; }
    // The host had no memory or no mappings left, which the device's owner must be told: it is no device that is full.
    bool host_failed() const { return host_failed_; }
    void forget_failure() { host_failed_ = false; }

    // For tests: where the next segments go, counted from the beginning of the space.
    void plan(const uint64_t *offsets, int64_t count) { planned_.assign(offsets, offsets + count); }
    Latencies latencies;

    kvobs_device callbacks() {
        return {this, &on_malloc, &on_free, &on_reserve, &on_unreserve, &on_map, &on_unmap};
    }

private:
    static Space &self(void *user) { return *static_cast<Space *>(user); }
    static uint64_t on_malloc(void *user, uint64_t size) { return self(user).malloc(size); }
    static void on_free(void *user, uint64_t address, uint64_t size) { self(user).free(address, size); }
    static uint64_t on_reserve(void *user, uint64_t size) { return self(user).reserve(size); }
    static void on_unreserve(void *user, uint64_t address, uint64_t size) { self(user).give_addresses(address, size); }
    static int on_map(void *user, uint64_t address, uint64_t size) { return self(user).map(address, size); }
    static void on_unmap(void *user, uint64_t address, uint64_t size) { self(user).unmap(address, size); }

    uint64_t malloc(uint64_t size) {
        pass_time(latencies.malloc_ns);
        if (size > capacity_ || used_ > capacity_ - size) return 0;
        const uint64_t address = take_addresses(size);
        if (!address) {
            host_failed_ = true;
            return 0;
        }
        if (!commit(address, size)) {
            give_addresses(address, size);
            return 0;
        }
        used_ += size;
        return address;
    }

    void free(uint64_t address, uint64_t size) {
        pass_time(latencies.free_ns);
        decommit(address, size);
        give_addresses(address, size);
        used_ -= size;
    }

    uint64_t reserve(uint64_t size) {
        const uint64_t address = take_addresses(size);
        if (!address) host_failed_ = true;
        return address;
    }

    bool map(uint64_t address, uint64_t size) {
        if (size > capacity_ || used_ > capacity_ - size) return false;
        pass_time(latencies.map_page_ns * (size / SMALL_SEGMENT));
        if (!commit(address, size)) return false;
        used_ += size;
        return true;
    }

    void unmap(uint64_t address, uint64_t size) {
        pass_time(latencies.unmap_page_ns * (size / SMALL_SEGMENT));
        decommit(address, size);
        used_ -= size;
    }

    bool commit(uint64_t address, uint64_t size) {
        const bool done = mmap(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
        if (!done) host_failed_ = true;
        return done;
    }

    void decommit(uint64_t address, uint64_t size) {
        void *at = reinterpret_cast<void *>(address);
        if (mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
            madvise(at, size, MADV_DONTNEED);  // no mappings left: the memory goes back all the same
    }

    uint64_t take_addresses(uint64_t size) {
        size = round_up(size, ROUND_LARGE);
        if (!planned_.empty()) {
            const uint64_t offset = planned_.front();
            planned_.pop_front();
            return carve(offset, size) ? base_ + offset : 0;
        }
        for (const auto &hole : holes_)
            if (hole.second >= size) {
                const uint64_t offset = hole.first;
                carve(offset, size);
                return base_ + offset;
            }
        return 0;
    }

    bool carve(uint64_t offset, uint64_t size) {
        auto hole = holes_.upper_bound(offset);
        if (hole == holes_.begin()) return false;
        --hole;
        const uint64_t start = hole->first, end = start + hole->second;
        if (offset + size > end) return false;
        holes_.erase(hole);
        if (offset > start) holes_[start] = offset - start;
        if (end > offset + size) holes_[offset + size] = end - offset - size;
        return true;
    }

    void give_addresses(uint64_t address, uint64_t size) {
        uint64_t offset = address - base_;
        size = round_up(size, ROUND_LARGE);
        auto next = holes_.upper_bound(offset);
        if (next != holes_.end() && next->first == offset + size) {
            size += next->second;
            next = holes_.erase(next);
        }
        if (next != holes_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == offset) {
                before->second += size;
                return;
            }
        }
        holes_[offset] = size;
    }

    uint64_t capacity_, size_, base_ = 0, used_ = 0;
    void *found_ = nullptr;  // where the system put it, before the base was rounded
    bool host_failed_ = false;
    std::map<uint64_t, uint64_t> holes_;  // free addresses: offset, size
    std::deque<uint64_t> planned_;
};

}  // namespace kvobs::vgpu
