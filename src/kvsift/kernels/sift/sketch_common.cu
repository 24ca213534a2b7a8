// Constants and arguments of the step over sketches. A sub is 16 tokens of one page, the unit of everything before the
// attention; a member owns consecutive subs.

constexpr int SUB = 16, PAGE_SUBS = PAGE / SUB;
constexpr int TILE = 8;                       // subs that a warp weighs at a time
constexpr int STEPS = D / 32;                 // matrix products per mean: of 32 channels each
constexpr int WORDS = D / 32;                 // of a code of one bit per channel
constexpr int LAPS = (WORDS + 3) / 4;         // of a code: 128 channels are multiplied at once
constexpr int PASSES = (G + 3) / 4;           // four query heads are multiplied at a time
constexpr int QUERY_BITS = 7, MOST = 63;      // of a query's whole numbers that meet codes
constexpr int BINS = 4096, BINS_PER_OCTAVE = 128, COARSE = 64, FINE = BINS / COARSE;
constexpr u32 LOWEST = (127 - 22) * BINS_PER_OCTAVE;  // votes of 2^-22 and less fall in the first bin, of 2^10 in the last
constexpr u32 NO_BIN = 0;                     // votes fall in bins from 1 on
constexpr int OWN_BINS = BINS / THREADS;
constexpr float MOST_BASE = 60.f;             // larger ones would leave float32
constexpr int MEAN_UNIT = 16;                 // of a mean's whole numbers as bytes

struct Arguments {
    const u16 *queries, *keys, *values;
    const int *table, *lengths;
    const u8 *rows;            // sketches: codes, factors at FACTORS, key means at KEY_MEAN, SCALES, value means at VALUE_MEAN
    const int *spans;
    int *tokens, *counts;
    u16 *out;
    u64 *past;                 // [rows, G, 2, WARPS], if OVER_BUS: sums of sinks and window, as `tell` writes them
    u32 *bins, *coarse;        // [rows, members, BINS], votes in this bin and above; the same of every FINE-th bin
    u8 *spill;                 // [rows, members, spill_bytes], if SPILL
    u64 *parts;                // [rows, members, RECORD], numbers that `tell` writes
    u32 *launches;             // [rows, 2], launches that have ended, and those of them that ranked tokens
    u64 *visible, *estimated;  // [sequences]
    const float *sink;
    const int *dense_below;    // [sequences]: shorter ones are left out; or null
    i64 row_head, row_page, key_head, key_page, key_token, value_head, value_page, value_token;  // bytes
    i64 spill_bytes;
    int max_pages, num_kv_heads, members, own_subs;  // own_subs: most that a member has
    float scale, softcap;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/sketch_launch.py differs");

struct __align__(16) Shared {
    u16 queries[QUERY_NUMBERS];
    char halves[2][PASSES * 4][D];         // rotated queries as whole numbers of 16 bits: high and low byte
    u32 bits[PASSES * 4][QUERY_BITS + 1][4 * LAPS];  // the same up to MOST, bit by bit, and zeros
    float unit[G], fine_unit[G];           // of numbers up to MOST and of 16 bits
    float sum[G], noise[G];                // of the former; factor of a squared factor
    float past[G];                         // log2 of what sinks and window weigh
    float rest[WARPS * G];
    u32 of_warp[2 * WARPS];
    u32 sums[THREADS];
    u32 own_offset, own_quota, own_listed;
    u32 word[8];
};

// What lies in dynamic shared memory, one array behind the other; the last ones may lie in global memory.
struct Arrays {
    u32 *bins;      // [BINS]
    int *listed, *physical;  // [LIST], sinks, window and this member's chosen tokens, and the physical pages they are in
    int *pages;     // [own_subs], physical
    float *bases;   // [own_subs, G], as Head has them
    u16 *own_bins;  // [own_subs, SUB], the bin of each token's votes, NO_BIN of what may not be chosen
    float *unseen;  // [own_subs, G], weights of what is not visible of a sub
    float *scales;  // [own_subs], of mean values
    float *parts;   // of warps, over all the others, which have done their work then
    static __device__ __forceinline__ float *take(float *&from, int count) { return from += count, from - count; }
    __device__ __forceinline__ Arrays(const Arguments &a, char *shared) {
        bins = (u32 *)shared;
        listed = (int *)(bins + BINS), physical = listed + LIST;
        pages = physical + LIST;
        float *near = (float *)(pages + a.own_subs), *far = (float *)(a.spill + blockIdx.x * a.spill_bytes);
        bases = take(SPILL > 0 ? far : near, a.own_subs * G);
        own_bins = (u16 *)take(SPILL > 1 ? far : near, a.own_subs * SUB / 2);
        unseen = take(SPILL > 2 ? far : near, a.own_subs * G);
        scales = take(SPILL > 2 ? far : near, a.own_subs);
        parts = (float *)shared;
    }
};

// The subs of a member, and the tokens of a row that may be chosen.
struct Span {
    int first, stop, begin, count;  // tokens; first own sub, own subs
    // Which of four neighbouring tokens may be chosen, as bits.
    __device__ __forceinline__ u32 candidates(int token) const {
        u32 bits = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) bits |= token + j >= first && token + j < stop ? 1 << j : 0;
        return bits;
    }
    // Whether all tokens of a tile may be chosen.
    __device__ __forceinline__ bool inside(int tile) const {
        int token = (begin + tile * TILE) * SUB;
        return token >= first && token + TILE * SUB <= stop && (tile + 1) * TILE <= count;
    }
};

// What is at `from` of the first page's row, of another page's, by one instruction: rows are short.
__device__ __forceinline__ const u8 *of_page(const u8 *from, const Arguments &a, u32 page) {
    u64 at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(page), "r"((u32)a.row_page), "l"(from));
    return (const u8 *)at;
}

// A mean's whole numbers, in MEAN_UNITs: of the first channels of four bytes, or of the second.
__device__ __forceinline__ u32 mean_bytes(u32 pairs, bool second) {
    return (second ? pairs & 0xf0f0f0f0u : pairs << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
}

__device__ __forceinline__ int bin_of(float vote) {
    int bin = (int)(__float_as_uint(vote) / (0x800000 / BINS_PER_OCTAVE)) - (int)LOWEST;
    return min(max(bin, (int)NO_BIN + 1), BINS - 1);
}

__device__ __forceinline__ float power(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
