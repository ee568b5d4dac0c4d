// The one file that knows Python: pybind11 bindings of the planner and the CPU kernels.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "advantages.hpp"
#include "logprobs.hpp"
#include "planner.hpp"
#include "student_t.hpp"

namespace py = pybind11;

// CPU kernels. Pointers come as integers from tensors that xrpo_fast.ops has checked; 0 is absent.
namespace {

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

xrpo::LogprobRows logprob_rows(py::tuple t) {
    return {at<const void>(t[0].cast<std::uintptr_t>()),
            static_cast<xrpo::Dtype>(t[1].cast<int>()),
            t[2].cast<std::int64_t>(),
            t[3].cast<std::int64_t>(),
            t[4].cast<std::int64_t>(),
            t[5].cast<std::int64_t>(),
            at<const void>(t[6].cast<std::uintptr_t>()),
            t[7].cast<bool>(),
            t[8].cast<double>(),
            at<const float>(t[9].cast<std::uintptr_t>()),
            t[10].cast<std::int64_t>(),
            at<const bool>(t[11].cast<std::uintptr_t>()),
            t[12].cast<int>()};
}

void token_logprobs_fwd(py::tuple rows, std::uintptr_t logprobs, std::uintptr_t entropy,
                        std::uintptr_t row_max, std::uintptr_t row_sum) {
    const auto logits = logprob_rows(rows);
    const xrpo::LogprobResults results = {at<void>(logprobs), at<void>(entropy), at<void>(row_max),
                                          at<double>(row_sum)};
    py::gil_scoped_release release;
    xrpo::token_logprobs_fwd(logits, results);
}

void token_logprobs_bwd(py::tuple rows, std::uintptr_t dlogprobs, std::uintptr_t dentropy,
                        std::uintptr_t row_max, std::uintptr_t row_sum, std::uintptr_t entropy,
                        std::uintptr_t dlogits, std::int64_t row_stride) {
    const auto logits = logprob_rows(rows);
    const xrpo::LogprobGradients gradients = {
        at<const void>(dlogprobs),  at<const void>(dentropy), at<const void>(row_max),
        at<const double>(row_sum), at<const void>(entropy),  at<void>(dlogits),
        row_stride};
    py::gil_scoped_release release;
    xrpo::token_logprobs_bwd(logits, gradients);
}

void sequence_logprobs_fwd(std::uintptr_t token_logprobs, int dtype, std::uintptr_t cu_seqlens,
                           bool cu_is_int64, std::int64_t num_seqs, bool is_mean,
                           std::uintptr_t scores, std::uintptr_t lengths, int num_threads) {
    py::gil_scoped_release release;
    xrpo::sequence_logprobs_fwd(at<const void>(token_logprobs), static_cast<xrpo::Dtype>(dtype),
                                {at<const void>(cu_seqlens), cu_is_int64}, num_seqs, is_mean,
                                at<void>(scores), at<std::int64_t>(lengths), num_threads);
}

void xrpo_advantages_fwd(std::uintptr_t rewards, bool is_double, std::int64_t num_seqs,
                         std::uintptr_t cu_groups, bool groups_are_int64, std::int64_t num_groups,
                         std::uintptr_t scores, int scores_dtype, std::uintptr_t token_logprobs,
                         int token_dtype, std::uintptr_t cu_seqlens, bool seqlens_are_int64,
                         std::uintptr_t token_mask, std::int64_t row_tokens,
                         std::uintptr_t correct, double full_reward, std::uintptr_t exclude,
                         double novelty_weight, double novelty_clip, int scale, int ddof,
                         double eps, int num_threads, std::uintptr_t advantages,
                         std::uintptr_t base, std::uintptr_t bonus, std::uintptr_t eta,
                         std::uintptr_t out_scores, std::uintptr_t mean, std::uintptr_t std) {
    const xrpo::AdvantageInputs inputs = {at<const void>(rewards),
                                          is_double,
                                          num_seqs,
                                          {at<const void>(cu_groups), groups_are_int64},
                                          num_groups,
                                          at<const void>(scores),
                                          static_cast<xrpo::Dtype>(scores_dtype),
                                          at<const void>(token_logprobs),
                                          static_cast<xrpo::Dtype>(token_dtype),
                                          {at<const void>(cu_seqlens), seqlens_are_int64},
                                          at<const bool>(token_mask),
                                          row_tokens,
                                          at<const bool>(correct),
                                          full_reward,
                                          at<const bool>(exclude),
                                          novelty_weight,
                                          novelty_clip,
                                          static_cast<xrpo::Scale>(scale),
                                          ddof,
                                          eps,
                                          num_threads};
    const xrpo::AdvantageResults results = {at<void>(advantages), at<void>(base), at<void>(bonus),
                                            at<void>(eta),        at<void>(out_scores),
                                            at<void>(mean),       at<void>(std)};
    py::gil_scoped_release release;
    xrpo::xrpo_advantages_fwd(inputs, results);
}

void bind_kernels(py::module_& m) {
    m.def("token_logprobs_fwd", &token_logprobs_fwd);
    m.def("token_logprobs_bwd", &token_logprobs_bwd);
    m.def("logprob_isa", &xrpo::logprob_isa);
    m.def("limit_logprob_isa", &xrpo::limit_logprob_isa, py::arg("limit"));
    m.def("sequence_logprobs_fwd", &sequence_logprobs_fwd);
    m.def("xrpo_advantages_fwd", &xrpo_advantages_fwd);
}

}  // namespace

