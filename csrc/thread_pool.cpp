#include "thread_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace xrpo {
namespace {

class ThreadPool {
public:
    void run(std::int64_t num_tasks, int num_helpers,
             const std::function<void(std::int64_t)>& task) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (num_workers_ < num_helpers) {
                const int index = num_workers_++;
                std::thread([this, index] { work(index); }).detach();
            }
            task_ = &task;
            num_tasks_ = num_tasks;
            next_.store(0);
            num_wanted_ = num_helpers;
            num_running_ = num_helpers;
            ++generation_;
        }
        wake_.notify_all();
        drain();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return num_running_ == 0; });
        task_ = nullptr;
    }

private:
    void drain() {
        for (std::int64_t i = next_.fetch_add(1); i < num_tasks_; i = next_.fetch_add(1)) {
            (*task_)(i);
        }
    }

    void work(int index) {
        std::uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (index >= num_wanted_) {
                continue;
            }
            lock.unlock();
            drain();
            lock.lock();
            if (--num_running_ == 0) {
                done_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<std::int64_t> next_{0};
    const std::function<void(std::int64_t)>* task_ = nullptr;
    std::int64_t num_tasks_ = 0;
    std::uint64_t generation_ = 0;
    int num_workers_ = 0, num_wanted_ = 0, num_running_ = 0;
};

std::mutex pool_owner;

// Never destroyed: its threads sleep until the process ends. A forked child has none of them, so it
// gets a pool of its own. Call with pool_owner held.
ThreadPool& pool_of_this_process() {
    static ThreadPool* pool = nullptr;
    static pid_t owner = 0;
    if (pool == nullptr || owner != getpid()) {
        pool = new ThreadPool();
        owner = getpid();
    }
    return *pool;
}

}  // namespace

void parallel_for(std::int64_t num_tasks, int num_threads,
                  const std::function<void(std::int64_t)>& task) {
    const auto num_helpers =
        static_cast<int>(std::min<std::int64_t>(num_threads, num_tasks)) - 1;
    std::unique_lock<std::mutex> owner(pool_owner, std::try_to_lock);
    if (num_helpers < 1 || !owner.owns_lock()) {
        for (std::int64_t i = 0; i < num_tasks; ++i) {
            task(i);
        }
        return;
    }
    pool_of_this_process().run(num_tasks, num_helpers, task);
}

}  // namespace xrpo
