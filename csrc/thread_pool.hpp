// A small thread pool of our own: the torch one cannot be reached without torch headers.
#pragma once

#include <cstdint>
#include <functional>

namespace xrpo {

// Calls task(i) once for each i in [0, num_tasks), on at most num_threads threads, the caller's
// included. Which thread runs a task is not fixed, so a task must write only its own results.
// Runs on the caller alone where another call holds the pool. Tasks must not throw.
void parallel_for(std::int64_t num_tasks, int num_threads,
                  const std::function<void(std::int64_t)>& task);

}  // namespace xrpo
