// One virtual device: the allocator core over an address space, with PyTorch's statistics and history.
#pragma once

#include <array>
#include <chrono>
#include <mutex>
#include <set>
#include <unordered_map>

#include "allocator.hpp"
#include "history.hpp"
#include "space.hpp"

namespace kvobs::vgpu {

using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

constexpr int MOST_BOUNDS = 64;

// Counts of allocations by how long they took: bucket i holds those of at most bounds[i] ns.
struct Timing {
    std::array<uint64_t, MOST_BOUNDS + 1> counts{};
    uint64_t sum_ns = 0, allocations = 0, frees = 0, allocated_bytes = 0, freed_bytes = 0;
};

// What an allocation came to.
struct Grant {
    uint64_t address = 0;
    bool host_failed = false;
    uint64_t free_bytes = 0, allowed_bytes = 0, reserved = 0, allocated = 0;  // only where there was no memory
};

class VirtualDevice : private Listener {
public:
    VirtualDevice(int index, uint64_t capacity, const Settings &settings)
        : index(index), space_(capacity), callbacks_(space_.callbacks()), core_(settings, capacity, &callbacks_) {
        core_.listen(this);
    }

    const int index;
    std::mutex mutex;  // held around every call below; Python never runs under it

    bool usable() const { return space_.usable(); }
    Space &space() { return space_; }
    Allocator &core() { return core_; }
    History &history() { return history_; }
    const Timing &timing() const { return timing_; }
    const DeviceStats &statistics() const { return statistics_; }

    // Change every statistic; `counters`: and begin the plain counters anew.
    template <class Change> void reset(Change one, bool counters) {
        DeviceStats &all = statistics_;
        for (StatArray *stats : {&all.allocation, &all.segment, &all.active, &all.inactive_split, &all.allocated_bytes,
                                 &all.reserved_bytes, &all.active_bytes, &all.inactive_split_bytes, &all.requested_bytes})
            for (Stat &stat : *stats) one(stat);
        for (auto &entry : all.reserved_bytes_by_private_pools)
            for (Stat &stat : entry.second) one(stat);
        one(all.oversize_allocations);
        one(all.oversize_segments);
        if (!counters) return;
        retries_before_ = core_.stats().retries;
        syncs_before_ = core_.stats().syncs;
        all.num_ooms = all.num_device_alloc = all.num_device_free = 0;
        count_core();
    }

    Grant alloc(uint64_t size, int64_t stream, int64_t pool, Context context,
                std::chrono::steady_clock::time_point began, const std::vector<uint64_t> &bounds) {
        asking_ = history_.recording() ? std::move(context) : nullptr;
        space_.forget_failure();  // that of a request which found room in the end
        Grant grant;
        const Block *block = core_.alloc(size, stream, pool);
        if (block) {
            grant.address = block->address;
            live_[block->address] = {const_cast<Block *>(block), history_.level() >= STATE ? asking_ : nullptr};
            history_.add(ALLOC, block->address, size, stream, pool, asking_);
            time(began, block->size, bounds);
        } else {
            grant.host_failed = space_.host_failed();
            grant.free_bytes = space_.capacity() - space_.used();
            const double share = core_.settings().memory_fraction;
            const double whole = static_cast<double>(space_.capacity());
            grant.allowed_bytes = share < 0 ? space_.capacity() : static_cast<uint64_t>(share * whole);
            grant.reserved = static_cast<uint64_t>(core_.stats().reserved);
            grant.allocated = static_cast<uint64_t>(core_.stats().allocated);
            if (!grant.host_failed) {
                ++statistics_.num_ooms;
                history_.add(OOM, grant.free_bytes, round_size(core_.settings(), size), stream, pool, asking_);
            }
        }
        count_core();
        asking_ = nullptr;
        return grant;
    }

    void free(uint64_t address, Context context) {
        const auto found = live_.find(address);
        if (found == live_.end()) return;
        Block *block = found->second.block;
        ++timing_.frees;
        timing_.freed_bytes += block->size;
        asking_ = history_.level() >= ALL ? std::move(context) : nullptr;
        history_.add(FREE_REQUESTED, address, block->requested, block->stream, block->pool->id,
                     asking_ ? asking_ : found->second.context);
        const std::vector<int64_t> uses = block->uses;
        core_.free(block);
        for (int64_t stream : uses)
            if (!held_.count(stream)) core_.advance(stream);
        asking_ = nullptr;
    }

    void record_stream(uint64_t address, int64_t stream) {
        const auto found = live_.find(address);
        if (found != live_.end() && found->second.block->allocated) core_.record_stream(found->second.block, stream);
    }

    // A held stream has work to do until it is let go; every other one has done its work at once.
    void hold(int64_t stream) { held_.insert(stream); }
    void let_go(int64_t stream) {
        held_.erase(stream);
        core_.advance(stream);
    }
    void let_all_go() {
        const std::set<int64_t> held = held_;
        for (int64_t stream : held) let_go(stream);
    }
    bool busy(int64_t stream) const { return held_.count(stream) != 0; }

    void empty_cache(Context context) {
        asking_ = history_.level() >= ALL ? std::move(context) : nullptr;
        core_.empty_cache();
        count_core();
        asking_ = nullptr;
    }