// Planner; its face is xrpo_fast.planner.
namespace planner {

using xrpo::PlannerState;
using xrpo::RolloutPlanner;
template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

constexpr double MAX_REWARD = 1e100;  // squares of larger ones overflow

Array<double> student_t_quantile(const Array<double>& p, const Array<double>& df) {
    Array<double> out(p.size());
    const double* p_data = p.data();
    const double* df_data = df.data();
    double* out_data = out.mutable_data();
    const auto count = p.size();
    py::gil_scoped_release release;
    for (py::ssize_t i = 0; i < count; ++i)
        out_data[i] = xrpo::student_t_quantile(p_data[i], df_data[i]);
    return out;
}

RolloutPlanner make(std::int64_t base_rollouts, std::int64_t rounds, double exploration,
                    double confidence, int allocation, int spread, int clock,
                    std::optional<std::int64_t> max_rollouts_per_prompt, bool is_relative,
                    bool use_history) {
    xrpo::PlannerOptions options{};
    options.base_rollouts = base_rollouts;
    options.rounds = rounds;
    options.exploration = exploration;
    options.confidence = confidence;
    options.allocation = static_cast<xrpo::Allocation>(allocation);
    options.spread = static_cast<xrpo::Spread>(spread);
    options.clock = static_cast<xrpo::Clock>(clock);
    options.max_rollouts_per_prompt = max_rollouts_per_prompt.value_or(xrpo::NO_CAP);
    options.is_relative = is_relative;
    options.use_history = use_history;
    return RolloutPlanner(options);
}

std::uint64_t hash_text(const std::string& text) {  // FNV-1a
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    return hash;
}

void begin_step(RolloutPlanner& self, std::size_t num_prompts, std::int64_t total, std::int64_t step,
                std::int64_t seed, const std::optional<std::vector<std::string>>& ids,
                std::vector<double> a, std::vector<double> b) {
    const std::uint64_t stem = xrpo::mix_bits(xrpo::mix_bits(static_cast<std::uint64_t>(seed)) ^
                                              static_cast<std::uint64_t>(step));
    std::vector<std::uint64_t> ties(num_prompts);
    for (std::size_t q = 0; q < num_prompts; ++q)
        ties[q] = xrpo::mix_bits(stem ^ (ids ? hash_text((*ids)[q]) : q));
    self.begin_step(total, step, std::move(ties), {std::move(a), std::move(b)});
}

std::optional<Array<std::int64_t>> plan_round(RolloutPlanner& self, bool allow_partial) {
    Array<std::int64_t> counts(static_cast<py::ssize_t>(self.num_prompts()));
    std::int64_t* data = counts.mutable_data();
    bool is_planned = false;
    {
        py::gil_scoped_release release;
        is_planned = self.plan_round(allow_partial, data);
    }
    return is_planned ? std::optional(counts) : std::nullopt;
}

std::vector<std::int64_t> next_prompts(RolloutPlanner& self, std::int64_t k) {
    std::vector<std::int64_t> prompts;
    while (static_cast<std::int64_t>(prompts.size()) < k) {
        const auto prompt = self.next_prompt();
        if (!prompt) break;
        prompts.push_back(*prompt);
    }
    return prompts;
}

// What is wrong with a result, `earlier` more of its prompt standing before it; empty when nothing is.
std::string complaint(const RolloutPlanner& self, std::int64_t prompt, double reward, bool is_binary,
                      std::int64_t earlier) {
    std::ostringstream message;
    const auto& stats = self.state().stats;
    if (std::isinf(reward) || std::fabs(reward) > MAX_REWARD)
        message << "rewards: expected finite values up to 1e100, or NaN for unscored, got " << reward;
    else if (is_binary && !std::isnan(reward) && reward != 0.0 && reward != 1.0)
        message << "rewards: expected 0 or 1 with std='jeffreys' or history=True, got " << reward;
    else if (const auto q = static_cast<std::size_t>(prompt);
             stats.spent[q] + earlier >= stats.planned[q])
        message << "prompt_indices: expected at most the " << stats.planned[q]
                << " rollouts planned for prompt " << prompt
                << ", got one more result; plan before observing";
    return message.str();
}

void check_index(const RolloutPlanner& self, std::int64_t prompt) {
    if (prompt >= 0 && prompt < static_cast<std::int64_t>(self.num_prompts())) return;
    throw std::invalid_argument("prompt_indices: expected 0 <= index < " +
                                std::to_string(self.num_prompts()) + ", got " +
                                std::to_string(prompt));
}

void observe_one(RolloutPlanner& self, std::int64_t prompt, double reward, bool is_seeded,
                 bool is_binary) {
    check_index(self, prompt);
    const std::string wrong = complaint(self, prompt, reward, is_binary, 0);
    if (!wrong.empty()) throw std::invalid_argument(wrong);
    self.observe(static_cast<std::size_t>(prompt), reward, is_seeded);
}

void observe(RolloutPlanner& self, const Array<std::int64_t>& prompts, const Array<double>& rewards,
             const Array<bool>& is_seeded, bool is_binary) {
    const std::int64_t* prompt_data = prompts.data();
    const double* reward_data = rewards.data();
    const bool* seeded_data = is_seeded.data();
    const auto count = prompts.size();
    py::gil_scoped_release release;
    std::vector<std::int32_t> earlier(self.num_prompts());
    for (py::ssize_t i = 0; i < count; ++i) {
        check_index(self, prompt_data[i]);
        const auto q = static_cast<std::size_t>(prompt_data[i]);
        const bool may_be_wrong =
            is_binary || !(std::fabs(reward_data[i]) <= MAX_REWARD) ||
            self.state().stats.spent[q] + earlier[q] >= self.state().stats.planned[q];
        if (may_be_wrong) {
            const std::string wrong =
                complaint(self, prompt_data[i], reward_data[i], is_binary, earlier[q]);
            if (!wrong.empty())
                throw std::invalid_argument(wrong + " (result " + std::to_string(i) + ")");
        }
        ++earlier[q];
    }
    for (py::ssize_t i = 0; i < count; ++i)
        self.observe(static_cast<std::size_t>(prompt_data[i]), reward_data[i], seeded_data[i]);
}

template <class T>
Array<T> to_array(const std::vector<T>& values) {
    return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

Array<std::int64_t> widen(const std::vector<std::int32_t>& values) {
    return to_array(std::vector<std::int64_t>(values.begin(), values.end()));
}

template <class Function>
Array<double> per_prompt(const RolloutPlanner& self, const Function& function) {
    std::vector<double> values(self.num_prompts());
    for (std::size_t q = 0; q < values.size(); ++q) values[q] = function(q);
    return to_array(values);
}

// Visits every field of the state by name: written once for saving and loading.
template <class State, class Visitor>
void visit_state(State& state, const Visitor& visit) {
    visit("total", state.total);
    visit("step", state.step);
    visit("round", state.round);
    visit("handed_out", state.handed_out);
    visit("observed", state.observed);
    visit("num_reserved", state.num_reserved);
    visit("earlier_rollouts", state.earlier_rollouts);
    visit("is_streaming_step", state.is_streaming_step);
    visit("is_waiting", state.is_waiting);
    visit("num_ready", state.num_ready);
    visit("ready_variance_sum", state.ready_variance_sum);
    visit("ties", state.ties);
    visit("reserved", state.reserved);
    visit("prior_a", state.priors.a);
    visit("prior_b", state.priors.b);
    visit("planned", state.stats.planned);
    visit("spent", state.stats.spent);
    visit("scored", state.stats.scored);
    visit("unseeded", state.stats.unseeded);
    visit("unseeded_wins", state.stats.unseeded_wins);
    visit("shift", state.stats.shift);
    visit("sum", state.stats.sum);
    visit("sum_squares", state.stats.sum_squares);
}

py::dict get_state(const RolloutPlanner& self) {
    py::dict out;
    visit_state(self.state(), [&](const char* name, const auto& field) { out[name] = py::cast(field); });
    return out;
}

void set_state(RolloutPlanner& self, const py::dict& values) {
    PlannerState state;
    visit_state(state, [&](const char* name, auto& field) {
        if (!values.contains(name))
            throw std::invalid_argument(std::string("state: expected the key ") + name + ", got none");
        field = values[name].cast<std::decay_t<decltype(field)>>();
    });
    const std::size_t count = state.ties.size();
    const std::size_t num_priors = self.options().use_history ? count : 0;
    const auto& stats = state.stats;
    for (const std::size_t size :
         {state.reserved.size(), stats.planned.size(), stats.spent.size(), stats.scored.size(),
          stats.unseeded.size(), stats.unseeded_wins.size(), stats.shift.size(), stats.sum.size(),
          stats.sum_squares.size()})
        if (size != count) throw std::invalid_argument("state: expected one value per prompt");
    if (state.priors.a.size() != num_priors || state.priors.b.size() != num_priors)
        throw std::invalid_argument("state: expected priors exactly where history=True");
    self.restore(std::move(state));
}

void bind(py::module_& m) {
    m.def("student_t_quantile", &student_t_quantile, py::arg("p"), py::arg("df"));
    py::class_<RolloutPlanner>(m, "RolloutPlanner")
        .def(py::init(&make), py::kw_only(), py::arg("base_rollouts"), py::arg("rounds"),
             py::arg("exploration"), py::arg("confidence"), py::arg("allocation"), py::arg("spread"),
             py::arg("clock"), py::arg("max_rollouts_per_prompt"), py::arg("is_relative"),
             py::arg("use_history"))
        .def("begin_step", &begin_step)
        .def("plan_round", &plan_round)
        .def("next_prompts", &next_prompts)
        .def("observe", &observe)
        .def("observe_one", &observe_one)
        .def("base_of",
             [](const RolloutPlanner& self, std::size_t q) {
                 if (q >= self.num_prompts()) throw py::index_error("prompt: out of range");
                 return self.base_of(q);
             })
        .def("is_waiting", &RolloutPlanner::is_waiting)
        .def("is_done", &RolloutPlanner::is_done)
        .def("is_streaming_step",
             [](const RolloutPlanner& self) { return self.state().is_streaming_step; })
        .def("uses_rounds", [](const RolloutPlanner& self) { return self.state().round > 0; })
        .def("priorities",
             [](RolloutPlanner& self) {
                 std::vector<double> values(self.num_prompts());
                 self.priorities(values.data());
                 return to_array(values);
             })
        .def("counts", [](const RolloutPlanner& self) { return widen(self.state().stats.spent); })
        .def("planned", [](const RolloutPlanner& self) { return widen(self.state().stats.planned); })
        .def("unseeded",
             [](const RolloutPlanner& self) {
                 const auto& stats = self.state().stats;
                 return py::make_tuple(widen(stats.unseeded), widen(stats.unseeded_wins));
             })
        .def("means",
             [](const RolloutPlanner& self) {
                 return per_prompt(self, [&](auto q) { return self.state().stats.mean(q); });
             })
        .def("stds",
             [](const RolloutPlanner& self) {
                 return per_prompt(self, [&](auto q) { return self.state().stats.stddev(q); });
             })
        .def("get_state", &get_state)
        .def("set_state", &set_state);
}

}  // namespace planner

PYBIND11_MODULE(_native, m) {
    m.doc() = "C++ core of xrpo_fast: planner, Student-t quantiles, CPU kernels.";
    bind_kernels(m);
    planner::bind(m);
}
