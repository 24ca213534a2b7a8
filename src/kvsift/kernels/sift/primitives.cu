// What both single launches use: types, conversions, sums over a warp, waiting for other blocks.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = WARPS * 32;
constexpr int UNIT = 8;                                  // tokens attended together by a warp
constexpr int TOKEN_LANES = D / 8;                       // lanes that read one key
constexpr int TOKENS_AT_ONCE = 32 / TOKEN_LANES;
constexpr int TOKEN_STEPS = UNIT / TOKENS_AT_ONCE;
// Floats a member leaves: sums, largest logits, weights, tokens seen, and what else the step keeps.
constexpr int RECORD = (G * (D + 2) + 1 + MORE + 3) / 4 * 4;
constexpr float LOG2E = 1.4426950408889634f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float as_float(u32 bits16) {
    float x;
    if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits16));
    else x = __uint_as_float(bits16 << 16);
    return x;
}

__device__ __forceinline__ u16 to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ u16 to_bfloat(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float from_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ __forceinline__ u32 to_bfloat2(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u16 rounded(float x) { return HALF ? to_half(x) : to_bfloat(x); }

// The numbers of a 16-bit pair, without moving the upper one down.
__device__ __forceinline__ void unpack2(u32 pair, float &low, float &high) {
#if HALF
    low = as_float(pair & 0xffff), high = as_float(pair >> 16);
#else
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
#endif
}

// Eight numbers of a key or value, as they lie in the cache.
#if KV8
typedef uint2 Packed;
#else
typedef uint4 Packed;
#endif

__device__ __forceinline__ void unpack_row(const uint4 &packed, float *x) {
    unpack2(packed.x, x[0], x[1]), unpack2(packed.y, x[2], x[3]);
    unpack2(packed.z, x[4], x[5]), unpack2(packed.w, x[6], x[7]);
}

// Two pairs of float16 from four numbers of a byte each.
__device__ __forceinline__ void widen(u32 four, u32 &first, u32 &second) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"((u16)four));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"((u16)(four >> 16)));
}

__device__ __forceinline__ void unpack_row(const uint2 &packed, float *x) {
    u32 pairs[4];
    widen(packed.x, pairs[0], pairs[1]), widen(packed.y, pairs[2], pairs[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = from_half(pairs[i] & 0xffff), x[2 * i + 1] = from_half(pairs[i] >> 16);
}

// What is read once must not push tables, scores and code out of the L2 cache.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int other = 16; other; other >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
    return x;
}

__device__ __forceinline__ u32 sum_before(const u32 *of_warp) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    return __reduce_add_sync(~0u, lane < warp ? of_warp[lane] : 0);
}
