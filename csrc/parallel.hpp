// Tasks on several threads. OpenMP where the build has it, to share the threads of torch; std::thread otherwise, and in
// builds for the thread sanitizer, which cannot follow OpenMP's synchronisation.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace kvsift {

// Calls fn(task, thread) once for each task in [0, num_tasks), on at most num_threads threads, thread in [0, num_threads).
// The order is not fixed: the result of a task must not depend on the thread. Rethrows the first exception.
template <class Fn>
void parallel_for(std::int64_t num_tasks, int num_threads, Fn&& fn) {
  if (num_tasks < num_threads) num_threads = static_cast<int>(num_tasks);
  if (num_threads <= 1) {
    for (std::int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
    return;
  }
  std::exception_ptr failure;
  std::mutex failure_mutex;
  std::atomic<std::int64_t> next{0};
  auto work = [&](int thread) {
    try {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) fn(task, thread);
    } catch (...) {
      next.store(num_tasks, std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads)
  work(omp_get_thread_num());
#else
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (auto& other : others) other.join();
#endif
  if (failure) std::rethrow_exception(failure);
}

}  // namespace kvsift
