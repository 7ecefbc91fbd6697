// The state and history of a device in columns, for Python to read without a header of its own.
#pragma once

#include <unordered_map>

#include "registry.hpp"

namespace kvobs::vgpu {

struct Columns {
    // stack: a number into the tracebacks, -1 for none
    struct SegmentRow { int64_t address, size, stream, pool, small, expandable, blocks, stack; };
    struct BlockRow { int64_t address, size, requested, state, stack; };
    struct EventRow { int64_t action, address, size, stream, pool, time_us, stack; };
    struct FrameRow { int64_t file, name, line; };  // positions in `text`

    std::vector<SegmentRow> segments;
    std::vector<BlockRow> blocks;
    std::vector<EventRow> events;
    std::vector<FrameRow> frames;
    std::vector<int64_t> stack_ends, stack_frames;  // tracebacks one behind the other: where each ends, and its frames
    std::string text;  // every text with its end, '\0'
};

class Taker {
public:
    Columns take(VirtualDevice &device, bool with_events) {
        Columns found;
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
        resolve(found);
        return found;
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

    void resolve(Columns &found) const {
        std::vector<torch::CapturedTraceback *> stacks;
        stacks.reserve(contexts_.size());
        for (const Context &context : contexts_) stacks.push_back(static_cast<torch::CapturedTraceback *>(context.get()));
        const torch::SymbolizedTracebacks told = torch::symbolize(stacks);
        std::unordered_map<std::string, int64_t> places;
        const auto place = [&](const std::string &text) {
            const auto [at, made] = places.try_emplace(text, static_cast<int64_t>(found.text.size()));
            if (made) found.text.append(text).push_back('\0');
            return at->second;
        };
        for (const auto &frame : told.all_frames)
            found.frames.push_back({place(frame.filename), place(frame.funcname), static_cast<int64_t>(frame.lineno)});
        for (const auto &trace : told.tracebacks) {
            for (uint64_t frame : trace) found.stack_frames.push_back(as_signed(frame));
            found.stack_ends.push_back(static_cast<int64_t>(found.stack_frames.size()));
        }
    }

    std::vector<Context> contexts_;
    std::unordered_map<const void *, int64_t> numbers_;
};

}  // namespace kvobs::vgpu
