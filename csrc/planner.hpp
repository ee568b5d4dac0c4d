// The rollout planner (XRPO, arXiv 2510.06672): which prompt deserves the next rollouts of a step.
//
//   h(n) = t_{1-alpha/2, n-1} s / sqrt(n)      half-width of the Student-t interval of the mean reward
//   Pi   = h(n) - h(n+1) + lambda sqrt(log(1 + T) / n)
//
// n counts every rollout handed out, in flight and unscored ones included; s comes from the scored ones.
// The same calls with the same seed give the same plan on every machine: no libm, no hash tables, and
// sums that do not depend on the order of the prompts, nor on the number of threads.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "draw_queue.hpp"
#include "share.hpp"
#include "student_t.hpp"

namespace xrpo {

enum class Allocation { proportional, greedy, streaming, uniform, dapo };
enum class Spread { sample, jeffreys, pooled };
enum class Clock { step, run, train_step };  // what T counts

constexpr std::int64_t NO_CAP = std::numeric_limits<std::int64_t>::max();

struct PlannerOptions {
    std::int64_t base_rollouts;
    std::int64_t rounds;
    double exploration;
    double confidence;
    Allocation allocation;
    Spread spread;
    Clock clock;
    std::int64_t max_rollouts_per_prompt;  // or NO_CAP
    bool is_relative;                      // exploration scaled to a fixed share of the priorities
    bool use_history;                      // Beta posterior and expected yield in place of Pi
};

// Beta prior of each prompt of the step: a wins, b failures.
struct Priors {
    std::vector<double> a, b;
};

// Statistics of each prompt of the step. Sums are taken about the prompt's first reward: as stable as
// Welford's recurrence (the shift lies within the sample), and exact for 0/1 rewards in any order, so
// that equal groups tie exactly.
struct Statistics {
    std::vector<std::int32_t> planned, spent, scored, unseeded, unseeded_wins;
    std::vector<double> shift, sum, sum_squares;
    void reset(std::size_t num_prompts);
    double mean(std::size_t q) const noexcept;    // NaN without scores
    double stddev(std::size_t q) const noexcept;  // ddof 1; 0 below two scores
    double wins(std::size_t q) const noexcept {
        return scored[q] * shift[q] + sum[q];
    }
};

struct PlannerState {
    std::int64_t total = 0, step = 0, round = 0;
    std::int64_t handed_out = 0, observed = 0, num_reserved = 0;
    std::int64_t earlier_rollouts = 0;  // of the run's steps before this one
    bool is_streaming_step = false, is_waiting = false;
    std::int64_t num_ready = 0;       // prompts whose base results are in, and
    double ready_variance_sum = 0.0;  // the sum of their variances
    std::vector<std::uint64_t> ties;
    std::vector<std::int32_t> reserved;
    Priors priors;
    Statistics stats;
};

class RolloutPlanner {
  public:
    explicit RolloutPlanner(const PlannerOptions& options);

    // Starts a step: forgets the statistics, keeps the run's count of rollouts.
    void begin_step(std::int64_t total, std::int64_t step, std::vector<std::uint64_t> ties,
                    Priors priors);

    // Counts of the next phase, (P,) into `counts`: base first, then each round, then zeros. False, and
    // nothing changed, while results are out and `allow_partial` is not set.
    bool plan_round(bool allow_partial, std::int64_t* counts);

    // Commits one result; NaN spends the slot without a statistic. The caller has checked the index and
    // that a result is out.
    void observe(std::size_t prompt, double reward, bool is_seeded);

    // The next rollout of a streaming step; none when the budget is spent or base results are missing.
    std::optional<std::int64_t> next_prompt();

    // The last next_prompt found nobody to give to, and nothing was observed since.
    bool is_waiting() const noexcept { return state_.is_waiting; }
    bool is_done() const noexcept;
    void priorities(double* values);

    const PlannerOptions& options() const noexcept { return options_; }
    std::size_t num_prompts() const noexcept { return state_.ties.size(); }
    const PlannerState& state() const noexcept { return state_; }
    void restore(PlannerState state);

    // Rollouts that prompt q gets before any statistic: 1 where its prior is sharp.
    std::int64_t base_of(std::size_t q) const noexcept;

  private:
    double spread(std::size_t q) const noexcept;
    double beta_utility(std::size_t q, std::int64_t n) const noexcept;
    double key(std::size_t q, std::int64_t n) const noexcept;
    double clock_value() const noexcept;
    double exploration_scale();
    void update_pooled_variance();
    double spread_of(std::size_t q) const noexcept;
    void grow_tables(std::int64_t largest) {
        if (largest >= static_cast<std::int64_t>(inverse_roots_.size())) grow_tables_to(largest);
    }
    void grow_tables_to(std::int64_t largest);
    void fill_priorities();
    std::int64_t num_groups_wanted() const noexcept;
    std::int64_t num_groups_missing() const noexcept;
    std::size_t num_groups_started() const noexcept;

    void plan_first(std::int64_t* counts);
    void plan_dapo(std::int64_t* counts);
    void plan_proportional(std::int64_t budget, std::int64_t* counts);
    void plan_greedy(std::int64_t budget, std::int64_t* counts);
    void share_with_caps(std::int64_t budget, std::int64_t* counts);
    template <class Weight>
    void share(const Weight& weight, double top, std::int64_t budget, std::int64_t* counts);
    void hand_out(std::size_t q, std::int64_t count);
    void hand_out(const std::int64_t* counts);

    bool has_base(std::size_t q) const noexcept { return state_.stats.spent[q] >= base_of(q); }
    void rebuild_queues(bool is_streaming);
    void enqueue(std::size_t q, bool is_streaming);
    std::optional<std::size_t> pick(bool is_streaming);

    PlannerOptions options_;
    PlannerState state_;
    ShrinkageTable shrinkage_;
    std::vector<double> spreads_;  // sample or Jeffreys; kept up to date by observe
    std::vector<double> weights_;
    double pooled_variance_ = 0.0;
    LargestRemainder remainder_;

    DrawQueue ready_, waiting_;
    bool are_queues_current_ = false;
    std::size_t base_cursor_ = 0;
    std::int64_t largest_count_ = 0;
    std::vector<double> inverse_roots_;  // 1 / sqrt(n)
};

}  // namespace xrpo
