// Constants, arguments and the primitives of the step over pages.

constexpr int STAGE_BYTES = 4096;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;         // of a warp
constexpr int ROW_BYTES = FP8 ? 2 * D : 4 * D;           // of a summary
constexpr int ROW_LANES = ROW_BYTES / 16;                // lanes that copy one summary row
constexpr int ROWS_AT_ONCE = 32 / ROW_LANES;
constexpr int PAGES_PER_STAGE = STAGE_BYTES / ROW_BYTES;
constexpr int BLOCK_PAGES = 32;                          // scored one after another by a warp
constexpr int GROUP_PAGES = 8;                           // whose largest score is kept for the choice
constexpr int STAGES_PER_BLOCK = BLOCK_PAGES / PAGES_PER_STAGE;
constexpr int WIDTH = 2 * D;                             // numbers in a summary row
constexpr int STEPS = WIDTH / 16;                        // matrix products per score
constexpr int TERMS = G <= 4 ? 3 : 2;                    // 16-bit numbers that make up a float32 feature
constexpr int HEAD_ROWS = G <= 4 ? 4 : 8;                // rows of the feature matrix per term
constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS, OWN_BINS = BINS / THREADS;
constexpr int OWN_KEYS = KEYS / THREADS;                 // scores compared at once, by a thread

struct Arguments {
    const u16 *queries, *keys, *values;
    const int *table, *lengths;
    const unsigned char *summary;
    const int *spans;
    int *pages, *counts;
    u16 *out;
    float *scores, *maxima, *parts;
    u32 *flags;       // [rows, 2], zero: members that have scored, members that have attended
    u64 *visible;     // [sequences], or null: not counted
    const float *sink;
    const int *dense_below;  // [sequences]: shorter ones are left out; or null
    i64 summary_head, summary_page, key_head, key_page, key_token, value_head, value_page, value_token;  // bytes
    int max_pages, row_scores, num_kv_heads, members;
    float scale, softcap;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/sifted_attention.py differs");

struct __align__(16) Shared {
    float queries[G * D];        // times scale
    union {
        uint4 features[STEPS * 32];  // of the queries, as the left operand of the matrix products: by step and lane
        uint4 bins[BINS / 4];        // once everything is scored
    };
    int pages[CAPACITY], physical[CAPACITY], groups[KEYS / GROUP_PAGES];
    u32 of_warp[3 * WARPS];
    u32 word[8];
};

// Splits the largest 16-bit number off a feature, in the format of the matrix products.
__device__ __forceinline__ u16 split(float &x) {
    constexpr bool HALVES = HALF || FP8;  // bytes become float16 by one instruction
    u16 bits = HALVES ? to_half(x) : to_bfloat(x);
    x -= HALVES ? from_half(bits) : __uint_as_float((u32)bits << 16);
    return bits;
}

// 16 rows of features times 8 pages, 16 numbers at a time.
__device__ __forceinline__ void multiply(float (&sums)[4], const uint4 &f, u32 first, u32 second) {
#if HALF || FP8
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(f.x), "r"(f.y), "r"(f.z), "r"(f.w), "r"(first), "r"(second));
}

__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Query features of the summary kind, for each half of a row.
__device__ __forceinline__ float first_feature(float q) { return FIRST_FEATURE; }
__device__ __forceinline__ float second_feature(float q) { return SECOND_FEATURE; }
