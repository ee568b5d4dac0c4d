// Who gets the next rollout, exactly, although every priority moves with T at each draw: among prompts
// of equal n the order does not depend on T, so there is one queue per n and only the heads are compared.
// Within a plan prompts move from n to n + 1 in order, so a queue is a sorted run, and a heap for the rest.
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
        for (Level& level : levels_) level.clear();
        heads_.assign(levels_.size(), NOBODY);
        version_.assign(num_prompts, 0);
        level_of_.assign(num_prompts, 0);
        lowest_ = levels_.size();
    }

    // Enters a prompt with n rollouts; an older entry of the same prompt is void from now on.
    void push(std::int32_t prompt, std::int64_t n, double key, std::uint64_t tie) {
        remove(prompt);
        const auto level = static_cast<std::size_t>(n);
        if (level >= levels_.size()) {
            levels_.resize(level + 1);
            heads_.resize(level + 1, NOBODY);
        }
        lowest_ = std::min(lowest_, level);
        level_of_[static_cast<std::size_t>(prompt)] = level;
        const Entry entry{key, tie, prompt, version_[static_cast<std::size_t>(prompt)]};
        levels_[level].push(entry);
        if (heads_[level].prompt < 0 || Later{}(heads_[level], entry)) heads_[level] = entry;
    }

    void remove(std::int32_t prompt) {
        const auto q = static_cast<std::size_t>(prompt);
        ++version_[q];
        if (level_of_[q] < heads_.size() && heads_[level_of_[q]].prompt == prompt)
            update_head(level_of_[q]);
    }

    // The head with the largest priority(n, key); none when the queue is empty.
    template <class Priority>
    std::optional<Head> best(const Priority& priority) {
        while (lowest_ < heads_.size() && heads_[lowest_].prompt < 0) ++lowest_;
        if (lowest_ == heads_.size()) return std::nullopt;
        const auto head_at = [&](std::size_t n) {
            return Head{priority(static_cast<std::int64_t>(n), heads_[n].key), heads_[n].tie,
                        heads_[n].prompt};
        };
        Head found = head_at(lowest_);
        for (std::size_t n = lowest_ + 1; n < heads_.size(); ++n) {
            if (heads_[n].prompt < 0) continue;
            const Head head = head_at(n);
            if (head.before(found)) found = head;
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
    static constexpr Entry NOBODY{0.0, 0, -1, 0};

    struct Later {  // a type, so that the heap algorithms inline it
        bool operator()(const Entry& a, const Entry& b) const noexcept {
            if (a.key != b.key) return a.key < b.key;
            return a.tie != b.tie ? a.tie > b.tie : a.prompt > b.prompt;
        }
    };

    struct Level {
        std::vector<Entry> run;  // sorted, the first at `front`
        std::size_t front = 0;
        std::vector<Entry> heap;

        void clear() {
            run.clear();
            heap.clear();
            front = 0;
        }

        void push(const Entry& entry) {
            if (run.empty() || !Later{}(run.back(), entry)) {
                run.push_back(entry);
                return;
            }
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), Later{});
        }

        // The first entry that `is_void` does not hold for; those before it are dropped.
        template <class IsVoid>
        Entry first(const IsVoid& is_void) {
            while (front < run.size() && is_void(run[front])) ++front;
            if (front == run.size()) {
                run.clear();
                front = 0;
            }
            while (!heap.empty() && is_void(heap.front())) {
                std::pop_heap(heap.begin(), heap.end(), Later{});
                heap.pop_back();
            }
            if (run.empty()) return heap.empty() ? NOBODY : heap.front();
            const bool heap_leads = !heap.empty() && Later{}(run[front], heap.front());
            return heap_leads ? heap.front() : run[front];
        }
    };

    void update_head(std::size_t level) {
        heads_[level] = levels_[level].first([&](const Entry& entry) {
            return entry.version != version_[static_cast<std::size_t>(entry.prompt)];
        });
    }

    std::vector<Level> levels_;  // by n
    std::vector<Entry> heads_;   // of the levels, side by side: they are compared at each draw
    std::vector<std::uint32_t> version_;
    std::vector<std::size_t> level_of_;
    std::size_t lowest_ = 0;
};

}  // namespace xrpo
