// Steps, results and priorities of the planner; who gets the rollouts is in allocation.cpp.
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

void RolloutPlanner::grow_tables_to(std::int64_t largest) {
    shrinkage_.grow(largest);
    for (auto n = static_cast<std::int64_t>(inverse_roots_.size()); n <= largest; ++n)
        inverse_roots_.push_back(n == 0 ? 0.0 : 1.0 / std::sqrt(static_cast<double>(n)));
}

void RolloutPlanner::fill_priorities() {
    update_pooled_variance();
    const double scale = exploration_scale();
    weights_.resize(num_prompts());
    for (std::size_t q = 0; q < num_prompts(); ++q) {
        const std::int32_t n = state_.stats.planned[q];
        weights_[q] = spread_of(q) * shrinkage_[n] + scale * inverse_roots_[n];
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

}  // namespace xrpo
