// Tasks on several threads. OpenMP where the build has it, to share the threads of torch; std::thread otherwise, and in
// builds for the thread sanitizer, which cannot follow OpenMP's synchronisation.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvsift {

// Takes tasks for a thread of so many, [first, stop): several that follow one another, since what a task prefetches past its
// end is for the next one, and fewer the fewer are left. Returns first; num_tasks or more: there are none.
inline std::int64_t take_tasks(std::atomic<std::int64_t>& next, std::int64_t num_tasks, int num_threads, std::int64_t& stop) {
  std::int64_t first = next.load(std::memory_order_relaxed);
  do stop = first + std::max<std::int64_t>(1, (num_tasks - first) / (2 * num_threads));
  while (first < num_tasks && !next.compare_exchange_weak(first, stop, std::memory_order_relaxed));
  return first;
}

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
      for (std::int64_t task, stop; (task = take_tasks(next, num_tasks, num_threads, stop)) < num_tasks;)
        for (; task < stop; ++task) fn(task, thread);
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

// Threads that go through phases together: in each, its tasks are shared among them, and none goes on before all are done.
// They wait for each other without the system while that takes microseconds.
class Team {
 public:
  // Calls fn(team, leads) once in each thread; one of them leads.
  template <class Fn>
  static void run(int num_threads, Fn&& fn) {
    Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
      team.size_ = omp_get_num_threads();  // which may be fewer
      fn(team, omp_get_thread_num() == 0);
    }
#else
    team.size_ = num_threads;
    std::vector<std::thread> others;
    others.reserve(static_cast<std::size_t>(num_threads - 1));
    for (int thread = 1; thread < num_threads; ++thread) others.emplace_back([&] { fn(team, false); });
    fn(team, true);
    for (auto& other : others) other.join();
#endif
    if (team.failure_) std::rethrow_exception(team.failure_);
  }

  int size() const { return size_; }

  // A phase: all threads call it alike, and fn(task) is called once for each task in [0, num_tasks). After an exception the
  // tasks that are left, and those of later phases, are not called.
  template <class Fn>
  void each(std::int64_t num_tasks, Fn&& fn) {
    try {
      for (std::int64_t task, stop; (task = take_tasks(next_, num_tasks, size_, stop)) < num_tasks;)
        for (; task < stop && !failed_.load(); ++task) fn(task);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      failed_.store(true);
    }
    wait();
  }

 private:
  void wait() {
    constexpr int kSpins = 4096;
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  int size_ = 1;
  alignas(64) std::atomic<std::int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace kvsift
