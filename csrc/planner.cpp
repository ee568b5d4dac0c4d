#include "planner.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace xrpo {

namespace {

// Share of the priorities that exploration takes in the relative mode.
constexpr double RELATIVE_EXPLORATION_SHARE = 0.3;
// A prior that weighs more than this many rollouts is sharp: one base rollout then keeps it honest.
constexpr double SHARP_PRIOR = 8.0;

// E[p^i (1-p)^j] under Beta(a, b).
double beta_moment(double a, double b, std::int64_t i, std::int64_t j) noexcept {
    double moment = 1.0;
    for (std::int64_t k = 0; k < i; ++k) moment *= (a + k) / (a + b + k);
    for (std::int64_t k = 0; k < j; ++k) moment *= (b + k) / (a + b + i + k);
    return moment;
}

}  // namespace

void Statistics::reset(std::size_t num_prompts) {
    for (auto* counts : {&planned, &spent, &scored, &unseeded, &unseeded_wins})
        counts->assign(num_prompts, 0);
    for (auto* sums : {&shift, &sum, &sum_squares}) sums->assign(num_prompts, 0.0);
}

double Statistics::mean(std::size_t q) const noexcept {
    const double n = scored[q];
    return n > 0 ? (n * shift[q] + sum[q]) / n : std::numeric_limits<double>::quiet_NaN();
}

double Statistics::stddev(std::size_t q) const noexcept {
    const double n = scored[q];
    if (n < 2) return 0.0;
    return std::sqrt(std::max(n * sum_squares[q] - sum[q] * sum[q], 0.0) / (n * (n - 1.0)));
}

RolloutPlanner::RolloutPlanner(const PlannerOptions& options)
    : options_(options), shrinkage_(options.confidence) {}

void RolloutPlanner::begin_step(std::int64_t total, std::int64_t step,
                                std::vector<std::uint64_t> ties, Priors priors) {
    PlannerState next;
    next.earlier_rollouts = state_.earlier_rollouts + state_.handed_out;
    next.total = total;
    next.step = step;
    next.reserved.assign(ties.size(), 0);
    next.stats.reset(ties.size());
    next.ties = std::move(ties);
    next.priors = std::move(priors);
    restore(std::move(next));
}

void RolloutPlanner::restore(PlannerState state) {
    state_ = std::move(state);
    spreads_.resize(num_prompts());
    largest_count_ = 0;
    for (std::size_t q = 0; q < num_prompts(); ++q) {
        spreads_[q] = spread(q);
        largest_count_ = std::max<std::int64_t>(largest_count_, state_.stats.planned[q]);
    }
    grow_tables(largest_count_ + 1);
    base_cursor_ = 0;
    are_queues_current_ = false;
}

std::int64_t RolloutPlanner::base_of(std::size_t q) const noexcept {
    if (!options_.use_history) return options_.base_rollouts;
    const bool is_sharp = state_.priors.a[q] + state_.priors.b[q] > SHARP_PRIOR;
    return is_sharp ? 1 : options_.base_rollouts;
}

void RolloutPlanner::observe(std::size_t q, double reward, bool is_seeded) {
    Statistics& stats = state_.stats;
    state_.is_waiting = false;
    const bool was_ready = has_base(q);
    const double old_variance = spreads_[q] * spreads_[q];
    ++stats.spent[q];
    ++state_.observed;
    if (!std::isnan(reward)) {
        if (stats.scored[q]++ == 0) stats.shift[q] = reward;
        const double deviation = reward - stats.shift[q];
        stats.sum[q] += deviation;
        stats.sum_squares[q] += deviation * deviation;
        if (!is_seeded) {
            ++stats.unseeded[q];
            stats.unseeded_wins[q] += reward > 0.0 ? 1 : 0;
        }
        spreads_[q] = spread(q);
    }
    if (!has_base(q)) return;
    if (was_ready) state_.ready_variance_sum -= old_variance;
    else ++state_.num_ready;
    state_.ready_variance_sum += spreads_[q] * spreads_[q];
    state_.num_reserved -= state_.reserved[q];
    state_.reserved[q] = 0;
    if (options_.spread == Spread::pooled) are_queues_current_ = false;
    if (are_queues_current_ && state_.is_streaming_step) enqueue(q, true);
}

