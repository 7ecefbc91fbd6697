// What kvobs/virtual/_library.py calls. A function that returns int returns 0, or -1 and kvobs_vgpu_error says why.
#pragma once

#include "snapshot.hpp"
#include "torch_allocator.hpp"
#include "guard.hpp"

namespace kvobs::vgpu {

inline thread_local std::string last_error;

template <class Change> int told(Change change) {
    try {
        change();
        return 0;
    } catch (const c10::Error &error) {
        last_error = error.what_without_backtrace();
    } catch (const std::exception &error) {
        last_error = error.what();
    }
    return -1;
}

template <class Change> int with(int device, Change change) {
    return told([&] {
        VirtualDevice &found = registry().at(device);
        Locked lock(found);
        change(found);
    });
}

inline void set_up(int count, const uint64_t *capacities, int bounds, const uint64_t *bounds_ns) {
    Registry &all = registry();
    TORCH_CHECK(all.devices.empty(), "The virtual devices are set up already.");
    TORCH_CHECK(count > 0 && count <= MOST_DEVICES && bounds <= MOST_BOUNDS, "From 1 to ", MOST_DEVICES,
                " devices are allowed.");
    std::vector<std::unique_ptr<VirtualDevice>> made;
    for (int i = 0; i < count; ++i) {
        made.push_back(std::make_unique<VirtualDevice>(i, capacities[i], parsed_settings(-1.0)));
        TORCH_CHECK(made.back()->usable(), "The host has no addresses for a virtual device of ",
                    size_text(capacities[i]), "; 64 times as much are reserved (ulimit -v).");
    }
    unwinder();
    all.bounds.assign(bounds_ns, bounds_ns + bounds);
    all.devices = std::move(made);
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(TYPE, &torch_allocator());
    follow_settings();
    pthread_atfork(&lock_all, &unlock_all, &unlock_all);
}

}  // namespace kvobs::vgpu

using namespace kvobs::vgpu;

