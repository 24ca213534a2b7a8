// Constants, arguments and the primitives of the step over pages.

constexpr int STAGE_BYTES = 4096;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;         // of a warp
constexpr int ROW_BYTES = FP8 ? 2 * D : 4 * D;           // of a summary
constexpr int SLICE_BYTES = ROW_BYTES < 512 ? ROW_BYTES : 512;  // of a summary row in a stage
constexpr int SLICES = ROW_BYTES / SLICE_BYTES;
constexpr int SLICE_LANES = SLICE_BYTES / 16;            // lanes that copy one slice
constexpr int SLICES_AT_ONCE = 32 / SLICE_LANES;
constexpr int PAGES_PER_STAGE = STAGE_BYTES / SLICE_BYTES;
constexpr int BLOCK_PAGES = 32;                          // scored one after another by a warp
constexpr int GROUP_PAGES = 8;                           // whose largest score is kept for the choice
constexpr int STAGES_PER_BLOCK = BLOCK_PAGES / PAGES_PER_STAGE * SLICES;
constexpr int WIDTH = 2 * D;                             // numbers in a summary row
constexpr int STEPS = WIDTH / 16;                        // matrix products per score
constexpr int TERMS = G <= 4 ? 3 : 2;                    // 16-bit numbers that make up a float32 feature
constexpr int HEAD_ROWS = G <= 4 ? 4 : G <= 8 ? 8 : 16;  // rows of the feature matrix per term
constexpr int PASSES = HEAD_ROWS == 16 ? TERMS : 1;      // feature matrices of 16 rows
constexpr bool HELD = PASSES == 1 && STEPS <= 16;        // registers have room for the features
constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS, OWN_BINS = BINS / THREADS;
constexpr int OWN_KEYS = KEYS / THREADS;                 // scores compared at once, by a thread

struct Arguments {
    const u16 *queries, *keys, *values;
    const int *table, *lengths;
    const unsigned char *summary;
    const int *spans;
    int *pages, *counts;
    u16 *out;
    float *scores, *maxima;
    u64 *parts;       // [rows, members, RECORD], numbers that `tell` writes
    u32 *launches;    // [rows, 2], launches that have ended, and members that have ever scored
    u64 *visible;     // [sequences], or null: not counted
    const float *sink;
    const int *dense_below;  // [sequences]: shorter ones are left out; or null
    i64 summary_head, summary_page, key_head, key_page, key_token, value_head, value_page, value_token;  // bytes
    int max_pages, row_scores, num_kv_heads, members;
    float scale, softcap;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/sifted_attention.py differs");

struct __align__(16) Shared {
    u16 queries[QUERY_NUMBERS];
    union {
        uint4 features[PASSES * STEPS * 32];  // of the queries, the products' left operand: by pass, step and lane
        struct {                              // once everything is scored
            uint4 bins[BINS / 4];
            int pages[CAPACITY], physical[CAPACITY], groups[KEYS / GROUP_PAGES];
        };
    };
    u32 of_warp[3 * WARPS];
    u32 word[8];
};

constexpr bool HALVES = HALF || FP8;  // format of the products with summaries: bytes become float16 by one instruction

// Splits the largest 16-bit number off a feature, in the format of the matrix products.
__device__ __forceinline__ u16 split(float &x) {
    u16 bits = HALVES ? to_half(x) : to_bfloat(x);
    x -= HALVES ? from_half(bits) : __uint_as_float((u32)bits << 16);
    return bits;
}

__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Query features of the summary kind, for each half of a row.
__device__ __forceinline__ float first_feature(float q) { return FIRST_FEATURE; }
__device__ __forceinline__ float second_feature(float q) { return SECOND_FEATURE; }
