// What both single launches use: types, conversions, sums over a warp, waiting for other blocks.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = WARPS * 32;
constexpr int UNIT = 8;                   // tokens attended together by a warp
constexpr int PARTS = D / 32;             // of eight keys, a lane reads as many times eight numbers
constexpr int HEAD_TILES = (G + 7) / 8;        // of eight query heads
constexpr int RECORD = G * (D + 2) + MORE;     // numbers a member leaves: sums, largest logits, weights, what else there is
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
__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u16 rounded(float x) { return HALF ? to_half(x) : to_bfloat(x); }
__device__ __forceinline__ u32 rounded2(float low, float high) {
    return HALF ? to_half2(low, high) : to_bfloat2(low, high);
}

// Eight numbers of a key or value, as they lie in the cache.
#if KV8
typedef uint2 Packed;
#else
typedef uint4 Packed;
#endif

__device__ __forceinline__ uint4 pairs_of(const uint4 &packed) { return packed; }

// Two pairs of float16 from four numbers of a byte each.
__device__ __forceinline__ void widen(u32 four, u32 &first, u32 &second) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"((u16)four));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"((u16)(four >> 16)));
}

__device__ __forceinline__ u32 from_half2(u32 pair) {
    return HALF ? pair : to_bfloat2(from_half(pair & 0xffff), from_half(pair >> 16));
}

// Two pairs from four whole numbers of a byte each. Behind this prefix the lower seven bits are a number 2^p + x, and the
// sign 2^p or 2^p + 128: their difference is exact.
__device__ __forceinline__ u32 pair_of_codes(u32 four, u32 selector) {
    u32 both = __byte_perm(four, HALF ? 0x64646464u : 0x43434343u, selector), pair;
    u32 lower = both & 0xff7fff7fu, sign = both & 0xff80ff80u;
    if (HALF) asm("sub.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(lower), "r"(sign));
    else asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(lower), "r"(sign));
    return pair;
}

__device__ __forceinline__ uint4 pairs_of(const uint2 &packed) {
    uint4 pairs;
    if (CODED)
        return make_uint4(
            pair_of_codes(packed.x, 0x4140), pair_of_codes(packed.x, 0x4342), pair_of_codes(packed.y, 0x4140),
            pair_of_codes(packed.y, 0x4342)
        );
    widen(packed.x, pairs.x, pairs.y), widen(packed.y, pairs.z, pairs.w);
    return make_uint4(from_half2(pairs.x), from_half2(pairs.y), from_half2(pairs.z), from_half2(pairs.w));
}

// 16 rows times 8 columns, 16 numbers at a time, of float16 (HALVES) or bfloat16.
template <bool HALVES>
__device__ __forceinline__ void multiply16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (HALVES)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same, eight numbers at a time, in the format of the cache.
__device__ __forceinline__ void multiply8(float (&sums)[4], u32 a0, u32 a1, u32 b0) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(b0));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(b0));
}

// Scales of a page in 8 bits lie behind its codes (kernels/coded_pages.py).
constexpr int SCALES_OF_PAGE = PAGE * D;
struct Scales {
    float2 keys, values;  // of two tokens
};

// A warp's vector times the rotation of kernels.sketch: channel 32 i + lane is x[i].
__device__ __forceinline__ void turn(float (&x)[D / 32]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        u32 channel = i * 32 + lane;
        x[i] = (channel * 0x9E3779B1u >> 15 & 1 ? -x[i] : x[i]) * rsqrtf((float)D);
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1)
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            float other = __shfl_xor_sync(~0u, x[i], bit);
            x[i] = lane & bit ? other - x[i] : other + x[i];
        }
#pragma unroll
    for (int bit = 1; bit < D / 32; bit <<= 1)
#pragma unroll
        for (int i = 0; i < D / 32; ++i)
            if (!(i & bit)) {
                float one = x[i], other = x[i | bit];
                x[i] = one + other, x[i | bit] = one - other;
            }
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
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int other = 16; other; other >>= 1) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

// A number that the compiler knows to be that of a whole warp.
__device__ __forceinline__ int warp_number() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

__device__ __forceinline__ u32 sum_before(const u32 *of_warp) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    return __reduce_add_sync(~0u, lane < warp ? of_warp[lane] : 0);
}
