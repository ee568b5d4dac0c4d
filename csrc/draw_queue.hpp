// Who gets the next rollout, exactly, although every priority moves with T at each draw: among prompts
// of equal n the order does not depend on T, so there is one heap per n and only the heads are compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace xrpo {

class DrawQueue {
  public:
    struct Head {
        double priority;
        std::uint64_t tie;
        std::int32_t prompt;
        bool before(const Head& other) const noexcept {
            if (priority != other.priority) return priority > other.priority;
            return tie != other.tie ? tie < other.tie : prompt < other.prompt;
        }
    };

    void reset(std::size_t num_prompts) {
        for (auto& heap : heaps_) heap.clear();
        version_.assign(num_prompts, 0);
        lowest_ = heaps_.size();
    }

    // Enters a prompt with n rollouts; an older entry of the same prompt is void from now on.
    void push(std::int32_t prompt, std::int64_t n, double key, std::uint64_t tie) {
        const auto level = static_cast<std::size_t>(n);
        if (level >= heaps_.size()) heaps_.resize(level + 1);
        lowest_ = std::min(lowest_, level);
        auto& heap = heaps_[level];
        heap.push_back({key, tie, prompt, ++version_[static_cast<size_t>(prompt)]});
        std::push_heap(heap.begin(), heap.end(), later);
    }

    void remove(std::int32_t prompt) noexcept { ++version_[static_cast<size_t>(prompt)]; }

    // The head with the largest priority(n, key); none when the queue is empty.
    template <class Priority>
    std::optional<Head> best(const Priority& priority) {
        std::optional<Head> found;
        while (lowest_ < heaps_.size() && drop_void(heaps_[lowest_])) ++lowest_;
        for (std::size_t n = lowest_; n < heaps_.size(); ++n) {
            if (drop_void(heaps_[n])) continue;
            const Entry& entry = heaps_[n].front();
            const Head head{priority(static_cast<std::int64_t>(n), entry.key), entry.tie, entry.prompt};
            if (!found || head.before(*found)) found = head;
        }
        return found;
    }

  private:
    struct Entry {
        double key;
        std::uint64_t tie;
        std::int32_t prompt;
        std::uint32_t version;
    };

    static bool later(const Entry& a, const Entry& b) noexcept {
        if (a.key != b.key) return a.key < b.key;
        return a.tie != b.tie ? a.tie > b.tie : a.prompt > b.prompt;
    }

    // Drops void heads; true when the heap is then empty.
    bool drop_void(std::vector<Entry>& heap) {
        while (!heap.empty() &&
               heap.front().version != version_[static_cast<size_t>(heap.front().prompt)]) {
            std::pop_heap(heap.begin(), heap.end(), later);
            heap.pop_back();
        }
        return heap.empty();
    }

    std::vector<std::vector<Entry>> heaps_;
    std::vector<std::uint32_t> version_;
    std::size_t lowest_ = 0;
};

}  // namespace xrpo
