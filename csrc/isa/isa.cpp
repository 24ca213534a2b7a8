#include "isa/isa.hpp"

#include <atomic>

namespace kvsift {
namespace {

struct Levels {
  const Kernels* usable[5] = {&kGeneric, nullptr, nullptr, nullptr, nullptr};
  int count = 1;

  Levels() {
#if defined(KVSIFT_X86)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v3) usable[count++] = &kAvx2;
    if (v4) usable[count++] = &kAvx512;
    if (v4 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vnni"))
      usable[count++] = &kAvx512Bf16;
#endif
  }
};

const Levels& levels() {
  static const Levels usable;
  return usable;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> level{levels().usable[levels().count - 1]};
  return level;
}

}  // namespace

const Kernels* const* usable_levels() { return levels().usable; }
const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }
void use_level(const Kernels& level) { current().store(&level, std::memory_order_relaxed); }

}  // namespace kvsift