double RolloutPlanner::spread(std::size_t q) const noexcept {
    if (options_.spread != Spread::jeffreys) return state_.stats.stddev(q);
    const double p = (state_.stats.wins(q) + 0.5) / (state_.stats.scored[q] + 1.0);
    return std::sqrt(p * (1.0 - p));
}

// Spread used in the priority: shrunk towards the pool where that is asked for.
double RolloutPlanner::spread_of(std::size_t q) const noexcept {
    if (options_.spread != Spread::pooled) return spreads_[q];
    const double n = state_.stats.scored[q];
    if (n < 2) return std::sqrt(pooled_variance_);
    const double variance = spreads_[q] * spreads_[q];
    return std::sqrt((2.0 * pooled_variance_ + (n - 1.0) * variance) / (n + 1.0));
}

void RolloutPlanner::update_pooled_variance() {
    if (options_.spread != Spread::pooled) return;
    weights_.clear();
    for (std::size_t q = 0; q < num_prompts(); ++q)
        if (state_.stats.scored[q] >= 2) weights_.push_back(spreads_[q] * spreads_[q]);
    pooled_variance_ = weights_.empty()
                           ? 0.0
                           : order_free_sum(weights_) / weights_.size();
}

// Expected gain in what the group teaches, were the m-th rollout beyond the results added: a mixed group
// teaches w(p) = p (1-p)^2, so a group of equal results gains by turning mixed, E[p (1-p)^(m-1) w] or
// E[(1-p) p^(m-1) w], and a mixed one by precision, E[w] (1/n - 1/(n+1)).
double RolloutPlanner::beta_utility(std::size_t q, std::int64_t n) const noexcept {
    const Statistics& stats = state_.stats;
    const double wins = stats.unseeded_wins[q];
    const double a = state_.priors.a[q] + wins;
    const double b = state_.priors.b[q] + stats.unseeded[q] - wins;
    const std::int64_t outstanding = n - stats.spent[q];
    if (stats.wins(q) <= 0.0) return beta_moment(a, b, 2, outstanding + 2);
    if (stats.wins(q) >= stats.scored[q]) return beta_moment(a, b, outstanding + 1, 3);
    return beta_moment(a, b, 1, 2) * (1.0 / n - 1.0 / (n + 1.0));
}

double RolloutPlanner::key(std::size_t q, std::int64_t n) const noexcept {
    return options_.use_history ? beta_utility(q, n) : spread_of(q);
}

double RolloutPlanner::clock_value() const noexcept {
    if (options_.clock == Clock::train_step) return static_cast<double>(state_.step);
    const auto drawn = static_cast<double>(state_.handed_out);
    return options_.clock == Clock::run ? drawn + static_cast<double>(state_.earlier_rollouts) : drawn;
}

// The factor of 1/sqrt(n) in phi.
double RolloutPlanner::exploration_scale() {
    if (!options_.is_relative)
        return options_.exploration * std::sqrt(portable::log1p(clock_value()));
    const std::size_t count = num_prompts();
    weights_.resize(count);
    for (std::size_t q = 0; q < count; ++q)
        weights_[q] = spread_of(q) * shrinkage_[state_.stats.planned[q]];
    const double reduction = order_free_sum(weights_);
    for (std::size_t q = 0; q < count; ++q) weights_[q] = inverse_roots_[state_.stats.planned[q]];
    const double roots = order_free_sum(weights_);
    return RELATIVE_EXPLORATION_SHARE / (1.0 - RELATIVE_EXPLORATION_SHARE) * reduction / roots;
}

void RolloutPlanner::grow_tables(std::int64_t largest) {
    shrinkage_.grow(largest);
    for (auto n = static_cast<std::int64_t>(inverse_roots_.size()); n <= largest; ++n)
        inverse_roots_.push_back(n == 0 ? 0.0 : 1.0 / std::sqrt(static_cast<double>(n)));
}

