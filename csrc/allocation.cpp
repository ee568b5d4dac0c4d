// Who gets the next rollouts: the planner's phases, and one rollout at a time.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "planner.hpp"

namespace xrpo {

bool RolloutPlanner::is_done() const noexcept {
    if (options_.allocation != Allocation::dapo) return state_.handed_out >= state_.total;
    return state_.round > 0 && (state_.round > options_.rounds || num_groups_missing() <= 0 ||
                                num_groups_started() == num_prompts());
}

bool RolloutPlanner::plan_round(bool allow_partial, std::int64_t* counts) {
    if (is_done()) {
        std::fill(counts, counts + num_prompts(), 0);
        return true;
    }
    if (state_.observed < state_.handed_out && !allow_partial) return false;
    const std::int64_t round = state_.round++;
    if (options_.allocation == Allocation::dapo) plan_dapo(counts);
    else if (round == 0) plan_first(counts);
    else {
        const std::int64_t budget =
            (state_.total - state_.handed_out) / (options_.rounds - round + 1);
        if (options_.allocation == Allocation::proportional) plan_proportional(budget, counts);
        else plan_greedy(budget, counts);
    }
    are_queues_current_ = false;
    return true;
}

void RolloutPlanner::hand_out(std::size_t q, std::int64_t count) {
    state_.stats.planned[q] += static_cast<std::int32_t>(count);
    state_.handed_out += count;
    if (state_.stats.planned[q] > largest_count_) {
        largest_count_ = state_.stats.planned[q];
        grow_tables(largest_count_ + 1);
    }
}

void RolloutPlanner::hand_out(const std::int64_t* counts) {
    std::array<std::int64_t, MAX_PARTS> given{}, largest{};
    std::int32_t* planned = state_.stats.planned.data();
    in_parts(num_prompts(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        std::int64_t sum = 0;
        std::int32_t top = 0;
        for (std::size_t q = begin; q < end; ++q) {
            sum += counts[q];
            top = std::max(top, planned[q] += static_cast<std::int32_t>(counts[q]));
        }
        given[part] = sum;
        largest[part] = top;
    });
    state_.handed_out = std::accumulate(given.begin(), given.end(), state_.handed_out);
    largest_count_ = std::max(largest_count_, *std::max_element(largest.begin(), largest.end()));
    grow_tables(largest_count_ + 1);
}

// Base rollouts; the uniform rule has no reason to wait and hands out everything.
void RolloutPlanner::plan_first(std::int64_t* counts) {
    if (options_.allocation == Allocation::uniform) {
        weights_.assign(num_prompts(), 1.0);
        share_with_caps(state_.total, counts);
    } else {
        for (std::size_t q = 0; q < num_prompts(); ++q) counts[q] = base_of(q);
    }
    hand_out(counts);
}

void RolloutPlanner::plan_proportional(std::int64_t budget, std::int64_t* counts) {
    if (options_.spread == Spread::pooled || options_.max_rollouts_per_prompt != NO_CAP) {
        fill_priorities();
        share_with_caps(budget, counts);
    } else {
        const double scale = exploration_scale();
        std::vector<double> phi(inverse_roots_);
        for (double& value : phi) value *= scale;
        const double* spreads = spreads_.data();
        const double* reduction = shrinkage_.data();
        const std::int32_t* planned = state_.stats.planned.data();
        const double top = largest_of(spreads_) * *std::max_element(reduction, reduction + phi.size()) +
                           largest_of(phi);
        // After the base all counts are equal, and a loop without look-ups is several times faster.
        if (state_.handed_out == largest_count_ * static_cast<std::int64_t>(num_prompts())) {
            share([spreads, factor = reduction[largest_count_], bonus = phi[largest_count_]](
                      std::size_t q) { return spreads[q] * factor + bonus; }, top, budget, counts);
        } else {
            share([=, phi = phi.data()](std::size_t q) {
                return spreads[q] * reduction[planned[q]] + phi[planned[q]];
            }, top, budget, counts);
        }
    }
    hand_out(counts);
}

// Shares by weight(q) <= top; equally where all are zero.
template <class Weight>
void RolloutPlanner::share(const Weight& weight, double top, std::int64_t budget,
                           std::int64_t* counts) {
    const double sum = order_free_sum(num_prompts(), top, weight);
    if (sum > 0.0) return remainder_.split(weight, top, sum, budget, state_.ties, counts);
    remainder_.split([](std::size_t) { return 1.0; }, 1.0, static_cast<double>(num_prompts()), budget,
                     state_.ties, counts);
}

// Shares by weights_. A prompt over its cap gets just that, and what is left is shared among the others
// by the same rule, until none is over.
void RolloutPlanner::share_with_caps(std::int64_t budget, std::int64_t* counts) {
    const auto weight = [&](std::size_t q) { return weights_[q]; };
    share(weight, largest_of(weights_), budget, counts);
    if (options_.max_rollouts_per_prompt == NO_CAP) return;
    const auto room = [&](std::size_t q) {
        return options_.max_rollouts_per_prompt - state_.stats.planned[q];
    };
    std::vector<char> is_full(num_prompts(), 0);
    for (bool is_over = true; is_over;) {
        is_over = false;
        for (std::size_t q = 0; q < num_prompts(); ++q) {
            if (is_full[q] || counts[q] <= room(q)) continue;
            is_full[q] = is_over = true;
            budget -= room(q);
            weights_[q] = 0.0;
        }
        if (!is_over) break;
        if (!(largest_of(weights_) > 0.0))
            for (std::size_t q = 0; q < num_prompts(); ++q) weights_[q] = !is_full[q];
        share(weight, largest_of(weights_), budget, counts);
    }
    for (std::size_t q = 0; q < num_prompts(); ++q)
        if (is_full[q]) counts[q] = room(q);
}

void RolloutPlanner::plan_greedy(std::int64_t budget, std::int64_t* counts) {
    std::fill(counts, counts + num_prompts(), 0);
    rebuild_queues(false);
    for (; budget > 0; --budget) {
        const std::size_t q = *pick(false);
        hand_out(q, 1);
        ++counts[q];
        enqueue(q, false);
    }
}

// Dynamic sampling: groups of the base size, until enough of them carry signal. Refills come from the
// prompts not used so far, `rounds` times at most, so the step holds that many more prompts.
void RolloutPlanner::plan_dapo(std::int64_t* counts) {
    std::fill(counts, counts + num_prompts(), 0);
    const std::size_t first = num_groups_started();
    const std::size_t last =
        std::min(num_prompts(), first + static_cast<std::size_t>(num_groups_missing()));
    for (std::size_t q = first; q < last; ++q) {
        counts[q] = options_.base_rollouts;
        hand_out(q, counts[q]);
    }
}

std::int64_t RolloutPlanner::num_groups_wanted() const noexcept {
    return std::max<std::int64_t>(
        1, static_cast<std::int64_t>(num_prompts()) / (options_.rounds + 1));
}

std::int64_t RolloutPlanner::num_groups_missing() const noexcept {
    std::int64_t alive = 0;
    for (std::size_t q = 0; q < num_prompts(); ++q) alive += state_.stats.stddev(q) > 0.0;
    return std::max<std::int64_t>(num_groups_wanted() - alive, 0);
}

std::size_t RolloutPlanner::num_groups_started() const noexcept {
    const auto& planned = state_.stats.planned;
    return static_cast<std::size_t>(std::count_if(planned.begin(), planned.end(),
                                                  [](std::int32_t n) { return n > 0; }));
}

void RolloutPlanner::rebuild_queues(bool is_streaming) {
    update_pooled_variance();
    ready_.reset(num_prompts());
    waiting_.reset(num_prompts());
    for (std::size_t q = 0; q < num_prompts(); ++q) enqueue(q, is_streaming);
    are_queues_current_ = true;
}

void RolloutPlanner::enqueue(std::size_t q, bool is_streaming) {
    const auto prompt = static_cast<std::int32_t>(q);
    const std::int64_t n = state_.stats.planned[q] + (is_streaming ? state_.reserved[q] : 0);
    const bool has_room = n < options_.max_rollouts_per_prompt;
    const bool is_ready = !is_streaming || has_base(q);
    grow_tables(n + 1);
    if (has_room && is_ready) ready_.push(prompt, n, key(q, n), state_.ties[q]);
    else ready_.remove(prompt);
    if (!is_streaming) return;
    if (has_room && !is_ready)
        waiting_.push(prompt, n, options_.use_history ? key(q, n) : 0.0, state_.ties[q]);
    else waiting_.remove(prompt);
}

// The prompt with the largest priority. While streaming, prompts whose base results are out compete
// with the typical spread of the others; what they win is kept back for them, so that prompts which
// answer fast cannot spend the share of slow ones.
std::optional<std::size_t> RolloutPlanner::pick(bool is_streaming) {
    const double scale = options_.use_history ? 0.0 : exploration_scale();
    const double typical_spread =
        state_.num_ready > 0 ? std::sqrt(std::max(state_.ready_variance_sum, 0.0) / state_.num_ready)
                             : 0.0;
    const auto priority = [&](std::int64_t n, double key) {
        return options_.use_history ? key : key * shrinkage_[n] + scale * inverse_roots_[n];
    };
    const auto waiting_priority = [&](std::int64_t n, double key) {
        return priority(n, options_.use_history ? key : typical_spread);
    };
    while (state_.handed_out + (is_streaming ? state_.num_reserved : 0) < state_.total) {
        const auto ready = ready_.best(priority);
        if (!ready) return std::nullopt;
        if (is_streaming) {
            const auto waiting = waiting_.best(waiting_priority);
            if (waiting && waiting->before(*ready)) {
                const auto q = static_cast<std::size_t>(waiting->prompt);
                ++state_.reserved[q];
                ++state_.num_reserved;
                enqueue(q, true);
                continue;
            }
        }
        return static_cast<std::size_t>(ready->prompt);
    }
    return std::nullopt;
}

std::optional<std::int64_t> RolloutPlanner::next_prompt() {
    state_.is_streaming_step = true;
    while (base_cursor_ < num_prompts() &&
           state_.stats.planned[base_cursor_] >= base_of(base_cursor_))
        ++base_cursor_;
    if (base_cursor_ < num_prompts()) {
        hand_out(base_cursor_, 1);
        are_queues_current_ = false;
        return static_cast<std::int64_t>(base_cursor_);
    }
    if (state_.handed_out >= state_.total) return std::nullopt;
    if (!are_queues_current_) rebuild_queues(true);
    const auto q = pick(true);
    state_.is_waiting = !q;
    if (!q) return std::nullopt;
    hand_out(*q, 1);
    enqueue(*q, true);
    return static_cast<std::int64_t>(*q);
}

}  // namespace xrpo