extern "C" {

const char *kvobs_vgpu_error() { return last_error.c_str(); }

int kvobs_vgpu_setup(int count, const uint64_t *capacities, int bounds, const uint64_t *bounds_ns) {
    return told([&] { set_up(count, capacities, bounds, bounds_ns); });
}

int kvobs_vgpu_history(int device, int recording, int level, uint64_t most, int clear) {
    return with(device, [&](VirtualDevice &found) {
        if (clear) found.history().clear();
        found.history().start(recording != 0, static_cast<Level>(level), most);
    });
}

int kvobs_vgpu_records(int device) {
    int recording = 0;
    with(device, [&](VirtualDevice &found) { recording = found.history().recording(); });
    return recording;
}

// The share of the device that may be reserved; below zero: all of it, which is not the same as 1, with which garbage is
// collected.
int kvobs_vgpu_set_fraction(int device, double share) {
    return told([&] {
        Registry &all = registry();
        VirtualDevice &found = all.at(device);
        std::lock_guard<std::mutex> lock(found.mutex);
        all.fraction[static_cast<size_t>(device)] = share;
        found.core().set(parsed_settings(share));
    });
}

// The settings in effect. What torch's own text of them says is not all: two options outlive a text without them.
int kvobs_vgpu_settings(int device, kvobs_settings *settings) {
    return with(device, [&](VirtualDevice &found) { *settings = found.core().settings(); });
}

int kvobs_vgpu_hold(int device, int64_t stream, int on) {
    return with(device, [&](VirtualDevice &found) { on ? found.hold(stream) : found.let_go(stream); });
}

int kvobs_vgpu_latencies(int device, const uint64_t *four) {
    return with(device, [&](VirtualDevice &found) { found.space().latencies = {four[0], four[1], four[2], four[3]}; });
}

int kvobs_vgpu_plan(int device, const uint64_t *offsets, int64_t count) {
    return with(device, [&](VirtualDevice &found) { found.space().plan(offsets, count); });
}

uint64_t kvobs_vgpu_base(int device) {
    uint64_t base = 0;
    with(device, [&](VirtualDevice &found) { base = found.space().base(); });
    return base;
}

uint64_t kvobs_vgpu_largest_free(int device) {
    uint64_t largest = 0;
    with(device, [&](VirtualDevice &found) { largest = found.core().largest_free(); });
    return largest;
}

// counts: one more than there are bounds; totals: allocations, frees, bytes of both, ns of all.
int kvobs_vgpu_timing(int device, uint64_t *counts, uint64_t *totals) {
    return with(device, [&](VirtualDevice &found) {
        const Timing &timing = found.timing();
        std::copy_n(timing.counts.begin(), registry().bounds.size() + 1, counts);
        const uint64_t sums[] = {timing.allocations, timing.frees, timing.allocated_bytes, timing.freed_bytes,
                                 timing.sum_ns};
        std::copy_n(sums, 5, totals);
    });
}

// Copies so far from one device to another, -1 being the host.
void kvobs_vgpu_copies(int source, int sink, uint64_t *count_and_bytes) {
    const Copies &found = registry().copies[static_cast<size_t>(source + 1)][static_cast<size_t>(sink + 1)];
    count_and_bytes[0] = found.count.load();
    count_and_bytes[1] = found.bytes.load();
}

void kvobs_vgpu_observe(OomObserver observer) { registry().observer.store(observer); }

// The pool that the calling thread's requests go to; 0: the default one. Returns the one before.
int64_t kvobs_vgpu_enter_pool(int device, int64_t pool) {
    int64_t &now = current.pool[static_cast<size_t>(device)];
    const int64_t before = now;
    now = pool;
    return before;
}

int kvobs_vgpu_open_pool(int device, int64_t pool) {
    return with(device, [&](VirtualDevice &found) { found.core().open_pool(pool); });
}

int kvobs_vgpu_release_pool(int device, int64_t pool) {
    return with(device, [&](VirtualDevice &found) { found.core().release_pool(pool); });
}

// Columns of a snapshot, to be freed by kvobs_vgpu_drop; null where it failed.
Columns *kvobs_vgpu_snapshot(int device, int with_events) {
    auto made = std::make_unique<Columns>();
    return told([&] { Taker().take(registry().at(device), with_events != 0, *made); }) ? nullptr : made.release();
}

void kvobs_vgpu_drop(Columns *columns) { delete columns; }

// A column by its number, in the order of Columns, and how many numbers are in it.
const void *kvobs_vgpu_column(const Columns *columns, int number, int64_t *length) {
    const auto numbers = [length](const auto &rows) -> const void * {
        *length = static_cast<int64_t>(rows.size() * sizeof(rows[0]) / sizeof(int64_t));
        return rows.data();
    };
    switch (number) {
        case 0: return numbers(columns->segments);
        case 1: return numbers(columns->blocks);
        case 2: return numbers(columns->events);
        case 3: return numbers(columns->frames);
        case 4: return numbers(columns->stack_ends);
        default: return numbers(columns->stack_frames);
    }
}

// Mean ns, of the thread's CPU time, of an allocation and its free through torch's allocator, of a live set that is
// replaced one by one.
double kvobs_vgpu_measure(int device, int64_t pairs, const uint64_t *sizes, int64_t count) {
    exchange_device(device);
    std::vector<c10::DataPtr> held(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) held[static_cast<size_t>(i)] = torch_allocator().allocate(sizes[i]);
    const auto now = [] {
        timespec found;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &found);
        return 1e9 * static_cast<double>(found.tv_sec) + static_cast<double>(found.tv_nsec);
    };
    const double began = now();
    for (int64_t i = 0; i < pairs; ++i) {
        const size_t at = static_cast<size_t>(i * 7 % count);
        held[at].clear();
        held[at] = torch_allocator().allocate(sizes[at]);
    }
    return (now() - began) / static_cast<double>(pairs);
}

}  // extern "C"