    Context context_of(uint64_t address) const {
        const auto found = live_.find(address);
        return found == live_.end() ? nullptr : found->second.context;
    }
    Context segment_context(uint64_t address) const {
        const auto found = segments_.find(address);
        return found == segments_.end() ? nullptr : found->second;
    }

private:
    struct Live {
        Block *block;
        Context context;
    };

    static void change(Stat &stat, int64_t by) {
        if (by > 0) stat.increase(static_cast<size_t>(by));
        else if (by < 0) stat.decrease(static_cast<size_t>(-by));
    }
    static void change(StatArray &stats, bool small, int64_t by) {
        change(stats[0], by);
        change(stats[small ? 1 : 2], by);
    }
    bool oversize(uint64_t size) const { return size >= core_.settings().max_split_size; }

    void taken(const Block &block, bool was_split, uint64_t rest) override {
        const bool small = block.pool->small;
        if (!block.range) {
            if (rest && was_split) {
                change(statistics_.inactive_split_bytes, small, -static_cast<int64_t>(block.size));
            } else if (rest) {
                change(statistics_.inactive_split_bytes, small, static_cast<int64_t>(rest));
                change(statistics_.inactive_split, small, 1);
            } else if (was_split) {
                change(statistics_.inactive_split_bytes, small, -static_cast<int64_t>(block.size));
                change(statistics_.inactive_split, small, -1);
            }
        }
        change(statistics_.allocation, small, 1);
        change(statistics_.allocated_bytes, small, static_cast<int64_t>(block.size));
        change(statistics_.active, small, 1);
        change(statistics_.active_bytes, small, static_cast<int64_t>(block.size));
        change(statistics_.requested_bytes, small, static_cast<int64_t>(block.requested));
        if (oversize(block.size)) statistics_.oversize_allocations.increase(1);
    }

    void given_back(const Block &block) override {
        change(statistics_.allocation, block.pool->small, -1);
        change(statistics_.allocated_bytes, block.pool->small, -static_cast<int64_t>(block.size));
        if (oversize(block.size) && statistics_.oversize_allocations.current)
            statistics_.oversize_allocations.decrease(1);
    }

    void freed(const Block &block, uint64_t address, uint64_t size, int64_t parts, int64_t part_bytes) override {
        const bool small = block.pool->small;
        const auto found = live_.find(address);
        if (found != live_.end()) {
            history_.add(FREE_COMPLETED, address, block.requested, block.stream, block.pool->id,
                         asking_ ? asking_ : found->second.context);
            live_.erase(found);
        }
        if (!block.range) {
            change(statistics_.inactive_split, small, parts);
            change(statistics_.inactive_split_bytes, small, part_bytes);
        }
        change(statistics_.active, small, -1);
        change(statistics_.active_bytes, small, -static_cast<int64_t>(size));
        change(statistics_.requested_bytes, small, -static_cast<int64_t>(block.requested));
    }

    void grew(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) override {
        ++statistics_.num_device_alloc;
        if (!mapped) {
            change(statistics_.segment, pool.small, 1);
            if (oversize(size)) statistics_.oversize_segments.increase(1);
            if (asking_) segments_[address] = asking_;
        }
        reserved(pool, static_cast<int64_t>(size));
        history_.add(mapped ? SEGMENT_MAP : SEGMENT_ALLOC, address, size, stream, pool.id, asking_);
    }

    void shrank(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) override {
        ++statistics_.num_device_free;
        if (!mapped) {
            change(statistics_.segment, pool.small, -1);
            if (oversize(size) && statistics_.oversize_segments.current)
                statistics_.oversize_segments.decrease(1);
            segments_.erase(address);
        }
        reserved(pool, -static_cast<int64_t>(size));
        history_.add(mapped ? SEGMENT_UNMAP : SEGMENT_FREE, address, size, stream, pool.id, asking_);
    }

    void reserved(const Pool &pool, int64_t by) {
        change(statistics_.reserved_bytes, pool.small, by);
        if (!pool.id) return;
        const c10::MempoolId_t id{0, static_cast<c10::CaptureId_t>(pool.id)};
        change(statistics_.reserved_bytes_by_private_pools[id], pool.small, by);
    }

    void count_core() {
        const kvobs_stats &found = core_.stats();
        statistics_.num_alloc_retries = found.retries - retries_before_;
        statistics_.num_sync_all_streams = found.syncs - syncs_before_;
        statistics_.max_split_size = static_cast<int64_t>(core_.settings().max_split_size);
    }

    void time(std::chrono::steady_clock::time_point began, uint64_t size, const std::vector<uint64_t> &bounds) {
        const uint64_t took = static_cast<uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count());
        size_t bucket = 0;
        while (bucket < bounds.size() && took > bounds[bucket]) ++bucket;
        ++timing_.counts[bucket];
        timing_.sum_ns += took;
        ++timing_.allocations;
        timing_.allocated_bytes += size;
    }

    Space space_;
    kvobs_device callbacks_;
    Allocator core_;
    History history_;
    DeviceStats statistics_;
    Timing timing_;
    int64_t retries_before_ = 0, syncs_before_ = 0;
    Context asking_;
    std::unordered_map<uint64_t, Live> live_;         // by address: allocated, or pending
    std::unordered_map<uint64_t, Context> segments_;  // stacks of whole segments
    std::set<int64_t> held_;
};

}  // namespace kvobs::vgpu