void RolloutPlanner::fill_priorities() {
    update_pooled_variance();
    const double scale = exploration_scale();
    std::vector<double> phi(inverse_roots_);
    for (double& value : phi) value *= scale;
    weights_.resize(num_prompts());
    const std::int32_t* planned = state_.stats.planned.data();
    const double* reduction = shrinkage_.data();
    largest_weight_ = 0.0;
    // In blocks that stay in the cache until their largest is found.
    for (std::size_t begin = 0; begin < num_prompts(); begin += 1024) {
        const std::size_t end = std::min(begin + 1024, num_prompts());
        for (std::size_t q = begin; q < end; ++q)
            weights_[q] = spread_of(q) * reduction[planned[q]] + phi[planned[q]];
        largest_weight_ = std::max(largest_weight_, largest_of(&weights_[begin], end - begin));
    }
}

void RolloutPlanner::priorities(double* values) {
    const std::int64_t least = options_.use_history ? 1 : 2;
    if (!options_.use_history) fill_priorities();
    for (std::size_t q = 0; q < num_prompts(); ++q) {
        const std::int64_t n = state_.stats.planned[q];
        if (n < least) values[q] = std::numeric_limits<double>::quiet_NaN();
        else values[q] = options_.use_history ? beta_utility(q, n) : weights_[q];
    }
}

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
    std::int64_t given = 0;
    std::int32_t largest = 0;
    for (std::size_t q = 0; q < num_prompts(); ++q) {
        given += counts[q];
        largest = std::max(largest, state_.stats.planned[q] += static_cast<std::int32_t>(counts[q]));
    }
    state_.handed_out += given;
    largest_count_ = std::max<std::int64_t>(largest_count_, largest);
    grow_tables(largest_count_ + 1);
}

// Base rollouts; the uniform rule has no reason to wait and hands out everything.
void RolloutPlanner::plan_first(std::int64_t* counts) {
    if (options_.allocation == Allocation::uniform) {
        weights_.assign(num_prompts(), 1.0);
        largest_weight_ = 1.0;
        share_with_caps(state_.total, counts);
    } else {
        for (std::size_t q = 0; q < num_prompts(); ++q) counts[q] = base_of(q);
    }
    hand_out(counts);
}

void RolloutPlanner::plan_proportional(std::int64_t budget, std::int64_t* counts) {
    fill_priorities();
    share_with_caps(budget, counts);
    hand_out(counts);
}

// Shares by weights_; what exceeds a prompt's cap is shared again among those with room.
void RolloutPlanner::share_with_caps(std::int64_t budget, std::int64_t* counts) {
    const auto room = [&](std::size_t q) {
        return options_.max_rollouts_per_prompt - state_.stats.planned[q];
    };
    share(budget, counts);
    if (options_.max_rollouts_per_prompt == NO_CAP) return;
    std::vector<std::int64_t> more(num_prompts());
    for (std::int64_t surplus = 1; surplus > 0;) {
        surplus = 0;
        for (std::size_t q = 0; q < num_prompts(); ++q) {
            surplus += std::max<std::int64_t>(counts[q] - room(q), 0);
            counts[q] = std::min(counts[q], room(q));
            if (counts[q] == room(q)) weights_[q] = 0.0;
        }
        if (surplus == 0) return;
        largest_weight_ = largest_of(weights_.data(), num_prompts());
        if (!(largest_weight_ > 0.0)) {
            for (std::size_t q = 0; q < num_prompts(); ++q) weights_[q] = counts[q] < room(q);
            largest_weight_ = 1.0;
        }
        share(surplus, more.data());
        for (std::size_t q = 0; q < num_prompts(); ++q) counts[q] += more[q];
    }
}

// Shares by weights_; equally where they are all zero.
void RolloutPlanner::share(std::int64_t budget, std::int64_t* counts) {
    double sum = order_free_sum(weights_.data(), num_prompts(), largest_weight_);
    if (!(sum > 0.0)) {
        weights_.assign(num_prompts(), 1.0);
        sum = static_cast<double>(num_prompts());
    }
    remainder_.split(weights_, state_.ties, sum, budget, counts);
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
    const auto alive = std::count_if(spreads_.begin(), spreads_.end(), [](double s) { return s > 0.0; });
    return num_groups_wanted() - alive;
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
