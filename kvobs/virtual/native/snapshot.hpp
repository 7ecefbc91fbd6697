// The state and history of a device in columns, for Python to read without a header of its own.
#pragma once

#include <map>
#include <unordered_map>

#include "registry.hpp"

namespace kvobs::vgpu {

struct Columns {
    // stack: a number into the tracebacks, -1 for none
    struct SegmentRow { int64_t address, size, stream, pool, small, expandable, blocks, stack; };
    struct BlockRow { int64_t address, size, requested, state, stack; };
    struct EventRow { int64_t action, address, size, stream, pool, time_us, stack; };
    struct FrameRow { int64_t code, offset; };  // a code object of Python, and the instruction in it

    std::vector<SegmentRow> segments;
    std::vector<BlockRow> blocks;
    std::vector<EventRow> events;
    std::vector<FrameRow> frames;
    std::vector<int64_t> stack_ends, stack_frames;  // stacks one behind the other: where each ends, and its frames
    std::vector<Context> contexts;  // the code objects live as long
    VirtualDevice *device = nullptr;

    // Under the lock, which a fork waits for: letting stacks go takes a lock of torch's, and a child must not inherit it.
    ~Columns() {
        if (!device) return;
        Locked lock(*device);
        contexts.clear();
    }
};

class Taker {
public:
    void take(VirtualDevice &device, bool with_events, Columns &found) {
        found.device = &device;
        std::vector<Event> events;
        {
            Locked lock(device);
            if (with_events) {
                // As PyTorch does it: the events, and then one for the snapshot, which the next one has.
                events = device.history().in_order();
                const uint64_t active = static_cast<uint64_t>(device.core().stats().active);
                device.history().add(SNAPSHOT, 0, active, 0, 0, nullptr);
            }
            state(device, found);
        }
        found.events.reserve(events.size());
        for (Event &event : events)
            found.events.push_back({event.action, as_signed(event.address), as_signed(event.size), event.stream,
                                    event.pool, event.time_us, number(std::move(event.context))});
        tell_stacks(found);
        found.contexts = std::move(contexts_);
    }

private:
    static int64_t as_signed(uint64_t value) { return static_cast<int64_t>(value); }

    void state(VirtualDevice &device, Columns &found) {
        for (const Block *head : device.core().heads()) {
            int64_t size = 0, count = 0;
            for (const Block *block = head; block && block->mapped; block = block->next) {
                const int64_t state = block->allocated ? KVOBS_ALLOCATED : block->idle() ? KVOBS_INACTIVE : KVOBS_PENDING;
                // As in PyTorch's, a free block still has what was last asked of it.
                found.blocks.push_back({as_signed(block->address), as_signed(block->size),
                                        as_signed(block->requested), state,
                                        block->idle() ? -1 : number(device.context_of(block->address))});
                size += as_signed(block->size);
                ++count;
            }
            found.segments.push_back({as_signed(head->address), size, head->stream, head->pool->id, head->pool->small,
                                      head->range != nullptr, count, number(device.segment_context(head->address))});
        }
    }

    int64_t number(Context context) {
        if (!context) return -1;
        const auto [place, made] = numbers_.try_emplace(context.get(), static_cast<int64_t>(contexts_.size()));
        if (made) contexts_.push_back(std::move(context));
        return place->second;
    }

    void tell_stacks(Columns &found) const {
        std::map<std::pair<void *, int>, int64_t> known;
        for (const Context &context : contexts_) {
            for (const Frame &frame : context->frames) {
                const auto [place, made] = known.try_emplace({frame.code, frame.lasti},
                                                             static_cast<int64_t>(found.frames.size()));
                if (made) found.frames.push_back({reinterpret_cast<int64_t>(frame.code), frame.lasti});
                found.stack_frames.push_back(place->second);
            }
            found.stack_ends.push_back(static_cast<int64_t>(found.stack_frames.size()));
        }
    }

    std::vector<Context> contexts_;
    std::unordered_map<const void *, int64_t> numbers_;
};

}  // namespace kvobs::vgpu
