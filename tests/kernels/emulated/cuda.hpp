// What kernels need of CUDA, for one host thread: every thread of a block is a fiber, which gives way where it waits for
// others. Shared memory is one buffer per block, whose offsets are its addresses. Threads run one after the other until
// each waits, so that races go unnoticed; wrong results, lists and bounds do not.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (current->thread)
#define blockIdx (current->block->index)

typedef unsigned int Word;
typedef unsigned short Half;
typedef unsigned long long Long;
struct Index { int x, y, z; };
struct float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) uint2 { Word x, y; };
struct __align__(16) uint4 { Word x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(Word x, Word y) { return {x, y}; }
inline uint4 make_uint4(Word x, Word y, Word z, Word w) { return {x, y, z, w}; }

// Threads, and how they wait.

constexpr int LANES = 32, MOST_WORDS = 10;  // of a lane that others read at once
struct Exchange {
    Long words[2][LANES][MOST_WORDS];  // those of the next exchange beside those being read
    int arrived = 0;
    long turn = 0;
};
struct Block {
    Index index;
    char *shared;
    int offset;  // of dynamic memory in it
    std::vector<Exchange> warps;
    int threads, arrived = 0;
    long turn = 0;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Block *block;
    Index thread;
    bool ended = false;
};
static Fiber *current;
static ucontext_t scheduler;
inline void give_way() { swapcontext(&current->context, &scheduler); }
inline int lane() { return threadIdx.x % LANES; }

inline void __syncthreads() {
    Block *block = current->block;
    long turn = block->turn;
    if (++block->arrived == block->threads) block->arrived = 0, ++block->turn;
    while (block->turn == turn) give_way();
}

typedef Long (*Lanes)[MOST_WORDS];
inline Lanes exchange(const Long *own, int count) {
    Exchange &warp = current->block->warps[threadIdx.x / LANES];
    long turn = warp.turn;
    for (int i = 0; i < count; ++i) warp.words[turn % 2][lane()][i] = own[i];
    if (++warp.arrived == LANES) warp.arrived = 0, ++warp.turn;
    while (warp.turn == turn) give_way();
    return warp.words[turn % 2];
}
template <class T> Lanes exchange(T own) {
    Long word = 0;
    std::memcpy(&word, &own, sizeof(T));
    return exchange(&word, 1);
}
template <class T> T word_of(Lanes lanes, int from) {
    T word;
    std::memcpy(&word, lanes[from % LANES], sizeof(T));
    return word;
}
template <class T> T __shfl_sync(Word, T own, int from) { return word_of<T>(exchange(own), from); }
template <class T> T __shfl_xor_sync(Word, T own, int bits) { return word_of<T>(exchange(own), lane() ^ bits); }
template <class T> T __shfl_up_sync(Word, T own, int by) {
    return word_of<T>(exchange(own), lane() < by ? lane() : lane() - by);
}
template <class T> T __shfl_down_sync(Word, T own, int by) {
    return word_of<T>(exchange(own), lane() + by < LANES ? lane() + by : lane());
}
template <class T, class F> T reduced(T own, F combine) {
    Lanes lanes = exchange(own);
    T all = word_of<T>(lanes, 0);
    for (int i = 1; i < LANES; ++i) all = combine(all, word_of<T>(lanes, i));
    return all;
}
template <class T> T __reduce_add_sync(Word, T own) { return reduced(own, [](T a, T b) { return a + b; }); }
template <class T> T __reduce_min_sync(Word, T own) { return reduced(own, [](T a, T b) { return a < b ? a : b; }); }
template <class T> T __reduce_max_sync(Word, T own) { return reduced(own, [](T a, T b) { return a > b ? a : b; }); }
inline Word __ballot_sync(Word, bool own) {
    return reduced<Word>(own ? Word(1) << lane() : 0, [](Word a, Word b) { return a | b; });
}
inline bool __any_sync(Word mask, bool own) { return __ballot_sync(mask, own) != 0; }
inline bool __all_sync(Word mask, bool own) { return __ballot_sync(mask, own) == ~Word(0); }
inline void __syncwarp() { exchange(0); }

// Memory.

template <class T> T __ldg(const T *from) { return *from; }
template <class T> T __ldcg(const T *from) { return *from; }
template <class T> T __ldcs(const T *from) { return *from; }
template <class T, class U> T atomicAdd(T *to, U more) { return *to += T(more), T(*to - T(more)); }
inline Word __cvta_generic_to_shared(const void *at) { return Word((const char *)at - current->block->shared); }
inline void copy(Word to, const void *from, int bytes) { std::memcpy(current->block->shared + to, from, bytes); }
inline void cp_async_cg_shared_global_L2__cache_hint(Word to, const void *from, Long, int bytes) {
    copy(to, from, bytes);
}
inline void cp_async_cg_shared_global(Word to, const void *from, int bytes) { copy(to, from, bytes); }
inline void cp_async_ca_shared_global(Word to, const void *from, int bytes) { copy(to, from, bytes); }
inline void cp_async_commit_group() {}
inline void cp_async_wait_group(int) {}
inline void red_release_gpu_global_add_u32(Word *to, int more) { *to += more; }
inline void ld_acquire_gpu_global_u32(Word &to, const Word *from) { give_way(), to = *from; }
inline void ld_relaxed_gpu_global_u32(Word &to, const Word *from) { give_way(), to = *from; }
inline void ld_relaxed_gpu_global_u64(Long &to, const Long *from) { give_way(), to = *from; }
inline void st_relaxed_gpu_global_u32(Word *to, Word word) { *to = word; }
inline void st_relaxed_gpu_global_u64(Long *to, Long word) { *to = word; }
inline void st_relaxed_gpu_global_v4_u32(Word *to, Word a, Word b, Word c, Word d) {
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}
inline void ld_global_nc_L2__cache_hint_v4_u32(Word &a, Word &b, Word &c, Word &d, const void *from, Long) {
    const Word *words = (const Word *)from;
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void createpolicy_fractional_L2__evict_first_b64(Long &policy, double) { policy = 0; }

// Numbers.

template <class A, class B> using Common = typename std::common_type<A, B>::type;
template <class A, class B> Common<A, B> min(A a, B b) { return Common<A, B>(a) < Common<A, B>(b) ? a : b; }
template <class A, class B> Common<A, B> max(A a, B b) { return Common<A, B>(a) > Common<A, B>(b) ? a : b; }
inline float __uint_as_float(Word bits) { float x; return std::memcpy(&x, &bits, 4), x; }
inline float __int_as_float(Word bits) { return __uint_as_float(bits); }
inline Word __float_as_uint(float x) { Word bits; return std::memcpy(&bits, &x, 4), bits; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline int __float2int_rn(float x) { return int(std::lrintf(x)); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int __popc(Word bits) { return __builtin_popcount(bits); }
inline int __popcll(Long bits) { return __builtin_popcountll(bits); }
inline int __ffsll(Long bits) { return __builtin_ffsll((long long)bits); }
inline int __clz(Word bits) { return bits ? __builtin_clz(bits) : 32; }
inline Word __byte_perm(Word low, Word high, Word selector) {
    Long bytes = Long(high) << 32 | low;
    Word chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= Word(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return chosen;
}

inline float from_f16(Half bits) { _Float16 x; return std::memcpy(&x, &bits, 2), float(x); }
inline Half to_f16(float x) { _Float16 half = _Float16(x); Half bits; return std::memcpy(&bits, &half, 2), bits; }
inline float from_bf16(Half bits) { return __uint_as_float(Word(bits) << 16); }
inline Half to_bf16(float x) {
    Word bits = __float_as_uint(x);
    return x != x ? 0x7fff : Half(bits + 0x7fff + (bits >> 16 & 1) >> 16);
}
inline Half f16_of_e4m3(Word byte) {
    int exponent = byte >> 3 & 15, fraction = byte & 7;
    float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return (byte & 127) == 127 ? 0x7fff : to_f16(byte & 128 ? -size : size);
}
template <class T>
void mad_wide_u32(Long &to, Word one, Word other, T *from) { to = Long(one) * other + Long(from); }
inline void ex2_approx_ftz_f32(float &x) { x = std::exp2(x); }
inline void cvt_f32_f16(float &to, Half from) { to = from_f16(from); }
inline void cvt_rn_f16_f32(Half &to, float from) { to = to_f16(from); }
inline void cvt_rn_bf16_f32(Half &to, float from) { to = to_bf16(from); }
inline void cvt_rn_f16x2_f32(Word &to, float high, float low) { to = Word(to_f16(high)) << 16 | to_f16(low); }
inline void cvt_rn_bf16x2_f32(Word &to, float high, float low) { to = Word(to_bf16(high)) << 16 | to_bf16(low); }
inline void cvt_rn_f16x2_e4m3x2(Word &to, Half from) {
    to = Word(f16_of_e4m3(from >> 8)) << 16 | f16_of_e4m3(from & 255);
}
inline void sub_f16x2(Word &to, Word one, Word other) {
    cvt_rn_f16x2_f32(to, from_f16(one >> 16) - from_f16(other >> 16), from_f16(one) - from_f16(other));
}
inline void sub_rn_bf16x2(Word &to, Word one, Word other) {
    cvt_rn_bf16x2_f32(to, from_bf16(one >> 16) - from_bf16(other >> 16), from_bf16(one) - from_bf16(other));
}

// A product of matrices, 16 rows by 8 columns, of numbers of BITS, K at a time: every lane has some numbers of each row
// and column, in words (PTX ISA, "Matrix Fragments").
template <int K, int BITS, class Sum, class Number>
void multiply(Sum *const (&sums)[4], const Word (&a)[4], const Word (&b)[2], Number number) {
    constexpr int EACH = 32 / BITS, SPAN = 4 * EACH;  // of a word, of the words of a row in four lanes
    Long own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    Lanes lanes = exchange(own, 6);
    for (int i = 0; i < 4; ++i) {
        int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        Common<Sum, double> sum = *sums[i];
        for (int k = 0; k < K; ++k) {
            int place = k % SPAN / EACH, shift = k % EACH * BITS;
            Word of_row = Word(lanes[row % 8 * 4 + place][row / 8 + k / SPAN * 2]);
            Word of_column = Word(lanes[column * 4 + place][4 + k / SPAN]);
            sum += number(of_row >> shift) * number(of_column >> shift);
        }
        *sums[i] = Sum(sum);
    }
}
inline double f16_number(Word bits) { return from_f16(Half(bits)); }
inline double bf16_number(Word bits) { return from_bf16(Half(bits)); }
inline double tf32_number(Word bits) { return __uint_as_float(bits & 0xffffe000u); }
inline double s8_number(Word bits) { return (signed char)bits; }
#define PRODUCT(name, K, BITS, Sum, number)                                                                     \
    inline void name(Sum &s, Sum &t, Sum &u, Sum &v, Word a, Word b, Word c, Word d, Word e, Word f) {           \
        multiply<K, BITS, Sum>({&s, &t, &u, &v}, {a, b, c, d}, {e, f}, number);                                  \
    }
PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 16, 16, float, f16_number)
PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 16, 16, float, bf16_number)
PRODUCT(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, 8, 32, float, tf32_number)
PRODUCT(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, 32, 8, int, s8_number)
inline void mma_sync_aligned_m8n8k16_row_col_s32_s8_s8_s32(int &s, int &t, Word a, Word b) {
    int none = 0;
    multiply<16, 8, int>({&s, &t, &none, &none}, {a, 0, 0, 0}, {b, 0}, s8_number);
}
inline void mma_sync_aligned_m16n8k128_row_col_s32_b1_b1_s32_and_popc(
    int &s, int &t, int &u, int &v, Word a, Word b, Word c
) {
    multiply<128, 1, int>({&s, &t, &u, &v}, {a, b, 0, 0}, {c, 0}, [](Word bits) { return int(bits & 1); });
}
#define SHORT_PRODUCT(name, number)                                                                             \
    inline void name(float &s, float &t, float &u, float &v, Word a, Word b, Word c) {                           \
        multiply<8, 16, float>({&s, &t, &u, &v}, {a, b, 0, 0}, {c, 0}, number);                                  \
    }
SHORT_PRODUCT(mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32, f16_number)
SHORT_PRODUCT(mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32, bf16_number)
