// The one file that knows Python: pybind11 bindings of the planner and the CPU kernels.
#include <pybind11/pybind11.h>

#include "advantages.hpp"
#include "logprobs.hpp"

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

PYBIND11_MODULE(_native, m) {
    m.doc() = "C++ core of xrpo_fast: planner, Student-t quantiles, CPU kernels.";
    bind_kernels(m);
}
