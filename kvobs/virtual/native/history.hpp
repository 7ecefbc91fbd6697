// The history of one device, as PyTorch's allocator records it: a ring of events with the stacks that caused them.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <ctime>
#include <memory>
#include <vector>

namespace kvobs::vgpu {

using Frame = torch::CapturedTraceback::PyFrame;

// Stands in torch's list of what gathers Python's frames, so that torch's own can be reached, and gathers none.
struct Listed final : torch::CapturedTraceback::Python {
    bool canGather() override { return true; }
    std::vector<Frame> gather() override { return {}; }
    void release(std::vector<Frame> &) override {}
    void appendSymbolized(const std::vector<Frame> &, torch::SymbolizedTracebacks &) override {}
    int traverse(std::vector<Frame> &, torch::CapturedTraceback::visitproc, void *) override { return 0; }
    int clear(std::vector<Frame> &) override { return 0; }
};

// Null until torch has one.
inline torch::CapturedTraceback::Python *unwinder() {
    static Listed *const own = [] {
        auto *made = new Listed;  // torch keeps it for ever
        torch::CapturedTraceback::addPythonUnwinder(made);
        return made;
    }();
    return own->next_;
}

// A stack of Python. Not torch's own kind, since torch imports its compiler to tell the names and lines of that.
struct Stack {
    std::vector<Frame> frames;  // innermost first; each has a reference to its code

    explicit Stack(std::vector<Frame> &&gathered) : frames(std::move(gathered)) {}
    Stack(const Stack &) = delete;
    Stack &operator=(const Stack &) = delete;
    ~Stack() {
        if (!frames.empty()) unwinder()->release(frames);  // takes no GIL: torch lets them go when it next gathers
    }
};
using Context = std::shared_ptr<Stack>;

// Takes the GIL: never under a device's lock.
inline Context gather_stack() {
    torch::CapturedTraceback::Python *found = unwinder();
    return found && found->canGather() ? std::make_shared<Stack>(found->gather()) : nullptr;
}

// kvobs/allocator/recording.py numbers them.
enum Action : uint8_t {
    ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM
};

// What stacks are kept for, each including those before; torch's RecordContext.
enum Level : int { NOTHING, STATE, ALLOCS, ALL };

struct Event {
    Action action;
    uint64_t address, size;
    int64_t stream, pool, time_us;
    Context context;
};

inline int64_t microseconds() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return int64_t{1000000} * now.tv_sec + now.tv_nsec / 1000;
}

class History {
public:
    bool recording() const { return recording_; }
    Level level() const { return level_; }

    void start(bool recording, Level level, uint64_t most) {
        recording_ = recording;
        level_ = level;
        most_ = most > 0 ? most : 1;
        if (ring_.size() > most_) {
            std::vector<Event> kept = in_order();
            ring_.assign(std::make_move_iterator(kept.end() - static_cast<int64_t>(most_)),
                         std::make_move_iterator(kept.end()));
            next_ = 0;
        } else if (next_) {
            ring_ = in_order();
            next_ = 0;
        }
    }

    void clear() {
        ring_.clear();
        next_ = 0;
    }

    void add(Action action, uint64_t address, uint64_t size, int64_t stream, int64_t pool, Context context) {
        if (!recording_) return;
        Event event{action, address, size, stream, pool, microseconds(), level_ >= ALLOCS ? std::move(context) : nullptr};
        if (ring_.size() < most_) {
            ring_.push_back(std::move(event));
        } else {
            ring_[next_] = std::move(event);
            if (++next_ == most_) next_ = 0;
        }
    }

    std::vector<Event> in_order() const {
        std::vector<Event> found(ring_.begin() + static_cast<int64_t>(next_), ring_.end());
        found.insert(found.end(), ring_.begin(), ring_.begin() + static_cast<int64_t>(next_));
        return found;
    }

private:
    bool recording_ = false;
    Level level_ = NOTHING;
    uint64_t most_ = 1, next_ = 0;
    std::vector<Event> ring_;
};

}  // namespace kvobs::vgpu
